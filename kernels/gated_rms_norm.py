"""RMSNorm with a gate before or after it, forward and backward.

    a    = silu(gate) or sigmoid(gate)
    h    = x · a                       before;  h = x after
    x̂    = h / sqrt(mean(h²) + eps)
    y    = x̂ · w                       before;  y = x̂ · w · a after          round_first: x̂ is rounded before w
                                                                             out: the dtype of y where it is not x's

    g    = dy · w                      before;  g = dy · a · w after
    dh   = rstd · (g − x̂ · mean(g · x̂))
    dx   = dh · a                      before;  dx = dh after
    da   = dh · x                      before;  da = dy · x̂ · w after
    dgate = da · a'(gate)              dw = Σ_rows dy · x̂ (· a after)

Shapes     x, gate, y: (..., groups · n), n <= 16384, each group a row of its own; weight: (groups · n). Any strides;
           results contiguous.
Dtypes     bf16 | fp16 | fp32, mixed; arithmetic and statistics in fp32, one rounding per store.
Saved      x, gate, weight, rstd (fp32, one number a row of a group).
Traffic    forward 3·m·n elements, backward 5·m·n, plus programs·n floats for dw.
Source     Dao and Gu 2024, arXiv:2405.21060 (Mamba-2); Yang et al. 2024, arXiv:2412.06464 (gated delta net).
"""

import math

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.column_sums import column_sums
from fx_fusion.kernels.lib.device import multiprocessors, stages_ahead
from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.fast_math import sigmoid
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.rows import as_rows
from fx_fusion.ops.fused_op import fused_op
from fx_fusion.ops.launch import launch

WIDEST = 16384


@triton.jit
def _activation(g, SILU: tl.constexpr, EXACT: tl.constexpr):
    """Returns a and a' at the gate g."""
    s = sigmoid(g, EXACT)
    if SILU:
        a = g * s
        da = s * (1.0 + g * (1.0 - s))
    else:
        a = s
        da = s * (1.0 - s)
    return a, da


@triton.jit
def _gated_rms_norm_fwd_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, rstd_ptr, m, n, x_stride, gate_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr, ROUND_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Store y and rstd of ROWS rows of group program_id(1)."""
    n, x_stride, gate_stride = multiple(n, UNIT), multiple(x_stride, UNIT), multiple(gate_stride, UNIT)
    eps = tl.cast(eps, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    width = n * tl.num_programs(1)
    group = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)[None, :]
    cols = group * n + lanes
    mask = (rows[:, None] < m) & (lanes < n)
    h = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols, mask, 0.0)
    a, _ = _activation(gate.to(tl.float32), SILU, gate.dtype == tl.float32 or x_ptr.dtype.element_ty == tl.float32)
    if BEFORE:
        h *= a
    rstd = 1.0 / tl.sqrt_rn(tl.sum(h * h, 1) / n + eps)
    y = h * rstd[:, None]
    if ROUND_FIRST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    y *= tl.load(w_ptr + cols, lanes < n, 0.0).to(tl.float32)
    if not BEFORE:
        y *= a
    tl.store(y_ptr + rows[:, None] * width + cols, y.to(y_ptr.dtype.element_ty), mask)
    tl.store(rstd_ptr + rows * tl.num_programs(1) + group, rstd, rows < m)


@triton.jit
def _gated_rms_norm_bwd_kernel(
    dy_ptr, x_ptr, gate_ptr, w_ptr, rstd_ptr, dx_ptr, dgate_ptr, dw_ptr, m, n, dy_stride, x_stride, gate_stride, rows_each,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr, SILU: tl.constexpr, ROUND_FIRST: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store dx and dgate of ``rows_each`` rows of group program_id(1), and their sum dw."""
    n, dy_stride = multiple(n, UNIT), multiple(dy_stride, UNIT)
    x_stride, gate_stride = multiple(x_stride, UNIT), multiple(gate_stride, UNIT)
    width = n * tl.num_programs(1)
    group = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)[None, :]
    cols = group * n + lanes
    w = tl.load(w_ptr + cols, lanes < n, 0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_each
    for start in tl.range(0, rows_each, ROWS, num_stages=STAGES):
        rows = first + start + tl.arange(0, ROWS)
        live = (rows < m) & (start + tl.arange(0, ROWS) < rows_each)
        mask = live[:, None] & (lanes < n)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask, 0.0).to(tl.float32)
        gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols, mask, 0.0)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows * tl.num_programs(1) + group, live, 0.0)[:, None]
        a, slope = _activation(gate.to(tl.float32), SILU, gate.dtype == tl.float32 or x_ptr.dtype.element_ty == tl.float32)
        xhat = x * rstd
        g = dy
        if BEFORE:
            xhat *= a
        else:
            g *= a
        rounded = xhat
        if ROUND_FIRST:
            rounded = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
        dw += g * rounded
        g *= w
        dh = rstd * (g - xhat * (tl.sum(g * xhat, 1) / n)[:, None])
        if BEFORE:
            dx = dh * a
            da = dh * x
        else:
            dx = dh
            da = dy * rounded * w
        tl.store(dx_ptr + rows[:, None] * width + cols, dx.to(dx_ptr.dtype.element_ty), mask)
        tl.store(dgate_ptr + rows[:, None] * width + cols, (da * slope).to(dgate_ptr.dtype.element_ty), mask)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * width + cols, tl.sum(dw, 0)[None, :], lanes < n)


