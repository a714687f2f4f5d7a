"""What every launcher needs: rows of a tensor, the number of multiprocessors, block sizes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


class NotTraceable(Exception):
    """A launcher can't be traced for these inputs: its op stays opaque."""


_traced: ContextVar[bool] = ContextVar("traced", default=False)  # of this thread: another one may launch for real


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Launches become nodes of the graph that is being traced: Inductor then launches the kernels itself."""
    before = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(before)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, traced or for real. A kernel casts its float arguments to fp32: Triton's own
    launcher passes them so, Inductor passes fp64, which would make the arithmetic fp64."""
    if _traced.get():
        torch.library.wrap_triton(kernel)[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def refuse_tracing() -> None:
    """A launcher whose host does more than launch: its op stays a call."""
    if _traced.get():
        raise NotTraceable


def as_rows(x: Tensor) -> Tensor:
    """``(..., n) -> (m, n)`` with unit stride along n; copies only where no view of it is possible."""
    n = x.shape[-1]
    rows = x.reshape(-1, n) if x.numel() else x.new_empty(0, n)
    return rows if rows.stride(-1) == 1 or n == 1 else rows.contiguous()


def row_order(x: Tensor) -> list[int]:
    """Dims from the largest stride to the smallest, the last dim last: ``x.permute(order)`` walks x as it lies in
    memory, so a transposed tensor (heads before positions) is neither copied nor laid out anew."""
    leading = sorted(range(x.dim() - 1), key=lambda d: -x.stride(d))
    return [*leading, x.dim() - 1]


def write_back(x: Tensor, rows: Tensor, order: list[int]) -> None:
    """``rows`` was to be ``as_rows(x.permute(order))``; where no such view exists it is a copy, and goes back to x."""
    laid_out = x.permute(order)
    if laid_out.is_contiguous():
        return
    refuse_tracing()
    if rows.data_ptr() != x.data_ptr():
        laid_out.copy_(rows.view(laid_out.shape))


def stages_ahead(bytes_a_stage: int, x: Tensor) -> int:
    """Stages of a loop whose loads run ahead through shared memory: up to three, as many as fit on x's device. The one that
    is computed with lies in registers."""
    return max(1, min(3, 1 + (shared_memory(x) - (27 << 10)) // bytes_a_stage))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """SMs of the tensor's device; 2 in the interpreter, so that several programs share the rows in tests too."""
    return _multiprocessors(x.device.index or 0) if x.is_cuda else 2


@functools.cache
def _shared_memory(index: int) -> int:
    return getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 48 << 10)


def shared_memory(x: Tensor) -> int:
    """Bytes that a program can have on the tensor's device; those of an H200 where it is on none."""
    return _shared_memory(x.device.index or 0) if x.is_cuda else 227 << 10


@triton.jit
def _column_sums_kernel(
    parts_ptr, a_ptr, b_ptr, c_ptr, d_ptr, rows, n,
    HAS_A: tl.constexpr, HAS_B: tl.constexpr, HAS_C: tl.constexpr, HAS_D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Matrix number program_id(1) of ``parts``, summed over its rows, into the output of that number."""
    which = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = cols < n
    at = parts_ptr + which.to(tl.int64) * rows * n + cols[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(at + r.to(tl.int64) * n, (r < rows) & live[None, :], 0.0)
    out = tl.sum(total, 0)
    if HAS_A:
        if which == 0:
            tl.store(a_ptr + cols, out.to(a_ptr.dtype.element_ty), live)
    if HAS_B:
        if which == 1:
            tl.store(b_ptr + cols, out.to(b_ptr.dtype.element_ty), live)
    if HAS_C:
        if which == 2:
            tl.store(c_ptr + cols, out.to(c_ptr.dtype.element_ty), live)
    if HAS_D:
        if which == 3:
            tl.store(d_ptr + cols, out.to(d_ptr.dtype.element_ty), live)


def column_sums(parts: Tensor, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """``parts[i].sum(0)`` of up to four contiguous fp32 matrices, accumulated in fp32, rounded once to ``dtypes[i]``; None
    where that is None. One launch for all."""
    _, rows, n = parts.shape
    outs = [None if d is None else torch.empty(n, dtype=d, device=parts.device) for d in dtypes]
    given = {f"HAS_{'ABCD'[i]}": i < len(outs) and outs[i] is not None for i in range(4)}
    pointers = [parts if i >= len(outs) or outs[i] is None else outs[i] for i in range(4)]
    if any(given.values()):
        launch(
            _column_sums_kernel, (cdiv(n, 32), len(outs)), parts, *pointers, rows, n, ROWS=64, BLOCK=32, num_warps=4,
            **given,
        )  # fmt: skip
    return outs
