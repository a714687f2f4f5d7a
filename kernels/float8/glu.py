"""Gated linear units whose results are rows in e4m3, as float8 products multiply them.

    q, s             = rows(y)                        y = round(a(g)) · up,  g = gate          quantize_glu
    q_g, s_g, q_u, s_u = rows(dgate), rows(dup)                                                quantize_glu_bwd
    q, s             = rows([dgate dup])                                                       the same, together

with a, y, dgate and dup as in ``lib/glu`` and rows() as in ``quantize``, whose kernels would give the same bits from what is
rounded to the dtype of gate here, without storing it. It can be stored besides: y, dgate and dup where something else
multiplies them in 16 bits, y by the backward, which reads gate and up anyway.

Shapes     dy, gate, up: (..., n), any row stride with unit stride along n; of m rows in all q: (m, n), s: (m, 1); together:
           q (m, 2n), as one product with both weights reads it.
Dtypes     bf16 | fp16 | fp32, alike; arithmetic in fp32; q float8_e4m3fn, s fp32.
Traffic    forward: gate and up once, q once; backward: dy, gate, up once, two q; and what is stored besides. Rows longer
           than a block are read twice, the second time from the cache.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.float8.quantize import E4M3, quantize_rows_inline
from fx_fusion.kernels.geglu import geglu
from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.e4m3 import row_scale
from fx_fusion.kernels.lib.glu import ACTIVATIONS, activation
from fx_fusion.kernels.lib.integers import next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.rows import as_rows
from fx_fusion.kernels.swiglu import swiglu
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op, trace_launches
from fx_fusion.ops.on_cpu import interpreting


@triton.jit
def _forward(gate_ptr, up_ptr, cols, live, KIND: tl.constexpr):
    """Returns y, rounded, of some columns of a row."""
    gate = tl.load(gate_ptr + cols, live, 0.0)
    up = tl.load(up_ptr + cols, live, 0.0).to(tl.float32)
    a, _ = activation(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    return (a.to(gate.dtype).to(tl.float32) * up).to(gate.dtype)


@triton.jit
def _backward(dy_ptr, gate_ptr, up_ptr, cols, live, KIND: tl.constexpr):
    """Returns dgate, dup and y, rounded, of some columns of a row."""
    gate = tl.load(gate_ptr + cols, live, 0.0)
    up = tl.load(up_ptr + cols, live, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + cols, live, 0.0).to(tl.float32)
    a, da = activation(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    a = a.to(gate.dtype).to(tl.float32)
    return (dy * up * da).to(gate.dtype), (dy * a).to(gate.dtype), (a * up).to(gate.dtype)


@triton.jit
def _magnitude(x):
    return tl.abs(x.to(tl.float32))


@triton.jit
def _quantized(x, factor, q_ptr):
    """Returns numbers in e4m3: no larger than 448 but by a rounding, which goes back to it."""
    return (x.to(tl.float32) * factor).to(q_ptr.dtype.element_ty)


@triton.jit
def quantize_glu_kernel(
    gate_ptr, up_ptr, q_ptr, scale_ptr, y_ptr, n, gate_stride, up_stride,
    KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr, STORE_Y: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Store a row of q, and y. WIDE: a row has more than BLOCK columns and is computed twice."""
    n, gate_stride, up_stride = multiple(n, UNIT), multiple(gate_stride, UNIT), multiple(up_stride, UNIT)
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    y_ptr += row * n
    q_ptr += row * n
    cols = tl.arange(0, BLOCK)
    y = _forward(gate_ptr, up_ptr, cols, cols < n, KIND)
    largest = _magnitude(y)
    if STORE_Y:
        tl.store(y_ptr + cols, y, cols < n)
    if WIDE:
        for start in range(BLOCK, n, BLOCK):
            more = start + cols
            x = _forward(gate_ptr, up_ptr, more, more < n, KIND)
            largest = tl.maximum(largest, _magnitude(x))
            if STORE_Y:
                tl.store(y_ptr + more, x, more < n)
    scale, factor = row_scale(tl.max(largest, 0), POWER_OF_TWO)
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + cols, _quantized(y, factor, q_ptr), cols < n)
    if WIDE:
        for start in range(BLOCK, n, BLOCK):
            more = start + cols
            x = _forward(gate_ptr, up_ptr, more, more < n, KIND)
            tl.store(q_ptr + more, _quantized(x, factor, q_ptr), more < n)


