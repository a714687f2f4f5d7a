"""Embedding: the gather as it is, and a backward without a buffer of the table's size in fp32.

    y[i] = weight[ids[i]]              dweight[v] = Σ_{i: ids[i] = v} dy[i]        0 for padding_idx

The ids are sorted (up to 8192 ids by ranking, comparing all with all; more by a stable radix sort), so the rows dy[i] of
one id v are a *segment* of the sorted rows. One program sums a segment in fp32 and writes the sum once, in the weight's
dtype; the same kernel writes zeros for an empty segment. The sorted rows are also cut into *pieces* of PIECE rows, and the
sums over a segment longer than that (a padding token, the head of a Zipf distribution) are computed piece by piece, by many
programs, then combined; among many ids GROUP pieces of one segment are first combined to one. No sum depends on the order
in which programs run: the result is the same in every run.

Shapes     ids: any shape, integers; weight: (v, h); y: (*ids.shape, h).
Dtypes     weight bf16 | fp16 | fp32; sums in fp32, rounded once.
Saved      ids.
Traffic    backward: dy once, dweight once, and the ids (ranked: n / 8 times, from the cache); for each piece of a long
           segment one row of fp32, written and read.
Source     segments of sorted indices, as in torch's own CUDA kernel for embedding_dense_backward.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.ops.launch import launch, refuse_symbols
from fx_fusion.ops.layouts import stored_once
from fx_fusion.ops.library import plain_op, register_autograd, trace_launches
from fx_fusion.ops.on_cpu import interpreting

GROUP = tl.constexpr(16)  # pieces of one segment that are combined to one
_GROUPED_ROWS = 4096  # rows from which on groups of pieces are faster
_RANKED_IDS = 8192  # ids up to which comparing all with all is faster than a radix sort


@triton.jit
def _embedding_rank_kernel(ids_ptr, sorted_ptr, order_ptr, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store ROWS ids, and their positions, at their places in sorted order: an id's place is the number of smaller ids plus
    the number of equal ids before it."""
    first = tl.program_id(0) * ROWS
    i = first + tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + i, i < n, 0).to(tl.int32)
    smaller = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        others = tl.load(ids_ptr + j, j < n, 2**31 - 1).to(tl.int32)[None, :]
        if (start < first + ROWS) & (start + BLOCK > first):
            smaller += (others < ids[:, None] + (j[None, :] < i[:, None]).to(tl.int32)).to(tl.int32)
        else:
            smaller += (others < ids[:, None] + tl.where(start < first, 1, 0)).to(tl.int32)
    place = tl.sum(smaller, 1)
    tl.store(sorted_ptr + place, ids, i < n)
    tl.store(order_ptr + place, i, i < n)