@planner
def gated_rms_norm_fwd_plan(n: int) -> Plan:
    """Choose by the columns ``n`` of a group. Numbers: a rule of thumb, as the forward is bound by memory: tiles of 2048
    elements or of one row, at most 1024 elements per warp.

    Returns ROWS x BLOCK of a tile and ``num_warps``."""
    block = next_power_of_2(n)
    return Plan(ROWS=max(1, 2048 // block), BLOCK=block, num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16)


@planner
def gated_rms_norm_bwd_plan(n: int, bytes_per_element: int, x) -> Plan:
    """Choose by the columns ``n`` of a group, by the ``bytes_per_element`` of x, gate and dy together, and by the shared
    memory of x's device. Numbers: the fastest on an H200.

    Returns ROWS x BLOCK of a tile, STAGES of the loop over the tiles, ``num_warps``, and ``programs_per_sm``, the
    persistent programs of one multiprocessor."""
    block = next_power_of_2(n)
    if block >= 8192:
        warps = 16 if block * bytes_per_element <= 8192 * 6 else 32
        return Plan(ROWS=1, BLOCK=block, STAGES=1, num_warps=warps, programs_per_sm=1)
    if block == 4096:
        return Plan(ROWS=1, BLOCK=block, STAGES=stages_ahead(block * bytes_per_element, x), num_warps=8, programs_per_sm=1)
    stages, warps = stages_ahead(2048 * bytes_per_element, x), 4 if block >= 512 else 8
    return Plan(ROWS=2048 // block, BLOCK=block, STAGES=stages, num_warps=warps, programs_per_sm=2)


def _fwd(x, gate, weight, eps, before, silu, round_first, groups, out):
    y, rstd = _fake(x, gate, weight, eps, before, silu, round_first, groups, out)
    xs, gates = as_rows(x), as_rows(gate)
    m, n = xs.shape[0], xs.shape[1] // groups
    if m and n:
        plan = gated_rms_norm_fwd_plan(n)
        launch(
            _gated_rms_norm_fwd_kernel,
            (cdiv(m, plan.ROWS), groups), xs, gates, weight.contiguous(), y, rstd, m, n, xs.stride(0),
            gates.stride(0), float(eps), BEFORE=before, SILU=silu, ROUND_FIRST=round_first,
            UNIT=unit_of(n, xs.stride(0), gates.stride(0)), **plan.meta(),
        )  # fmt: skip
    return y, rstd


def _bwd(dy, x, gate, weight, rstd, eps, before, silu, round_first, groups, out, needs):
    xs, gates, dys = as_rows(x), as_rows(gate), as_rows(dy)
    m, n = xs.shape[0], xs.shape[1] // groups
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    if not (m and n):
        return dx, dgate, torch.zeros_like(weight)
    plan = gated_rms_norm_bwd_plan(n, sum(t.element_size() for t in (x, gate, dy)), x)
    programs = min(cdiv(m, plan.ROWS), cdiv(plan.programs_per_sm * multiprocessors(x), groups))
    rows_each = cdiv(cdiv(m, programs), plan.ROWS) * plan.ROWS
    programs = cdiv(m, rows_each)
    dw = torch.empty(1, programs, n * groups, dtype=torch.float32, device=x.device)
    launch(
        _gated_rms_norm_bwd_kernel,
        (programs, groups), dys, xs, gates, weight.contiguous(), rstd, dx, dgate, dw, m, n, dys.stride(0),
        xs.stride(0), gates.stride(0), rows_each, BEFORE=before, SILU=silu, ROUND_FIRST=round_first,
        UNIT=unit_of(n, dys.stride(0), xs.stride(0), gates.stride(0)), **plan.meta(),
    )  # fmt: skip
    return dx, dgate, column_sums(dw, [weight.dtype])[0]


def _fake(x, gate, weight, eps, before, silu, round_first, groups, out):
    y = torch.empty(x.shape, dtype=x.dtype if out == "input" else getattr(torch, out), device=x.device)
    return y, torch.empty(math.prod(x.shape[:-1]) * groups, dtype=torch.float32, device=x.device)


gated_rms_norm = fused_op(
    "gated_rms_norm",
    (
        "(Tensor x, Tensor gate, Tensor weight, float eps, bool before, bool silu, bool round_first, int groups,"
        " str out) -> (Tensor y, Tensor rstd)",
        _fwd,
    ),
    (
        "(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, float eps, bool before, bool silu,"
        " bool round_first, int groups, str out, bool[] needs) -> (Tensor dx, Tensor dgate, Tensor dweight)",
        _bwd,
    ),
    fake=_fake,
    stats=("rstd",),
    grads=("x", "gate", "weight"),
    cheap=True,
)