@triton.jit
def quantize_glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, qg_ptr, gate_scale_ptr, qu_ptr, up_scale_ptr, dgate_ptr, dup_ptr, y_ptr,
    n, dy_stride, gate_stride, up_stride,
    KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr, TOGETHER: tl.constexpr, STORE_DGATE: tl.constexpr,
    STORE_DUP: tl.constexpr, STORE_Y: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store a row of both q, and of what is stored besides. TOGETHER: both in ``qg``, of 2n columns, with one scale. WIDE: a
    row has more than BLOCK columns and is computed twice."""
    n, dy_stride = multiple(n, UNIT), multiple(dy_stride, UNIT)
    gate_stride, up_stride = multiple(gate_stride, UNIT), multiple(up_stride, UNIT)
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    dgate_ptr += row * n
    dup_ptr += row * n
    y_ptr += row * n
    if TOGETHER:
        qg_ptr += row * 2 * n
        qu_ptr = qg_ptr + n
    else:
        qg_ptr += row * n
        qu_ptr += row * n
    cols = tl.arange(0, BLOCK)
    dgate, dup, y = _backward(dy_ptr, gate_ptr, up_ptr, cols, cols < n, KIND)
    largest_g, largest_u = _magnitude(dgate), _magnitude(dup)
    if STORE_DGATE:
        tl.store(dgate_ptr + cols, dgate, cols < n)
    if STORE_DUP:
        tl.store(dup_ptr + cols, dup, cols < n)
    if STORE_Y:
        tl.store(y_ptr + cols, y, cols < n)
    if WIDE:
        for start in range(BLOCK, n, BLOCK):
            more = start + cols
            g, u, y = _backward(dy_ptr, gate_ptr, up_ptr, more, more < n, KIND)
            largest_g, largest_u = tl.maximum(largest_g, _magnitude(g)), tl.maximum(largest_u, _magnitude(u))
            if STORE_DGATE:
                tl.store(dgate_ptr + more, g, more < n)
            if STORE_DUP:
                tl.store(dup_ptr + more, u, more < n)
            if STORE_Y:
                tl.store(y_ptr + more, y, more < n)
    if TOGETHER:
        scale_g, factor_g = row_scale(tl.max(tl.maximum(largest_g, largest_u), 0), POWER_OF_TWO)
        factor_u = factor_g
    else:
        scale_g, factor_g = row_scale(tl.max(largest_g, 0), POWER_OF_TWO)
        scale_u, factor_u = row_scale(tl.max(largest_u, 0), POWER_OF_TWO)
        tl.store(up_scale_ptr + row, scale_u)
    tl.store(gate_scale_ptr + row, scale_g)
    tl.store(qg_ptr + cols, _quantized(dgate, factor_g, qg_ptr), cols < n)
    tl.store(qu_ptr + cols, _quantized(dup, factor_u, qu_ptr), cols < n)
    if WIDE:
        for start in range(BLOCK, n, BLOCK):
            more = start + cols
            g, u, _ = _backward(dy_ptr, gate_ptr, up_ptr, more, more < n, KIND)
            tl.store(qg_ptr + more, _quantized(g, factor_g, qg_ptr), more < n)
            tl.store(qu_ptr + more, _quantized(u, factor_u, qu_ptr), more < n)


@planner
def forward_plan(n: int) -> Plan:
    """Choose by the columns ``n``: a row is held in registers, beyond 16384 columns it is computed twice."""
    block = min(max(next_power_of_2(n), 128), 16384)
    return Plan(BLOCK=block, num_warps=min(max(block // 1024, 4), 16))


@planner
def backward_plan(n: int) -> Plan:
    """Choose by the columns ``n``. Three inputs and three results of a row fill the registers: up to 8192 columns it is
    faster to compute it twice, with more rows at a time on a multiprocessor (H200; 3072, 8192 and 14336 columns)."""
    if 8192 < n <= 16384:
        return Plan(BLOCK=16384, num_warps=32)
    block = min(max(next_power_of_2(n) // 4, 128), 4096)
    return Plan(BLOCK=block, num_warps=min(max(block // 256, 4), 16))


def _without_float8(kind: str):
    """Returns the op without float8 and its backward, and what both take besides tensors."""
    op, more = (swiglu, ()) if kind == "silu" else (geglu, (kind,))
    return op.overload, op.backward, more


@torch.no_grad()  # the ops have no gradient, their references neither
def _forward_rows(gate, up, kind, power_of_two, store):
    gates, ups = as_rows(gate), as_rows(up)
    if gate.device.type == "cpu" and not interpreting():
        forward, _, more = _without_float8(kind)
        y = forward(gates, ups, *more)
        return *quantize_rows_inline(y, power_of_two=power_of_two), y if store else y.new_empty(0)
    results = _forward_results(gate, up, kind, power_of_two, store)
    (m, n), strides = gates.shape, (gates.stride(0), ups.stride(0))
    plan = forward_plan(n)
    launch(
        quantize_glu_kernel, (m,), gates, ups, *results, n, *strides, KIND=ACTIVATIONS[kind].value,
        POWER_OF_TWO=power_of_two, STORE_Y=store, WIDE=n > plan.BLOCK, UNIT=unit_of(n, *strides), **plan.meta(),
    )  # fmt: skip
    return results


@torch.no_grad()
def _backward_rows(dy, gate, up, kind, power_of_two, store, together=False):
    dys, gates, ups = as_rows(dy), as_rows(gate), as_rows(up)
    if gate.device.type == "cpu" and not interpreting():
        forward, backward, more = _without_float8(kind)
        both = backward(dys, gates, ups, *more, [True, True])
        made = [quantize_rows_inline(x, power_of_two=power_of_two) for x in ([torch.cat(both, 1)] if together else both)]
        rows = *made[0], *(_rows_of(up, 0) if together else made[1])
        stored = zip((*both, forward(gates, ups, *more)), store, strict=True)
        return *rows, *(t if kept else t.new_empty(0) for t, kept in stored)
    results = _backward_results(dy, gate, up, kind, power_of_two, store, together)
    (m, n), strides = gates.shape, (dys.stride(0), gates.stride(0), ups.stride(0))
    plan = backward_plan(n)
    launch(
        quantize_glu_bwd_kernel, (m,), dys, gates, ups, *results, n, *strides, KIND=ACTIVATIONS[kind].value,
        POWER_OF_TWO=power_of_two, TOGETHER=together, STORE_DGATE=store[0], STORE_DUP=store[1], STORE_Y=store[2],
        WIDE=n > plan.BLOCK, UNIT=unit_of(n, *strides), **plan.meta(),
    )  # fmt: skip
    return results


def _rows_of(x, times=1):
    """Returns memory for q, which has ``times`` as many columns as x, and the scales of its rows."""
    n = x.shape[-1]
    m = x.numel() // n if times else 0
    return x.new_empty((m, n * times), dtype=E4M3), x.new_empty((m, 1), dtype=torch.float32)


def _stored(x, kept):
    return x.new_empty((x.numel() // x.shape[-1], x.shape[-1]) if kept else 0)


def _forward_results(gate, up, kind, power_of_two, store):
    return *_rows_of(gate), _stored(gate, store)


def _backward_results(dy, gate, up, kind, power_of_two, store, together=False):
    rows = (*_rows_of(gate, 2), *_rows_of(up, 0)) if together else (*_rows_of(gate), *_rows_of(up))
    return *rows, *(_stored(gate, kept) for kept in store)


quantize_glu = plain_op(
    "quantize_glu",
    "(Tensor gate, Tensor up, str kind, bool power_of_two, bool store) -> (Tensor q, Tensor scale, Tensor y)",
    _forward_rows,
    _forward_results,
)
quantize_glu_bwd = plain_op(
    "quantize_glu_bwd",
    "(Tensor dy, Tensor gate, Tensor up, str kind, bool power_of_two, bool[] store, bool together=False) -> "
    "(Tensor q_gate, Tensor scale_gate, Tensor q_up, Tensor scale_up, Tensor dgate, Tensor dup, Tensor y)",
    _backward_rows,
    _backward_results,
)
trace_launches(quantize_glu, _forward_rows)
trace_launches(quantize_glu_bwd, _backward_rows)
