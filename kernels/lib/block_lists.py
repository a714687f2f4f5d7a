"""List the blocks of a mask that are visited: for each row of blocks how many, and their columns, as FlexAttention reads it.

    count[b, 0, i]      = Σ_j set[b, 0, i, j]
    columns[b, 0, i, :] = the j that are set, in order, then the others, in order

An op, because its results have the strides that it says. FlexAttention's kernels step from one batch to the next by the
stride of the dim of heads, of size 1, and Inductor lays out what it computes itself as it likes: that stride can be n times
as large, and the kernels read behind the end (torch 2.11 to 2.13, wherever nothing needs these tensors for a backward).

Shapes     partial, full: (b or 1, 1, n, m), bool, either may be broadcast; count: (b, 1, n); columns: (b, 1, n, m), int32;
           for each block of keys n and m swapped. All contiguous.
Traffic    n·m flags of both read twice, 16 bytes for each written: some microseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fx_fusion.kernels.lib.integers import next_power_of_2
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op
from fx_fusion.ops.on_cpu import interpreting


@triton.jit
def _store_list(chosen, live, count_ptr, columns_ptr, row, at, width):
    """Store the count and the columns of one row of ``width`` flags."""
    rest = live & (chosen == 0)
    total = tl.sum(chosen.to(tl.int32), 0)
    behind = total + tl.cumsum(rest.to(tl.int32), 0) - 1
    place = tl.where(chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1, behind)
    tl.store(columns_ptr + row * width + place, at, live)
    tl.store(count_ptr + row, total)


@triton.jit
def _block_lists_kernel(
    partial_ptr, full_ptr, partial_count_ptr, partial_columns_ptr, full_count_ptr, full_columns_ptr, rows, width,
    batch_stride, row_stride, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the flags of row program_id(0) of ``rows`` in each batch."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < width
    flags = row // rows * batch_stride + row % rows * row_stride + at * stride
    partial, full = tl.load(partial_ptr + flags, live, 0) != 0, tl.load(full_ptr + flags, live, 0) != 0
    _store_list(partial, live, partial_count_ptr, partial_columns_ptr, row, at, width)
    _store_list(full, live, full_count_ptr, full_columns_ptr, row, at, width)


def _lists(partial: Tensor, full: Tensor) -> tuple[Tensor, ...]:
    """The counts and columns of each row of both."""
    batch, _, rows, width = partial.shape
    if partial.numel() == 0 or not (partial.is_cuda or interpreting()):
        return tuple(t for flags in (partial, full) for t in _reference(flags))
    shapes = (partial.shape[:3], partial.shape) * 2
    made = [torch.empty(shape, dtype=torch.int32, device=partial.device) for shape in shapes]
    strides = partial.stride(0), partial.stride(2), partial.stride(3)
    block = next_power_of_2(width)
    launch(_block_lists_kernel, (batch * rows,), partial, full, *made, rows, width, *strides, BLOCK=block, num_warps=4)
    return tuple(made)


def _reference(flags: Tensor) -> tuple[Tensor, Tensor]:
    flags = flags.to(torch.int32, memory_format=torch.contiguous_format)
    columns = torch.argsort(flags, dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), columns.to(torch.int32)


def _block_lists(partial: Tensor, full: Tensor) -> tuple[Tensor, ...]:
    # One layout for both: the kernel reads them by the same strides.
    partial, full = (t.contiguous() for t in torch.broadcast_tensors(partial, full))
    return *_lists(partial, full), *_lists(partial.transpose(-1, -2), full.transpose(-1, -2))


def _fake(partial: Tensor, full: Tensor) -> tuple[Tensor, ...]:
    batch, one, rows, columns = torch.broadcast_shapes(partial.shape, full.shape)
    shapes = ((batch, one, rows), (batch, one, rows, columns)) * 2, ((batch, one, columns), (batch, one, columns, rows)) * 2
    return tuple(partial.new_empty(shape, dtype=torch.int32) for both in shapes for shape in both)


_FOUR = "Tensor partial{0}, Tensor partial_columns{0}, Tensor full{0}, Tensor full_columns{0}"
block_lists = plain_op(
    "block_lists",
    f"(Tensor partial, Tensor full) -> ({_FOUR.format('_of_queries')}, {_FOUR.format('_of_keys')})",
    _block_lists,
    _fake,
)
