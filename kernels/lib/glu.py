"""Gated linear units: an activation of one tensor times another, forward and backward.

    y     = round(a(g)) · up                          g = gate
    dgate = dy · up · a'(g)                           dup = dy · round(a(g))

    silu        a = g σ(g)                            a' = σ (1 + g (1 − σ)),         σ = sigmoid(g)
    quick_gelu  a = g σ(1.702 g)                      a' = σ (1 + 1.702 g (1 − σ)),   σ = sigmoid(1.702 g)
    gelu_none   a = g Φ(g)                            a' = Φ + g φ                    Φ, φ the normal distribution
    gelu_tanh   a = g (1 + tanh u) / 2                a' = (1 + t) / 2 + g (1 − t²) u' / 2
                u = √(2/π) (g + 0.044715 g³),         u' = √(2/π) (1 + 0.134145 g²),  t = tanh u

Shapes     gate, up, y: (..., n), any row stride with unit stride along n (halves of one linear are read in place).
Dtypes     bf16 | fp16 | fp32, alike; arithmetic in fp32, round() is to the dtype of gate, as in eager.
Saved      gate, up; the activation is recomputed.
Traffic    forward 3·m·n elements, backward 5·m·n.
Source     Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.fast_math import exp, sigmoid
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.rows import as_rows
from fx_fusion.ops.launch import launch

SILU = tl.constexpr(0)
QUICK_GELU = tl.constexpr(1)
GELU_NONE = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
ACTIVATIONS = {"silu": SILU, "quick_gelu": QUICK_GELU, "gelu_none": GELU_NONE, "gelu_tanh": GELU_TANH}


@triton.jit
def activation(g, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Returns a(g) and a'(g) in fp32 of the activation KIND; EXACT unless both are rounded to 16 bits."""
    if KIND == GELU_NONE:
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        a = g * cdf
        da = cdf + g * 0.3989422804014327 * exp(-0.5 * g * g)
    elif KIND == GELU_TANH:
        u = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        s = sigmoid(2.0 * u, True)  # (1 + tanh u) / 2
        a = g * s
        # 1 - s cancels where s is near 1, and its factors grow to 30.
        one_minus_s = sigmoid(-2.0 * u, True) if EXACT else 1.0 - s
        da = s + 2.0 * g * s * one_minus_s * 0.7978845608028654 * (1.0 + 0.134145 * g * g)
    else:
        slope = 1.0 if KIND == SILU else 1.702
        s = sigmoid(slope * g, True)
        a = g * s
        da = s * (1.0 + slope * g * (1.0 - s))
    return a, da


@triton.jit
def _tile(m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns rows and columns of a program's tile, and which of its elements exist."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, cols, (row < m) & (cols < n)


@triton.jit
def glu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr, m, n, gate_stride, up_stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    n, gate_stride, up_stride = multiple(n, UNIT), multiple(gate_stride, UNIT), multiple(up_stride, UNIT)
    row, cols, live = _tile(m, n, ROWS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + cols, live, 0.0)
    a, _ = activation(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, live, 0.0).to(tl.float32)
    y = a.to(gate.dtype).to(tl.float32) * up
    tl.store(y_ptr + row * n + cols, y.to(gate.dtype), live)


@triton.jit
def glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, m, n, dy_stride, gate_stride, up_stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    n, dy_stride = multiple(n, UNIT), multiple(dy_stride, UNIT)
    gate_stride, up_stride = multiple(gate_stride, UNIT), multiple(up_stride, UNIT)
    row, cols, live = _tile(m, n, ROWS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + cols, live, 0.0)
    a, da = activation(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + cols, live, 0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, live, 0.0).to(tl.float32)
    dup = dy * a.to(gate.dtype).to(tl.float32)
    tl.store(dup_ptr + row * n + cols, dup.to(gate.dtype), live)
    tl.store(dgate_ptr + row * n + cols, (dy * up * da).to(gate.dtype), live)


@planner
def glu_plan(n: int) -> Plan:
    """Choose by the columns ``n`` of a row: tiles ROWS x BLOCK of 2048 elements, of one row or of several narrow ones. The
    kernels are bound by memory; ``num_warps`` is Triton's default."""
    block = min(next_power_of_2(n), 2048)
    return Plan(ROWS=2048 // block, BLOCK=block, num_warps=4)


def _grid(m: int, n: int, plan: Plan) -> tuple[int, int]:
    """Returns the number of tiles over m rows and n columns."""
    return cdiv(m, plan.ROWS), cdiv(n, plan.BLOCK)


def glu_fwd(gate, up, kind: str):
    """Returns y; ``kind`` names one of ``ACTIVATIONS``."""
    gates, ups = as_rows(gate), as_rows(up)
    m, n = gates.shape
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)  # not a view: the caller may write to it in place
    if y.numel():
        plan = glu_plan(n)
        launch(
            glu_fwd_kernel, _grid(m, n, plan), gates, ups, y, m, n, gates.stride(0), ups.stride(0),
            KIND=ACTIVATIONS[kind].value, UNIT=unit_of(n, gates.stride(0), ups.stride(0)), **plan.meta(),
        )  # fmt: skip
    return y


def glu_bwd(dy, gate, up, kind: str):
    """Returns dgate and dup; ``kind`` names one of ``ACTIVATIONS``."""
    dys, gates, ups = as_rows(dy), as_rows(gate), as_rows(up)
    m, n = gates.shape
    dgate, dup = (torch.empty((m, n), dtype=gate.dtype, device=gate.device) for _ in range(2))
    if dgate.numel():
        plan = glu_plan(n)
        launch(
            glu_bwd_kernel, _grid(m, n, plan), dys, gates, ups, dgate, dup, m, n, dys.stride(0), gates.stride(0),
            ups.stride(0), KIND=ACTIVATIONS[kind].value, UNIT=unit_of(n, dys.stride(0), gates.stride(0), ups.stride(0)),
            **plan.meta(),
        )  # fmt: skip
    return dgate.view(gate.shape), dup.view(gate.shape)
