"""Embedding: the gather as it is, and a backward without a buffer of the table's size in fp32.

    y[i] = weight[ids[i]]              dweight[v] = Σ_{i: ids[i] = v} dy[i]        0 for padding_idx

The ids are sorted (few are ranked by comparing all with all, many by a stable radix sort), so the rows of one id are a
segment: a program adds up a segment in fp32 and writes the sum once, in the weight's dtype. Rows that no id names are
written as zeros by the same kernel. Segments longer than a piece (a padding token, the head of a Zipf distribution) are
added up in pieces by many programs first, where ids are many 16 pieces of one id before they are added to others. Nothing
depends on the order in which programs run: the result is the same in every run.

Shapes     ids: any shape, integers; weight: (v, h); y: (*ids.shape, h).
Dtypes     weight bf16 | fp16 | fp32; sums in fp32, rounded once.
Saved      ids.
Traffic    backward: dy once, dweight once, and the ids (ranked: n / 8 times, out of the cache); a row of fp32 for each piece
           of a long segment, written and read.
Source     segments of sorted indices, as torch's own CUDA kernel for embedding_dense_backward sorts them.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fx_fusion.kernels.lib.launch import cdiv, launch, next_power_of_2
from fx_fusion.ops.fused_op import interpreting, plain_op, register_autograd, trace_launches

_GROUP = tl.constexpr(16)  # pieces that are added up before they are added to others
_GROUPED = 4096  # rows from which on that pays
_RANKED = 8192  # ids up to which comparing all with all is faster than a radix sort


@triton.jit
def _rank_kernel(ids_ptr, sorted_ptr, order_ptr, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Ids to their places in sorted order, equal ones in the order in which they come: how many are smaller, and how many
    of those before it are equal."""
    first = tl.program_id(0) * ROWS
    i = first + tl.arange(0, ROWS)
    own = tl.load(ids_ptr + i, i < n, 0).to(tl.int32)
    smaller = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = tl.load(ids_ptr + j, j < n, 2**31 - 1).to(tl.int32)[None, :]
        if (start < first + ROWS) & (start + BLOCK > first):
            smaller += (other < own[:, None] + (j[None, :] < i[:, None]).to(tl.int32)).to(tl.int32)
        else:
            smaller += (other < own[:, None] + tl.where(start < first, 1, 0)).to(tl.int32)
    place = tl.sum(smaller, 1)
    tl.store(sorted_ptr + place, own, i < n)
    tl.store(order_ptr + place, i, i < n)


