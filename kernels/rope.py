"""Rotary position embedding of queries and keys together, forward and backward.

A row of d numbers is d/2 pairs (a, b); pair i is rotated by an angle that depends on the position:

    a' = a · cos_a + sign_a · b · sin_a        b' = b · cos_b + sign_b · a · sin_b

    rotate_half           pair i is (x[i], x[i + d/2]) in and out, signs −1, +1
    rotate_every_two      pair i is (x[2i], x[2i + 1]) in and out, signs −1, +1
    even_odd_to_halves    pair i is (x[2i], x[2i + 1]) in, (y[i], y[i + d/2]) out, signs −1, +1
    reversed              rotate_half with signs +1, −1
    swap_halves           rotate_half with signs +1, +1: sin holds the signs

cos_a, sin_a and cos_b, sin_b are columns of cos and sin: these have d columns, used as they are (halves may differ), or d/2
columns that both members of a pair share. The backward is the transposed rotation:

    da = da' · cos_a + sign_b · db' · sin_b        db = db' · cos_b + sign_a · da' · sin_a

Shapes     q: (b, h, s, d), k: (b, g, s, d) or absent, any strides; cos, sin: (b|1, 1, s, c) or (b|1, s, 1, c) and the
           like: broadcast against q over everything but positions. Results have the layout of q and k,
           or are contiguous.
Dtypes     q, k bf16 | fp16 | fp32; cos, sin the same or fp32; arithmetic in fp32, one rounding per store.
Saved      cos, sin.
Traffic    forward and backward each 2 elements an element of q and k; cos and sin once from memory, for the other
           heads from the cache.
Source     Su et al. 2021, arXiv:2104.09864.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.ops.launch import launch, refuse_symbols
from fx_fusion.ops.library import plain_op, register_autograd, trace_launches
from fx_fusion.ops.on_cpu import interpreting

STYLES = ("rotate_half", "rotate_every_two", "even_odd_to_halves", "reversed", "swap_halves")
_SIGNS = {"reversed": (1.0, -1.0), "swap_halves": (1.0, 1.0)}  # of sin, for the first and the second member of a pair


@triton.jit
def load_pairs(at, step, live, PAIRS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Load the members (a, b) of the pairs of ROWS rows at ``at``. Members side by side (PAIRS) are loaded as one row and
    split: loading every other number takes four to seven times as long."""
    if PAIRS:
        cols = tl.arange(0, 2 * LANES)[None, :]
        row = tl.load(at + cols.to(tl.int64) * step, live & (cols < 2 * HALF), 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(row, (ROWS, LANES, 2)))
    else:
        lanes = tl.arange(0, LANES)[None, :].to(tl.int64)
        a = tl.load(at + lanes * step, live & (lanes < HALF), 0.0).to(tl.float32)
        b = tl.load(at + (lanes + HALF) * step, live & (lanes < HALF), 0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(at, step, a, b, live, PAIRS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Store the members (a, b) of the pairs of ROWS rows at ``at``."""
    dtype = at.dtype.element_ty
    if PAIRS:
        cols = tl.arange(0, 2 * LANES)[None, :]
        row = tl.reshape(tl.join(a.to(dtype), b.to(dtype)), (ROWS, 2 * LANES))
        tl.store(at + cols.to(tl.int64) * step, row, live & (cols < 2 * HALF))
    else:
        lanes = tl.arange(0, LANES)[None, :].to(tl.int64)
        tl.store(at + lanes * step, a.to(dtype), live & (lanes < HALF))
        tl.store(at + (lanes + HALF) * step, b.to(dtype), live & (lanes < HALF))


@triton.jit
def load_tables(
    cos_ptr, sin_ptr, batch, pos, length, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
    SHARED: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, POSITIONS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Load cos and sin of the first and of the second member of each pair, at the positions ``pos``."""
    cos = cos_ptr + batch * cos_b + pos * cos_s
    sin = sin_ptr + batch * sin_b + pos * sin_s
    if SHARED:
        lanes = tl.arange(0, LANES)[None, :].to(tl.int64)
        live = (pos < length) & (lanes < HALF)
        ca = tl.load(cos + lanes * cos_d, live, 0.0).to(tl.float32)
        sa = tl.load(sin + lanes * sin_d, live, 0.0).to(tl.float32)
        cb = ca
        sb = sa
    else:
        ca, cb = load_pairs(cos, cos_d, pos < length, PAIRS, HALF, POSITIONS, LANES)
        sa, sb = load_pairs(sin, sin_d, pos < length, PAIRS, HALF, POSITIONS, LANES)
    return ca, cb, sa, sb


@triton.jit
def _rotate(
    x_ptr, y_ptr, ca, cb, sa, sb, batch, pos, length, first, heads,
    x_b, x_h, x_s, x_d, y_b, y_h, y_s, y_d, sign_a, sign_b,
    IN_PAIRS: tl.constexpr, OUT_PAIRS: tl.constexpr, BACKWARD: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, PROGRAM_HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate PROGRAM_HEADS heads from ``first`` on at the positions ``pos``, HEADS of them in each step."""
    for start in range(0, PROGRAM_HEADS, HEADS):
        head = (first + start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        live = (head < heads) & (pos < length)
        x = x_ptr + batch * x_b + pos * x_s + head * x_h
        y = y_ptr + batch * y_b + pos * y_s + head * y_h
        a, b = load_pairs(x, x_d, live, IN_PAIRS, HALF, ROWS, LANES)
        if BACKWARD:
            new_a = a * ca + sign_b * b * sb
            new_b = b * cb + sign_a * a * sa
        else:
            new_a = a * ca + sign_a * b * sa
            new_b = b * cb + sign_b * a * sb
        store_pairs(y, y_d, new_a, new_b, live, OUT_PAIRS, HALF, ROWS, LANES)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, qo_ptr, ko_ptr, length, blocks, q_heads, k_heads, q_programs, programs,
    sign_a, sign_b,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, qo_b, qo_h, qo_s, qo_d, ko_b, ko_h, ko_s, ko_d,
    cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
    HAS_K: tl.constexpr, IN_PAIRS: tl.constexpr, OUT_PAIRS: tl.constexpr, SHARED: tl.constexpr, BACKWARD: tl.constexpr,
    HALF: tl.constexpr, LANES: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr, PROGRAM_HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate a block of POSITIONS and PROGRAM_HEADS heads of q or of k. cos and sin are loaded once for all of them."""
    sign_a = tl.cast(sign_a, tl.float32)
    sign_b = tl.cast(sign_b, tl.float32)
    pid = tl.program_id(0).to(tl.int64)
    part = pid % programs
    batch = pid // programs // blocks
    pos = (pid // programs % blocks) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    ca, cb, sa, sb = load_tables(
        cos_ptr, sin_ptr, batch, pos, length, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
        SHARED, OUT_PAIRS, HALF, POSITIONS, LANES,
    )  # fmt: skip
    ROWS: tl.constexpr = POSITIONS * HEADS
    if part < q_programs:
        _rotate(
            q_ptr, qo_ptr, ca, cb, sa, sb, batch, pos, length, part * PROGRAM_HEADS, q_heads, q_b, q_h, q_s, q_d,
            qo_b, qo_h, qo_s, qo_d, sign_a, sign_b, IN_PAIRS, OUT_PAIRS, BACKWARD, HALF, LANES, ROWS, HEADS, PROGRAM_HEADS,
        )  # fmt: skip
    elif HAS_K:
        _rotate(
            k_ptr, ko_ptr, ca, cb, sa, sb, batch, pos, length, (part - q_programs) * PROGRAM_HEADS, k_heads,
            k_b, k_h, k_s, k_d, ko_b, ko_h, ko_s, ko_d, sign_a, sign_b, IN_PAIRS, OUT_PAIRS, BACKWARD, HALF, LANES, ROWS,
            HEADS, PROGRAM_HEADS,
        )  # fmt: skip


def positions_at_dim_2(tensors, cos):
    """Return views of ``tensors`` with heads at dim 1 and positions at dim 2; cos, of 4 dims, shows where they are."""
    swap = cos.shape[1] != 1
    return [None if t is None else t.transpose(1, 2) if swap else t for t in tensors]


def four_dims(table):
    """Return cos or sin with dims of size 1 in front, up to four dims."""
    return table[(None,) * (4 - table.dim())]


def table_strides(table, q):
    """Return the strides of cos or sin over (batch, position, column), 0 where they are broadcast."""
    table = table.expand(q.shape[0], 1, q.shape[2], table.shape[-1])
    return table.stride(0), table.stride(2), table.stride(3)


def _launch(q, k, cos, sin, q_out, k_out, style: str, backward: bool):
    """Rotate q and k in one launch if they have the same batch and positions, else in one launch each."""
    cos, sin = four_dims(cos), four_dims(sin)
    at = 2 if cos.shape[1] == 1 else 1
    if k is not None and (q.numel() == 0 or k.numel() == 0 or (k.shape[0], k.shape[at]) != (q.shape[0], q.shape[at])):
        _launch(q, None, cos, sin, q_out, None, style, backward)
        _launch(k, None, cos, sin, k_out, None, style, backward)
        return
    if q.numel() == 0:
        return
    k_out = None if k is None else k_out  # without k the op's k_out is an empty tensor of one dim
    q, k, q_out, k_out, cos_rows, sin_rows = positions_at_dim_2((q, k, q_out, k_out, cos, sin), cos)
    b, h, s, d = q.shape
    refuse_symbols(h, d, 0 if k is None else k.shape[1], cos.shape[-1])
    in_pairs, out_pairs = layouts(style, backward)
    lanes = next_power_of_2(d // 2)
    plan = rope_plan(h, s, lanes, heads_first=q.stride(1) > q.stride(2))
    q_programs, k_programs = cdiv(h, plan.PROGRAM_HEADS), 0 if k is None else cdiv(k.shape[1], plan.PROGRAM_HEADS)
    blocks = cdiv(s, plan.POSITIONS)
    key, key_out = (q_out, q_out) if k is None else (k, k_out)
    launch(
        _rope_kernel, (b * blocks * (q_programs + k_programs),),
        q, key, cos_rows, sin_rows, q_out, key_out, s, blocks, h, key.shape[1], q_programs, q_programs + k_programs,
        *signs(style),
        *q.stride(), *key.stride(), *q_out.stride(), *key_out.stride(),
        *table_strides(cos_rows, q), *table_strides(sin_rows, q),
        HAS_K=k is not None, IN_PAIRS=in_pairs, OUT_PAIRS=out_pairs, SHARED=cos.shape[-1] != d, BACKWARD=backward,
        HALF=d // 2, LANES=lanes, **plan.meta(),
    )  # fmt: skip


@planner
def rope_plan(heads: int, positions: int, lanes: int, *, heads_first: bool) -> Plan:
    """Choose by memory: rows of a tile follow each other there. They are positions of one head where ``heads_first`` (a head
    is further from the next than a position is), else heads of one position, as models compute them. As many rows of
    ``lanes`` pairs as were fastest on an H200 (``python -m bench.tune rope``).

    Returns tiles of POSITIONS x HEADS rows and PROGRAM_HEADS, the heads that one program rotates with one cos and sin."""
    rows = max(1, 512 // lanes)
    if heads_first:  # cos and sin have as many rows as x, and serve four heads
        most = next_power_of_2(positions) if isinstance(positions, int) else rows
        return Plan(POSITIONS=min(most, rows), HEADS=1, PROGRAM_HEADS=4, num_warps=2)
    tile_heads = min(next_power_of_2(heads), rows)
    return Plan(POSITIONS=1, HEADS=tile_heads, PROGRAM_HEADS=tile_heads, num_warps=1)


def layouts(style: str, backward: bool) -> tuple[bool, bool]:
    """Return whether the input and whether the output hold pairs side by side (True) or in halves (False)."""
    forward = {"rotate_every_two": (True, True), "even_odd_to_halves": (True, False)}.get(style, (False, False))
    return forward[::-1] if backward else forward


def signs(style: str) -> tuple[float, float]:
    return _SIGNS.get(style, (-1.0, 1.0))


def _rotate_on_cpu(x, cos, sin, y, style: str, backward: bool):
    """Compute the formulas of the module's docstring in float32 (float64 for float64), on views of the members of pairs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    d = x.shape[-1]
    in_pairs, out_pairs = layouts(style, backward)

    def members(t, pairs):
        return (t[..., 0::2], t[..., 1::2]) if pairs else (t[..., : d // 2], t[..., d // 2 :])

    def table(t):
        return (t, t) if t.shape[-1] != d else members(t, out_pairs)

    (a, b), (ca, cb), (sa, sb) = (tuple(t.to(wide) for t in pair) for pair in (members(x, in_pairs), table(cos), table(sin)))
    sign_a, sign_b = signs(style)
    y_a, y_b = members(y, out_pairs)
    if backward:
        y_a.copy_(a * ca + sign_b * b * sb)
        y_b.copy_(b * cb + sign_a * a * sa)
    else:
        y_a.copy_(a * ca + sign_a * b * sa)
        y_b.copy_(b * cb + sign_b * a * sb)


def _apply(q, k, cos, sin, q_out, k_out, style: str, backward: bool):
    if q.is_cuda or interpreting():
        _launch(q, k, cos, sin, q_out, k_out, style, backward)
        return
    for x, y in ((q, q_out), (k, k_out)):
        if x is not None:
            _rotate_on_cpu(x, cos, sin, y, style, backward)


def _fwd(q, k, cos, sin, style, out, contiguous):
    q_out, k_out = _fake(q, k, cos, sin, style, out, contiguous)
    _apply(q, k, cos, sin, q_out, k_out, style, False)
    return q_out, k_out


def _fake(q, k, cos, sin, style, out, contiguous):
    dtype = q.dtype if out == "input" else torch.promote_types(q.dtype, cos.dtype)
    layout = torch.contiguous_format if contiguous else torch.preserve_format
    return (
        torch.empty_like(q, dtype=dtype, memory_format=layout),
        torch.empty(0, dtype=dtype, device=q.device)
        if k is None
        else torch.empty_like(k, dtype=dtype, memory_format=layout),
    )


def _bwd(dq, dk, cos, sin, style):
    dq_in, dk_in = _fake_bwd(dq, dk, cos, sin, style)
    _apply(dq, dk, cos, sin, dq_in, dk_in, style, True)
    return dq_in, dk_in


def _fake_bwd(dq, dk, cos, sin, style):
    return torch.empty_like(dq), dq.new_empty(0) if dk is None else torch.empty_like(dk)


rope = plain_op(
    "rope",
    "(Tensor q, Tensor? k, Tensor cos, Tensor sin, str style, str out, bool contiguous) -> (Tensor q_out, Tensor k_out)",
    _fwd,
    _fake,
)
rope_bwd = plain_op(
    "rope_bwd",
    "(Tensor dq, Tensor? dk, Tensor cos, Tensor sin, str style) -> (Tensor dq, Tensor dk)",
    _bwd,
    _fake_bwd,
)

trace_launches(rope, _fwd, symbolic=True)
trace_launches(rope_bwd, _bwd, symbolic=True)


def _setup_context(ctx, inputs, output):
    q, k, cos, sin, style, *_ = inputs
    ctx.save_for_backward(cos, sin)
    ctx.style, ctx.dtypes = style, (q.dtype, None if k is None else k.dtype)
    if k is None:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    q_dtype, k_dtype = ctx.dtypes
    dq, dk = rope_bwd(dq, None if k_dtype is None else dk, cos, sin, ctx.style)
    return dq.to(q_dtype), None if k_dtype is None else dk.to(k_dtype), None, None, None, None, None


register_autograd("rope", _backward, _setup_context)
