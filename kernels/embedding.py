"""Embedding: the gather as it is, and a backward without a buffer of the table's size in fp32.

    y[i] = weight[ids[i]]              dweight[v] = Σ_{i: ids[i] = v} dy[i]        0 for padding_idx

The ids are sorted (a stable radix sort), so the rows of one id are a segment: a program adds up the rows of a piece of
segment in fp32 and writes the sum once, in the weight's dtype. Rows that no id names are written as zeros by the same
kernel. A segment longer than ``_LONG`` (a padding token, the head of a Zipf distribution) is added up in pieces by many
programs first. Nothing depends on the order in which programs run: the result is the same in every run.

Shapes     ids: any shape, integers; weight: (v, h); y: (*ids.shape, h).
Dtypes     weight bf16 | fp16 | fp32; sums in fp32, rounded once.
Saved      ids.
Traffic    backward: dy once, dweight once, and the ids.
Source     segments of sorted indices, as torch's own CUDA kernel for embedding_dense_backward sorts them.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fx_fusion.kernels.launch import cdiv, launch, next_power_of_2
from fx_fusion.op import interpreting, plain_op, register_autograd, trace_launches

_LONG = 256  # rows of a segment that one program adds up by itself


@triton.jit
def _long_segments_kernel(
    dy_ptr, order_ptr, sorted_ptr, start_ptr, parts_ptr, n, h, dy_stride, PIECE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Piece p of the sorted rows: the sum of its rows that belong to the segment of its first row, and of those that
    belong to the segment of its last one, if those segments are long."""
    piece = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = piece * PIECE
    last = tl.minimum(first + PIECE, n)
    for side in tl.static_range(2):
        at = first if side == 0 else last - 1
        v = tl.load(sorted_ptr + at)
        begin = tl.load(start_ptr + v)
        end = tl.load(start_ptr + v + 1)
        # The last row's segment only where it is not the first row's.
        other = (side == 0) | (begin > first)
        if (end - begin > PIECE) & other:
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            low = tl.maximum(begin, first)
            high = tl.minimum(end, last)
            for row in range(low, high, ROWS):
                i = row + tl.arange(0, ROWS)
                source = tl.load(order_ptr + i, i < high, 0).to(tl.int64)
                mask = (i < high)[:, None] & (cols < h)[None, :]
                total += tl.load(dy_ptr + source[:, None] * dy_stride + cols[None, :], mask, 0.0).to(tl.float32)
            tl.store(parts_ptr + (2 * piece + side).to(tl.int64) * h + cols, tl.sum(total, 0), cols < h)


@triton.jit
def _segments_kernel(
    dy_ptr, order_ptr, start_ptr, parts_ptr, dw_ptr, h, dy_stride, padding, PIECE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(start_ptr + v)
    end = tl.load(start_ptr + v + 1)
    if v == padding:
        end = begin
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if end - begin > PIECE:
        # Pieces first .. last hold it; it is on side 1 of the first piece unless it starts there.
        first = begin // PIECE
        last = (end - 1) // PIECE
        for start in range(first, last + 1, ROWS):
            piece = start + tl.arange(0, ROWS)
            side = tl.where(piece * PIECE < begin, 1, 0)
            mask = (piece <= last)[:, None] & (cols < h)[None, :]
            total += tl.load(parts_ptr + (2 * piece + side).to(tl.int64)[:, None] * h + cols[None, :], mask, 0.0)
    else:
        for row in range(begin, end, ROWS):
            i = row + tl.arange(0, ROWS)
            source = tl.load(order_ptr + i, i < end, 0).to(tl.int64)
            mask = (i < end)[:, None] & (cols < h)[None, :]
            total += tl.load(dy_ptr + source[:, None] * dy_stride + cols[None, :], mask, 0.0).to(tl.float32)
    tl.store(dw_ptr + v * h + cols, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), cols < h)


def _gather(ids, weight, padding_idx):
    return F.embedding(ids, weight)


def _fwd(ids, weight, padding_idx):
    y = _fake(ids, weight, padding_idx)  # no view: it may be written to in place
    torch.index_select(weight, 0, ids.reshape(-1), out=y.view(-1, weight.shape[1]))
    return y


def _bwd(dy, ids, v, padding_idx):
    h = dy.shape[-1]
    dweight = _fake_bwd(dy, ids, v, padding_idx)
    if not dweight.numel():
        return dweight
    rows = dy.reshape(-1, h)
    rows = rows if rows.stride(-1) == 1 or h == 1 else rows.contiguous()
    n = rows.shape[0]
    small = ids.reshape(-1).to(torch.int32 if v < 2**31 else torch.int64)  # half the passes of the radix sort
    ordered, order = torch.sort(small, stable=True)
    bounds = torch.arange(v + 1, dtype=small.dtype, device=ids.device)
    start = torch.searchsorted(ordered, bounds, out_int32=n < 2**31)
    block = min(next_power_of_2(h), 1024)
    pieces = cdiv(n, _LONG)
    parts = torch.empty((2 * pieces, h), dtype=torch.float32, device=dy.device)
    shape = {"PIECE": _LONG, "ROWS": 4, "BLOCK": block, "num_warps": 4}
    if n > _LONG:
        launch(
            _long_segments_kernel, (pieces, cdiv(h, block)), rows, order, ordered, start, parts, n, h,
            rows.stride(0), **shape,
        )  # fmt: skip
    launch(
        _segments_kernel, (v, cdiv(h, block)), rows, order, start, parts, dweight, h, rows.stride(0),
        int(padding_idx), **shape,
    )  # fmt: skip
    return dweight


def _bwd_on_cpu(dy, ids, v, padding_idx):
    index = ids.reshape(-1)
    rows = dy.reshape(-1, dy.shape[-1])
    kept = rows if padding_idx < 0 else torch.where((index == padding_idx)[:, None], 0.0, rows)
    wide = torch.zeros(v, dy.shape[-1], dtype=torch.promote_types(dy.dtype, torch.float32), device=dy.device)
    return wide.index_add_(0, index, kept.to(wide.dtype)).to(dy.dtype)


def _fake(ids, weight, padding_idx):
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _fake_bwd(dy, ids, v, padding_idx):
    return dy.new_empty((v, dy.shape[-1]))


embedding = plain_op("embedding", "(Tensor ids, Tensor weight, int padding_idx) -> Tensor y", _fwd, _fake)
embedding_bwd = plain_op(
    "embedding_bwd",
    "(Tensor dy, Tensor ids, int v, int padding_idx) -> Tensor dweight",
    lambda dy, *rest: _bwd(dy, *rest) if dy.is_cuda or interpreting() else _bwd_on_cpu(dy, *rest),
    _fake_bwd,
)
trace_launches(embedding, _gather)  # as Inductor's own
trace_launches(embedding_bwd, _bwd)


def _setup_context(ctx, inputs, output):
    ids, weight, padding_idx = inputs
    ctx.save_for_backward(ids)  # not the table: it may be updated before the backward
    ctx.v, ctx.padding_idx = weight.shape[0], padding_idx


def _backward(ctx, dy):
    (ids,) = ctx.saved_tensors
    return None, embedding_bwd(dy, ids, ctx.v, ctx.padding_idx), None


register_autograd("embedding", _backward, _setup_context)
