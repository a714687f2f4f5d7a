"""RMSNorm of queries or keys and the rotary position embedding behind it, in one pass forward and one backward.

    rstd = 1 / sqrt(mean(x²) + eps)           the mean of a head's d numbers; ``across``: of all heads of a token
    x̂    = x · rstd
    n    = round(x̂) · w                       round_first (Llama: the cast comes before the weight)
    n    = x̂ · (offset + w)                   otherwise; without a weight w = 1
    y    = rotate(n, cos, sin)                ``rope.py`` has the formulas and the styles

    g    = rotate_back(dy, cos, sin)
    dx   = rstd · (g · (offset + w) − x̂ · mean(g · (offset + w) · x̂))        dw = Σ g · x̂ over all rows

n is not rounded: it stays in registers.

Shapes     x: (b, h, s, d) or (b, s, h, d), any strides; weight: (d), ``across``: (h · d); cos, sin: as ``rope.py`` has them,
           with the dim of the heads of size 1. y has the layout of x, or is contiguous.
Dtypes     x, weight bf16 | fp16 | fp32, mixed; cos, sin the same; arithmetic and rstd in fp32, one rounding per store.
Saved      x, weight, cos, sin, rstd: fp32, one a row of the norm.
Traffic    forward 2 elements an element of x, backward 3, plus programs · |w| floats for dw. A norm and a rotation apart
           take 4 and 5.
Source     Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; Su et al. 2021, arXiv:2104.09864.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.column_sums import column_sums
from fx_fusion.kernels.lib.device import multiprocessors, stages_ahead
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.norms.row_norm import result_dtype
from fx_fusion.kernels.rope import (
    four_dims,
    layouts,
    load_pairs,
    load_tables,
    positions_at_dim_2,
    signs,
    store_pairs,
    table_strides,
)
from fx_fusion.ops.fused_op import fused_op
from fx_fusion.ops.launch import launch, refuse_symbols

MOST_ACROSS = 8192  # numbers of a token that one program keeps in registers


@triton.jit
def _weights(
    w_ptr, offset, head, heads, HAS_WEIGHT: tl.constexpr, ACROSS: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns offset + weight for the members of the pairs: of each head of its own with ACROSS, else one row for all."""
    if not HAS_WEIGHT:
        wa = tl.full((1, LANES), 1.0, tl.float32)
        wb = wa
    elif ACROSS:
        wa, wb = load_pairs(w_ptr + head * 2 * HALF, 1, head < heads, PAIRS, HALF, HEADS, LANES)
        wa += offset
        wb += offset
    else:
        wa, wb = load_pairs(w_ptr + tl.zeros((1, 1), tl.int64), 1, tl.full((1, 1), True, tl.int1), PAIRS, HALF, 1, LANES)
        wa += offset
        wb += offset
    return wa, wb


@triton.jit
def _mean(a, b, count, ACROSS: tl.constexpr):
    """Returns the mean of each row of the norm as a column, of sums over the members a and b."""
    total = tl.sum(a + b, 1)
    if ACROSS:
        mean = tl.full((1, 1), 1.0, tl.float32) * (tl.sum(total, 0) / count)
    else:
        mean = (total / count)[:, None]
    return mean