@triton.jit
def _sum_of_rows(
    ptr, order_ptr, begin, end, cols, h, stride, INDIRECT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Returns the sum of rows begin..end over the columns ``cols``. With INDIRECT, row i is row order[i] of ``ptr``."""
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
def _embedding_long_segments_kernel(
    dy_ptr, order_ptr, sorted_ptr, start_ptr, parts_ptr, n, h, dy_stride, lowest, padding,
    PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store sums of piece p of the sorted rows in ``parts[side, p]``: side 0 the sum over its rows in the segment of its
    first row, side 1 over its rows in the segment of its last row, if that is another one. Only segments longer than a
    piece have such sums."""
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
def _embedding_groups_kernel(
    sorted_ptr, parts_ptr, h, lowest, padding, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Store the sum of GROUP pieces of one segment in place of the sum of the first of them."""
    first = tl.program_id(0).to(tl.int64) * GROUP
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(sorted_ptr + first * PIECE).to(tl.int64) - lowest
    end = tl.load(sorted_ptr + (first + GROUP) * PIECE - 1).to(tl.int64) - lowest
    if (v == end) & (v != padding):
        total = _sum_of_rows(parts_ptr, sorted_ptr, first, first + GROUP, cols, h, h, False, ROWS, BLOCK, STAGES)
        tl.store(parts_ptr + first * h + cols, total, cols < h)


@triton.jit
def _sum_of_pieces(
    parts_ptr, first, stop, begin, end, cols, h, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Returns the sum of the pieces first..stop of the segment begin..end. The sum of a whole group is stored in its first
    piece, and the others are skipped. One loop over pieces and groups: a loop before, over and behind the groups takes more
    registers, also where no segment is long."""
    low = tl.cdiv(begin, GROUP * PIECE)
    before, groups = low * GROUP - first, tl.maximum(end // (GROUP * PIECE) - low, 0)
    count = stop - first - groups * (GROUP - 1)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in tl.range(0, count, ROWS, num_stages=STAGES):
        i = step + tl.arange(0, ROWS)
        piece = first + i + (GROUP - 1) * tl.minimum(tl.maximum(i - before, 0), groups)
        mask = (i < count)[:, None] & (cols < h)[None, :]
        total += tl.load(parts_ptr + piece.to(tl.int64)[:, None] * h + cols[None, :], mask, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _embedding_segments_kernel(
    dy_ptr, order_ptr, start_ptr, parts_ptr, dw_ptr, pieces, h, dy_stride, padding, GROUPED: tl.constexpr, ADD: tl.constexpr,
    PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store dweight[v] for v = pid: the sum of its rows of dy, or of the sums of its pieces. 0 for ``padding``. ADD: add it
    to what is there."""
    v = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(start_ptr + v)
    end = tl.load(start_ptr + v + 1)
    if v == padding:
        end = begin
    if end - begin > PIECE:
        # The segment lies in pieces first .. last; its sum over the first is on side 1 unless it begins with that piece.
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
    mask = cols < h
    if ADD:
        mask = cols < tl.where(end > begin, h, 0)
        total += tl.load(dw_ptr + v * h + cols, mask, 0.0).to(tl.float32)
    tl.store(dw_ptr + v * h + cols, total.to(dw_ptr.dtype.element_ty), mask)


def _gather(ids, weight, padding_idx):
    """Returns y for a traced forward: Inductor generates the gather itself."""
    return F.embedding(ids, weight)


def _fwd(ids, weight, padding_idx):
    y = _fake(ids, weight, padding_idx)  # not a view: the caller may write to it in place
    torch.index_select(weight, 0, ids.reshape(-1), out=y.view(ids.numel(), weight.shape[1]))
    return y


def _bwd(dy, ids, v, padding_idx):
    refuse_symbols(v)
    h = dy.shape[-1]
    dweight = _fake_bwd(dy, ids, v, padding_idx)
    if not dweight.numel():
        return dweight
    rows = dy.reshape(-1, h)
    rows = stored_once(rows if rows.stride(-1) == 1 or h == 1 else rows.contiguous())
    n = rows.shape[0]
    ordered, order, lowest = sort_ids(ids.reshape(-1), v)
    bounds = torch.arange(lowest, lowest + v + 1, dtype=ordered.dtype, device=ids.device)
    start = torch.searchsorted(ordered, bounds, out_int32=n <= 2**30)
    plan = segments_plan(n, h)
    pieces, blocks = cdiv(n, plan.PIECE), cdiv(h, plan.BLOCK)
    parts = torch.empty((2, pieces, h), dtype=torch.float32, device=dy.device)
    if pieces > 1:
        launch(
            _embedding_long_segments_kernel,
            (pieces, blocks, 2), rows, order, ordered, start, parts, n, h, rows.stride(0), lowest,
            int(padding_idx), **plan.meta(),
        )  # fmt: skip
    groups = n // (GROUP.value * plan.PIECE) if plan.grouped else 0
    if groups:
        launch(_embedding_groups_kernel, (groups, blocks), ordered, parts, h, lowest, int(padding_idx), **plan.meta())
    launch(  # into lm_head's gradient where the table is tied to it (``memory/tied.py``)
        _embedding_segments_kernel,
        (v, blocks), rows, order, start, parts, dweight, pieces, h, rows.stride(0), int(padding_idx),
        GROUPED=groups > 0, ADD=False, **plan.meta(),
    )  # fmt: skip
    return dweight


def sort_ids(ids, v: int):
    """Returns the n ids below ``v`` sorted as by ``torch.sort(ids, stable=True)`` and plus ``lowest``, their positions in
    ``ids``, and ``lowest``."""
    n = ids.shape[0]
    plan = rank_plan(n, v)
    if plan is not None:
        ordered, order = (torch.empty(n, dtype=torch.int32, device=ids.device) for _ in range(2))
        launch(_embedding_rank_kernel, (cdiv(n, plan.ROWS),), ids.contiguous(), ordered, order, n, **plan.meta())
        return ordered, order, 0
    lowest = -(2**15) if v < 2**16 else 0  # a radix sort takes a pass for each 8 bits
    short = torch.int16 if lowest else torch.int32 if v < 2**31 else torch.int64
    return *torch.sort((ids + lowest).to(short), stable=True), lowest


@planner
def rank_plan(n: int, v: int) -> Plan | None:
    """Choose by the number of ids ``n``: ranking ROWS ids against BLOCK others at once up to 8192 ids (measured on an
    H200). None, a radix sort, for more, and for ids from a table of ``v`` rows that need 64 bits."""
    return Plan(ROWS=8, BLOCK=1024, num_warps=4) if 0 < n <= _RANKED_IDS and v < 2**31 else None


@planner
def segments_plan(n: int, h: int) -> Plan:
    """Choose by ``n`` rows of ``h`` columns: short pieces finish early, many pieces leave many sums to combine. The fastest
    on an H200 (``python -m bench.tune tables``).

    Returns PIECE rows of a piece, tiles of ROWS x BLOCK, STAGES of the loops over rows, and ``grouped``: whether GROUP
    pieces of one segment are combined first."""
    piece = 32 if n <= 16384 else 64 if n <= 65536 else 128
    block = min(next_power_of_2(h), 1024)
    return Plan(PIECE=piece, ROWS=4, BLOCK=block, STAGES=1, num_warps=4, grouped=n >= _GROUPED_ROWS)


def _bwd_on_cpu(dy, ids, v, padding_idx):
    """Returns dweight, summed in float32 (float64 for float64)."""
    index = ids.reshape(-1)
    rows = dy.reshape(ids.numel(), dy.shape[-1])
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
    "(Tensor dy, Tensor ids, SymInt v, int padding_idx) -> Tensor dweight",
    lambda dy, *rest: _bwd(dy, *rest) if dy.is_cuda or interpreting() else _bwd_on_cpu(dy, *rest),
    _fake_bwd,
)
trace_launches(embedding, _gather)
trace_launches(embedding_bwd, _bwd)


def _setup_context(ctx, inputs, output):
    ids, weight, padding_idx = inputs
    ctx.save_for_backward(ids)  # not the weight: it may be updated before the backward
    ctx.v, ctx.padding_idx = weight.shape[0], padding_idx


def _backward(ctx, dy):
    (ids,) = ctx.saved_tensors
    return None, embedding_bwd(dy, ids, ctx.v, ctx.padding_idx), None


register_autograd("embedding", _backward, _setup_context)