@triton.jit
def _sum_of_rows(
    ptr, order_ptr, begin, end, cols, h, stride, INDIRECT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of rows ``begin`` to ``end``, INDIRECT: of those whose numbers stand there in ``order``; some columns."""
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for row in tl.range(begin, end, ROWS, num_stages=STAGES):
        i = row + tl.arange(0, ROWS)
        source = i
        if INDIRECT:
            source = tl.load(order_ptr + i, i < end, 0)
        mask = (i < end)[:, None] & (cols < h)[None, :]
        total += tl.load(ptr + source.to(tl.int64)[:, None] * stride + cols[None, :], mask, 0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _long_segments_kernel(
    dy_ptr, order_ptr, sorted_ptr, start_ptr, parts_ptr, n, h, dy_stride, lowest, padding,
    PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of piece p of the sorted rows, at ``parts[side, p]``: the sum of its rows that belong to the segment of its first
    row (side 0), or of its last one if that is another (side 1), where those segments are long."""
    piece = tl.program_id(0).to(tl.int64)
    side = tl.program_id(2)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = piece * PIECE
    last = tl.minimum(first + PIECE, n)
    v = tl.load(sorted_ptr + tl.where(side == 0, first, last - 1)).to(tl.int64) - lowest
    begin = tl.load(start_ptr + v)
    end = tl.load(start_ptr + v + 1)
    if (end - begin > PIECE) & (v != padding) & ((side == 0) | (begin > first)):
        low, high = tl.maximum(begin, first), tl.minimum(end, last)
        total = _sum_of_rows(dy_ptr, order_ptr, low, high, cols, h, dy_stride, True, ROWS, BLOCK, STAGES)
        tl.store(parts_ptr + (side * tl.num_programs(0) + piece) * h + cols, total, cols < h)


@triton.jit
def _groups_kernel(
    sorted_ptr, parts_ptr, h, lowest, padding, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """_GROUP pieces of one segment: their sum in place of the part of the first."""
    first = tl.program_id(0).to(tl.int64) * _GROUP
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(sorted_ptr + first * PIECE).to(tl.int64) - lowest
    end = tl.load(sorted_ptr + (first + _GROUP) * PIECE - 1).to(tl.int64) - lowest
    if (v == end) & (v != padding):
        total = _sum_of_rows(parts_ptr, sorted_ptr, first, first + _GROUP, cols, h, h, False, ROWS, BLOCK, STAGES)
        tl.store(parts_ptr + first * h + cols, total, cols < h)


@triton.jit
def _sum_of_pieces(
    parts_ptr, first, stop, begin, end, cols, h, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of pieces ``first`` to ``stop`` of rows ``begin`` to ``end``; what whole groups of them hold stands in their first.
    One loop over pieces and groups: three take more registers, also where no segment is long."""
    low = tl.cdiv(begin, _GROUP * PIECE)
    before, groups = low * _GROUP - first, tl.maximum(end // (_GROUP * PIECE) - low, 0)
    count = stop - first - groups * (_GROUP - 1)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in tl.range(0, count, ROWS, num_stages=STAGES):
        i = step + tl.arange(0, ROWS)
        piece = first + i + (_GROUP - 1) * tl.minimum(tl.maximum(i - before, 0), groups)
        mask = (i < count)[:, None] & (cols < h)[None, :]
        total += tl.load(parts_ptr + piece.to(tl.int64)[:, None] * h + cols[None, :], mask, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _segments_kernel(
    dy_ptr, order_ptr, start_ptr, parts_ptr, dw_ptr, pieces, h, dy_stride, padding, GROUPED: tl.constexpr,
    PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(start_ptr + v)
    end = tl.load(start_ptr + v + 1)
    if v == padding:
        end = begin
    if end - begin > PIECE:
        # Pieces first .. last hold it; it is on side 1 of the first of them unless it starts where that does.
        first, last = begin // PIECE, (end - 1) // PIECE
        inside = tl.where(first * PIECE < begin, first + 1, first)
        if GROUPED:
            total = _sum_of_pieces(parts_ptr, inside, last + 1, begin, end, cols, h, PIECE, ROWS, BLOCK, STAGES)
        else:
            total = _sum_of_rows(parts_ptr, order_ptr, inside, last + 1, cols, h, h, False, ROWS, BLOCK, STAGES)
        at = (pieces + first).to(tl.int64)
        total += tl.load(parts_ptr + at * h + cols, cols < tl.where(inside > first, h, 0), 0.0)
    else:
        total = _sum_of_rows(dy_ptr, order_ptr, begin, end, cols, h, dy_stride, True, ROWS, BLOCK, STAGES)
    tl.store(dw_ptr + v * h + cols, total.to(dw_ptr.dtype.element_ty), cols < h)


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
    ordered, order, lowest = _sorted(ids.reshape(-1), v)
    bounds = torch.arange(lowest, lowest + v + 1, dtype=ordered.dtype, device=ids.device)
    start = torch.searchsorted(ordered, bounds, out_int32=n <= 2**30)
    shape = _shape(n, h)
    pieces, blocks = cdiv(n, shape["PIECE"]), cdiv(h, shape["BLOCK"])
    parts = torch.empty((2, pieces, h), dtype=torch.float32, device=dy.device)
    if pieces > 1:
        launch(
            _long_segments_kernel, (pieces, blocks, 2), rows, order, ordered, start, parts, n, h, rows.stride(0), lowest,
            int(padding_idx), **shape,
        )  # fmt: skip
    groups = n // (_GROUP.value * shape["PIECE"]) if n >= _GROUPED else 0
    if groups:
        launch(_groups_kernel, (groups, blocks), ordered, parts, h, lowest, int(padding_idx), **shape)
    launch(
        _segments_kernel, (v, blocks), rows, order, start, parts, dweight, pieces, h, rows.stride(0), int(padding_idx),
        GROUPED=groups > 0, **shape,
    )  # fmt: skip
    return dweight


def _sorted(ids, v: int):
    """``-> (sorted, order, lowest)``: ids less than v as ``torch.sort(ids, stable=True)`` has them, plus ``lowest``."""
    n = ids.shape[0]
    if 0 < n <= _RANKED and v < 2**31:
        ordered, order = (torch.empty(n, dtype=torch.int32, device=ids.device) for _ in range(2))
        launch(_rank_kernel, (cdiv(n, 8),), ids.contiguous(), ordered, order, n, ROWS=8, BLOCK=1024, num_warps=4)
        return ordered, order, 0
    lowest = -(2**15) if v < 2**16 else 0  # a radix sort takes a pass for each 8 bits
    short = torch.int16 if lowest else torch.int32 if v < 2**31 else torch.int64
    return *torch.sort((ids + lowest).to(short), stable=True), lowest


def _shape(n: int, h: int) -> dict:
    """Of the sums of n rows, by what was fastest on an H200 (``bench.tune tables``): short pieces end soon, many are many
    sums to add up."""
    piece = 32 if n <= 16384 else 64 if n <= 65536 else 128
    return {"PIECE": piece, "ROWS": 4, "BLOCK": min(next_power_of_2(h), 1024), "STAGES": 1, "num_warps": 4}


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