@triton.jit
def rms_norm_rope_fwd_kernel(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, rstd_ptr, length, blocks, heads, programs, eps, offset, sign_a, sign_b,
    x_b, x_h, x_s, x_d, y_b, y_h, y_s, y_d, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
    HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr, ACROSS: tl.constexpr, IN_PAIRS: tl.constexpr,
    OUT_PAIRS: tl.constexpr, SHARED: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, POSITIONS: tl.constexpr,
    HEADS: tl.constexpr, PROGRAM_HEADS: tl.constexpr,
):  # fmt: skip
    """Store y and rstd of a block of POSITIONS and PROGRAM_HEADS heads, HEADS of them in each step. POSITIONS or HEADS is 1;
    with ACROSS the heads of a token are one step."""
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    sign_a, sign_b = tl.cast(sign_a, tl.float32), tl.cast(sign_b, tl.float32)
    pid = tl.program_id(0).to(tl.int64)
    first = (pid % programs) * PROGRAM_HEADS
    batch = pid // programs // blocks
    pos = (pid // programs % blocks) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    ca, cb, sa, sb = load_tables(
        cos_ptr, sin_ptr, batch, pos, length, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
        SHARED, OUT_PAIRS, HALF, POSITIONS, LANES,
    )  # fmt: skip
    count = tl.cast(2 * HALF, tl.float32)
    if ACROSS:
        count *= heads
    ROWS: tl.constexpr = POSITIONS * HEADS
    for start in range(0, PROGRAM_HEADS, HEADS):
        head = (first + start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        live = (head < heads) & (pos < length)
        wa, wb = _weights(w_ptr, offset, head, heads, HAS_WEIGHT, ACROSS, IN_PAIRS, HALF, HEADS, LANES)
        x = x_ptr + batch * x_b + pos * x_s + head * x_h
        a, b = load_pairs(x, x_d, live, IN_PAIRS, HALF, ROWS, LANES)
        rstd = 1.0 / tl.sqrt_rn(_mean(a * a, b * b, count, ACROSS) + eps)
        a *= rstd
        b *= rstd
        if ROUND_FIRST:
            a = a.to(x_ptr.dtype.element_ty).to(tl.float32)
            b = b.to(x_ptr.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            a *= wa
            b *= wb
        y = y_ptr + batch * y_b + pos * y_s + head * y_h
        new_a = a * ca + sign_a * b * sa
        new_b = b * cb + sign_b * a * sb
        store_pairs(y, y_d, new_a, new_b, live, OUT_PAIRS, HALF, ROWS, LANES)
        if ACROSS:
            tl.store(rstd_ptr + batch * length + pos, rstd, pos < length)
        else:
            tl.store(rstd_ptr + (batch * length + pos) * heads + head, rstd, live)


@triton.jit
def rms_norm_rope_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, rstd_ptr, dx_ptr, parts_ptr, length, blocks, heads, programs, tiles, each,
    offset, sign_a, sign_b,
    dy_b, dy_h, dy_s, dy_d, x_b, x_h, x_s, x_d, dx_b, dx_h, dx_s, dx_d, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
    HAS_WEIGHT: tl.constexpr, NEEDS_DW: tl.constexpr, ROUND_FIRST: tl.constexpr, ACROSS: tl.constexpr,
    IN_PAIRS: tl.constexpr, OUT_PAIRS: tl.constexpr, SHARED: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store dx of ``each`` tiles of POSITIONS x HEADS rows, and their sum dw in this program's row of ``parts``."""
    offset = tl.cast(offset, tl.float32)
    sign_a, sign_b = tl.cast(sign_a, tl.float32), tl.cast(sign_b, tl.float32)
    count = tl.cast(2 * HALF, tl.float32)
    if ACROSS:
        count *= heads
    ROWS: tl.constexpr = POSITIONS * HEADS
    dwa = tl.zeros((ROWS, LANES), tl.float32)
    dwb = tl.zeros((ROWS, LANES), tl.float32)
    of_all = tl.arange(0, HEADS).to(tl.int64)[:, None]  # with ACROSS the heads of each tile
    wa, wb = _weights(w_ptr, offset, of_all, heads, HAS_WEIGHT, ACROSS, IN_PAIRS, HALF, HEADS, LANES)
    pid = tl.program_id(0).to(tl.int64)
    for step in tl.range(0, each, num_stages=STAGES):
        tile = pid * each + step
        batch = tile // programs // blocks
        pos = (tile // programs % blocks) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
        head = (tile % programs) * HEADS + tl.arange(0, HEADS)[:, None]
        end = tl.where(tile < tiles, length, 0)  # behind the last tile no position is live
        live = (head < heads) & (pos < end)
        ca, cb, sa, sb = load_tables(
            cos_ptr, sin_ptr, batch, pos, end, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
            SHARED, OUT_PAIRS, HALF, POSITIONS, LANES,
        )  # fmt: skip
        if ACROSS:
            rstd = tl.load(rstd_ptr + batch * length + pos, pos < end, 0.0)
        else:
            rstd = tl.load(rstd_ptr + (batch * length + pos) * heads + head, live, 0.0)
        a, b = load_pairs(dy_ptr + batch * dy_b + pos * dy_s + head * dy_h, dy_d, live, OUT_PAIRS, HALF, ROWS, LANES)
        xa, xb = load_pairs(x_ptr + batch * x_b + pos * x_s + head * x_h, x_d, live, IN_PAIRS, HALF, ROWS, LANES)
        ga = a * ca + sign_b * b * sb
        gb = b * cb + sign_a * a * sa
        xa *= rstd
        xb *= rstd
        if NEEDS_DW:
            if ROUND_FIRST:
                dwa += ga * xa.to(x_ptr.dtype.element_ty).to(tl.float32)
                dwb += gb * xb.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                dwa += ga * xa
                dwb += gb * xb
        if HAS_WEIGHT:
            ga *= wa
            gb *= wb
        mean = _mean(ga * xa, gb * xb, count, ACROSS)
        dx = dx_ptr + batch * dx_b + pos * dx_s + head * dx_h
        store_pairs(dx, dx_d, rstd * (ga - xa * mean), rstd * (gb - xb * mean), live, IN_PAIRS, HALF, ROWS, LANES)
    if NEEDS_DW:
        if ACROSS:
            parts = parts_ptr + (pid * heads + of_all) * 2 * HALF
            store_pairs(parts, 1, dwa, dwb, of_all < heads, IN_PAIRS, HALF, HEADS, LANES)
        else:
            parts = parts_ptr + pid * 2 * HALF + tl.zeros((1, 1), tl.int64)
            da, db = tl.sum(dwa, 0)[None, :], tl.sum(dwb, 0)[None, :]
            store_pairs(parts, 1, da, db, tl.full((1, 1), True, tl.int1), IN_PAIRS, HALF, 1, LANES)


@planner
def fwd_plan(heads: int, positions: int, lanes: int, *, across: bool, heads_first: bool) -> Plan:
    """Choose as ``rope.rope_plan`` does; with ``across`` the heads of one token, at most 2048 numbers a warp.

    Returns tiles of POSITIONS x HEADS rows, PROGRAM_HEADS, the heads that one program rotates with one cos and sin, and
    ``num_warps``."""
    if across:
        every = next_power_of_2(heads)
        return Plan(POSITIONS=1, HEADS=every, PROGRAM_HEADS=every, num_warps=_warps(every * lanes * 2))
    rows = max(1, 512 // lanes)
    if heads_first:
        most = next_power_of_2(positions) if isinstance(positions, int) else rows
        return Plan(POSITIONS=min(most, rows), HEADS=1, PROGRAM_HEADS=4, num_warps=2)
    tile_heads = min(next_power_of_2(heads), rows)
    return Plan(POSITIONS=1, HEADS=tile_heads, PROGRAM_HEADS=tile_heads, num_warps=1)


@planner
def bwd_plan(heads: int, positions: int, lanes: int, itemsize: int, x, *, across: bool, heads_first: bool) -> Plan:
    """Choose rows that follow each other in memory, as the forward does: 2048 numbers a tile, or a token with ``across``.
    Loads run ahead as far as shared memory reaches (``itemsize``: bytes of an element of dy and of x together).

    Returns tiles of POSITIONS x HEADS rows, STAGES, ``num_warps`` and ``programs_per_sm``, the persistent programs of one
    multiprocessor. Of a tile of 2048 numbers 512 a warp, of a smaller one all: on an H200, bfloat16, 128 columns, 8 x 2048
    positions of 16 heads take 0.067 ms (2 warps 0.078), of 8 heads 0.044; 4608 of 24 heads 0.043 (2 warps 0.056). With
    ``across`` 32760 positions of 12 heads take 0.100 ms (4 warps 0.113)."""
    rows = max(1, 1024 // lanes)
    if across:
        tile = 1, next_power_of_2(heads)
    elif heads_first:
        tile = min(next_power_of_2(positions) if isinstance(positions, int) else rows, rows), 1
    else:
        tile = 1, min(next_power_of_2(heads), rows)
    size = tile[0] * tile[1] * lanes * 2
    if across:
        warps = _warps(size)
        per_sm = max(1, 8 // warps)
    else:
        warps, per_sm = (4, 4) if size >= 2048 else (1, 8)
    stages = stages_ahead(size * itemsize * per_sm, x)
    return Plan(POSITIONS=tile[0], HEADS=tile[1], STAGES=stages, num_warps=warps, programs_per_sm=per_sm)


def _warps(size: int) -> int:
    return max(1, min(8, size // 1024))


def _rows(x, cos, sin, y):
    """Returns x and y with heads at dim 1, cos and sin, and whether a head is further from the next than a position is."""
    cos, sin = four_dims(cos), four_dims(sin)
    x, y, cos_rows, sin_rows = positions_at_dim_2((x, y, cos, sin), cos)
    refuse_symbols(x.shape[1], x.shape[3], cos.shape[-1])
    return x, y, cos_rows, sin_rows, x.stride(1) > x.stride(2)


def _fwd(x, weight, cos, sin, eps, offset, round_first, across, style, out, contiguous):
    y, rstd = _fake(x, weight, cos, sin, eps, offset, round_first, across, style, out, contiguous)
    if x.numel() == 0:
        return y, rstd
    rows, y_rows, cos_rows, sin_rows, heads_first = _rows(x, cos, sin, y)
    b, h, s, d = rows.shape
    in_pairs, out_pairs = layouts(style, False)
    lanes = next_power_of_2(d // 2)
    plan = fwd_plan(h, s, lanes, across=across, heads_first=heads_first)
    programs, blocks = cdiv(h, plan.PROGRAM_HEADS), cdiv(s, plan.POSITIONS)
    launch(
        rms_norm_rope_fwd_kernel, (b * blocks * programs,),
        rows, y_rows if weight is None else weight.contiguous(), cos_rows, sin_rows, y_rows, rstd, s, blocks, h, programs,
        float(eps), float(offset), *signs(style),
        *rows.stride(), *y_rows.stride(), *table_strides(cos_rows, rows), *table_strides(sin_rows, rows),
        HAS_WEIGHT=weight is not None, ROUND_FIRST=round_first, ACROSS=across, IN_PAIRS=in_pairs, OUT_PAIRS=out_pairs,
        SHARED=cos.shape[-1] != d, HALF=d // 2, LANES=lanes, **plan.meta(),
    )  # fmt: skip
    return y, rstd


def _bwd(dy, x, weight, cos, sin, rstd, eps, offset, round_first, across, style, out, contiguous, needs):
    dx = torch.empty_like(x)
    wanted = weight is not None and needs[1]
    if x.numel() == 0:
        return dx, torch.zeros_like(weight) if wanted else dx.new_empty(0)
    rows, dy_rows, cos_rows, sin_rows, heads_first = _rows(x, cos, sin, dy)
    dx_rows = _rows(x, cos, sin, dx)[1]
    b, h, s, d = rows.shape
    in_pairs, out_pairs = layouts(style, False)
    lanes = next_power_of_2(d // 2)
    itemsize = dy.element_size() + x.element_size()
    plan = bwd_plan(h, s, lanes, itemsize, x, across=across, heads_first=heads_first)
    programs, blocks = cdiv(h, plan.HEADS), cdiv(s, plan.POSITIONS)
    tiles = b * blocks * programs
    persistent = multiprocessors(x) * plan.programs_per_sm
    if isinstance(tiles, int):
        persistent = min(tiles, persistent)
    each = cdiv(tiles, persistent)
    if isinstance(tiles, int):  # the last ones of a symbolic number of tiles may find none
        persistent = cdiv(tiles, each)
    width = h * d if across else d
    parts = torch.empty((1, persistent, width) if wanted else (0,), dtype=torch.float32, device=x.device)
    launch(
        rms_norm_rope_bwd_kernel, (persistent,),
        dy_rows, rows, dx_rows if weight is None else weight.contiguous(), cos_rows, sin_rows, rstd, dx_rows, parts, s,
        blocks, h, programs, tiles, each, float(offset), *signs(style),
        *dy_rows.stride(), *rows.stride(), *dx_rows.stride(), *table_strides(cos_rows, rows), *table_strides(sin_rows, rows),
        HAS_WEIGHT=weight is not None, NEEDS_DW=wanted, ROUND_FIRST=round_first, ACROSS=across, IN_PAIRS=in_pairs,
        OUT_PAIRS=out_pairs, SHARED=cos.shape[-1] != d, HALF=d // 2, LANES=lanes, **plan.meta(),
    )  # fmt: skip
    return dx, column_sums(parts, [weight.dtype])[0] if wanted else dx.new_empty(0)


def _fake(x, weight, cos, sin, eps, offset, round_first, across, style, out, contiguous):
    dtype = result_dtype(x.dtype, weight, round_first)
    dtype = dtype if out == "input" else torch.promote_types(dtype, cos.dtype)
    layout = torch.contiguous_format if contiguous else torch.preserve_format
    heads = four_dims(cos).shape[1] == 1  # at dim 1
    b, h, s, _ = x.shape if heads else x.transpose(1, 2).shape
    rstd = torch.empty((b, s) if across else (b, s, h), dtype=torch.float32, device=x.device)
    return torch.empty_like(x, dtype=dtype, memory_format=layout), rstd


_STATIC = "float eps, float offset, bool round_first, bool across, str style, str out, bool contiguous"
rms_norm_rope = fused_op(
    "rms_norm_rope",
    (f"(Tensor x, Tensor? weight, Tensor cos, Tensor sin, {_STATIC}) -> (Tensor y, Tensor rstd)", _fwd),
    (
        f"(Tensor dy, Tensor x, Tensor? weight, Tensor cos, Tensor sin, Tensor rstd, {_STATIC}, bool[] needs)"
        " -> (Tensor dx, Tensor dweight)",
        _bwd,
    ),
    reference="fx_fusion.patterns.rope:normed_and_rotated",
    fake=_fake,
    stats=("rstd",),
    grads=("x", "weight"),
    symbolic=True,
)
