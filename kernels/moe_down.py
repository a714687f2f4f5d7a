"""The grouped products of experts; in front of the second one the gate and the router's weight, in one kernel.

    gate, up = halves of h, or its even and odd columns;  with a limit: gate at most limit, up between -limit and limit
    a    = (up + shift) · gate · σ(alpha · gate) · scale
    rows = a · weight[e]                                    for the rows of expert e, by torch's grouped product

    da      = drows · weight[e]ᵀ
    dscale  = Σ_columns da · a / scale                      dweight[e] = aᵀ · drows
    dh      = the derivatives of both halves, in one tensor

One launch of the backward computes dh, dscale and a once more, so a is never saved. Rows behind the last expert, from
``offsets[-1]`` on, are garbage, as grouped products leave them.

Shapes     h: (s, 2·i); scale: (s, 1); weight: (experts, i, n); offsets: (experts); rows: (s, n).
Dtypes     h, weight, rows: bf16; scale: bf16 | fp16 | fp32; arithmetic in fp32, one rounding per store.
Saved      h, scale, weight, offsets.
Traffic    beside the products: forward 3·s·i elements, backward 6·s·i.
Source     Shazeer 2020, arXiv:2002.05202 (SwiGLU); OpenAI 2025, arXiv:2508.10925 (with a limit).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fx_fusion.kernels.lib.fast_math import sigmoid
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op, register_autograd, trace_launches
from fx_fusion.ops.on_cpu import interpreting


@dataclass(frozen=True)
class Gate:
    """The formula of a gate; SwiGLU by default. ``limit``: 0 for none."""

    interleaved: bool = False
    limit: float = 0.0
    alpha: float = 1.0
    shift: float = 0.0

    @property
    def arguments(self):
        """Return what the op takes, in its order."""
        return self.interleaved, self.limit, self.alpha, self.shift


@triton.jit
def _load(ptr, first, i, there, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return gate and up, (ROWS, BLOCK), of the columns from ``first`` on; ptr, there: (ROWS, 1)."""
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
        gate, up = tl.split(tl.reshape(tl.load(ptr + cols, there & (cols < 2 * i), 0.0), (ROWS, BLOCK, 2)))
    else:
        cols = first + tl.arange(0, BLOCK)[None, :]
        gate, up = tl.load(ptr + cols, there & (cols < i), 0.0), tl.load(ptr + i + cols, there & (cols < i), 0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store(ptr, gate, up, first, i, there, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store what ``_load`` loads."""
    dtype = ptr.dtype.element_ty
    if INTERLEAVED:
        cols = 2 * first + tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(gate.to(dtype), up.to(dtype)), (ROWS, 2 * BLOCK))
        tl.store(ptr + cols, both, there & (cols < 2 * i))
    else:
        cols = first + tl.arange(0, BLOCK)[None, :]
        tl.store(ptr + cols, gate.to(dtype), there & (cols < i))
        tl.store(ptr + i + cols, up.to(dtype), there & (cols < i))


@triton.jit
def _clamped(gate, up, limit, LIMITED: tl.constexpr):
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL), -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def _moe_gate_fwd_kernel(
    h_ptr, scale_ptr, a_ptr, s, i, limit, alpha, shift, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.program_id(1) * BLOCK
    there, cols = row < s, first + tl.arange(0, BLOCK)[None, :]
    limit, alpha, shift = tl.cast(limit, tl.float32), tl.cast(alpha, tl.float32), tl.cast(shift, tl.float32)
    gate, up = _load(h_ptr + row * 2 * i, first, i, there, INTERLEAVED, ROWS, BLOCK)
    gate, up = _clamped(gate, up, limit, LIMITED)
    scale = tl.load(scale_ptr + row, there, 0.0).to(tl.float32)
    a = (up + shift) * (gate * sigmoid(alpha * gate, False)) * scale
    tl.store(a_ptr + row * i + cols, a.to(a_ptr.dtype.element_ty), there & (cols < i))


@triton.jit
def _moe_gate_bwd_kernel(
    da_ptr, h_ptr, scale_ptr, dh_ptr, dscale_ptr, a_ptr, s, i, limit, alpha, shift,
    INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < s
    limit, alpha, shift = tl.cast(limit, tl.float32), tl.cast(alpha, tl.float32), tl.cast(shift, tl.float32)
    scale = tl.load(scale_ptr + row, there, 0.0).to(tl.float32)
    dscale = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, i, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        da = tl.load(da_ptr + row * i + cols, there & (cols < i), 0.0).to(tl.float32)
        raw_gate, raw_up = _load(h_ptr + row * 2 * i, first, i, there, INTERLEAVED, ROWS, BLOCK)
        gate, up = _clamped(raw_gate, raw_up, limit, LIMITED)
        sigma = sigmoid(alpha * gate, False)
        act, up = gate * sigma, up + shift
        plain = up * act
        dscale += da * plain
        tl.store(a_ptr + row * i + cols, (plain * scale).to(a_ptr.dtype.element_ty), there & (cols < i))
        dplain = da * scale
        dgate, dup = dplain * up * sigma * (1.0 + alpha * gate * (1.0 - sigma)), dplain * act
        if LIMITED:
            dgate = tl.where(raw_gate > limit, 0.0, dgate)
            dup = tl.where(tl.abs(raw_up) > limit, 0.0, dup)
        _store(dh_ptr + row * 2 * i, dgate, dup, first, i, there, INTERLEAVED, ROWS, BLOCK)
    tl.store(dscale_ptr + row, tl.sum(dscale, 1)[:, None].to(dscale_ptr.dtype.element_ty), there)


@planner
def moe_gate_plan(i: int) -> Plan:
    """Choose ROWS x BLOCK of a program by the columns ``i``: blocks that divide them where there are such, 4096 elements."""
    whole = next((block for block in (1024, 512, 256, 128) if i % block == 0), None)
    block = whole or min(next_power_of_2(i), 1024)
    return Plan(ROWS=max(1, 4096 // block), BLOCK=block, num_warps=8)


def _gate_fwd(h, scale, gate):
    s, i = h.shape[0], h.shape[1] // 2
    a, plan = h.new_empty((s, i)), moe_gate_plan(i)
    if not h.is_cuda and not interpreting():
        return a.copy_(_derivatives(a, h, scale, gate)[2])
    if a.numel():
        launch(
            _moe_gate_fwd_kernel,
            (cdiv(s, plan.ROWS), cdiv(i, plan.BLOCK)), h.contiguous(), scale.contiguous(), a, s, i, gate.limit, gate.alpha,
            gate.shift, INTERLEAVED=gate.interleaved, LIMITED=gate.limit > 0, **plan.meta(),
        )  # fmt: skip
    return a


def _gate_bwd(da, h, scale, gate):
    s, i = da.shape
    dh, dscale, a, plan = h.new_empty(h.shape), scale.new_empty(scale.shape), h.new_empty((s, i)), moe_gate_plan(i)
    if not h.is_cuda and not interpreting():
        for mine, theirs in zip((dh, dscale, a), _derivatives(da, h, scale, gate), strict=True):
            mine.copy_(theirs)
        return dh, dscale, a
    if a.numel():
        launch(
            _moe_gate_bwd_kernel,
            (cdiv(s, plan.ROWS),), da.contiguous(), h.contiguous(), scale.contiguous(), dh, dscale, a, s, i, gate.limit,
            gate.alpha, gate.shift, INTERLEAVED=gate.interleaved, LIMITED=gate.limit > 0, **plan.meta(),
        )  # fmt: skip
    return dh, dscale, a


def _derivatives(da, h, scale, gate):
    """Return dh, dscale and a in float32 (float64 for float64), by torch's own ops."""
    da, h, scale = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (da, h, scale))
    raw = (h[:, ::2], h[:, 1::2]) if gate.interleaved else h.chunk(2, 1)
    g, up = (raw[0].clamp(max=gate.limit), raw[1].clamp(-gate.limit, gate.limit)) if gate.limit else raw
    sigma, up = torch.sigmoid(gate.alpha * g), up + gate.shift
    plain, dplain = up * g * sigma, da * scale
    dg, dup = dplain * up * sigma * (1 + gate.alpha * g * (1 - sigma)), dplain * g * sigma
    if gate.limit:
        dg, dup = dg.masked_fill(raw[0] > gate.limit, 0.0), dup.masked_fill(raw[1].abs() > gate.limit, 0.0)
    dh = torch.stack((dg, dup), -1).flatten(1) if gate.interleaved else torch.cat((dg, dup), 1)
    return dh, (da * plain).sum(1, keepdim=True), plain * scale


def _fwd(h, scale, weight, offsets, *gate):
    return F.grouped_mm(_gate_fwd(h, scale, Gate(*gate)), weight, offs=offsets)


def _bwd(drows, h, scale, weight, offsets, trained, *gate):
    drows = drows.contiguous()
    da = F.grouped_mm(drows, weight.transpose(1, 2), offs=offsets)
    dh, dscale, a = _gate_bwd(da, h, scale, Gate(*gate))
    return dh, dscale, _weight_gradient(a, drows, weight, offsets, trained)


def _weight_gradient(x, dy, weight, offsets, trained):
    """Return xᵀ · dy of each expert, laid out as ``weight``, (experts, i, n), which may be a transposed parameter; nothing
    where it is not trained."""
    if not trained:
        return dy.new_empty(0)
    if weight.stride(1) == 1:
        return F.grouped_mm(dy.t(), x, offs=offsets).transpose(1, 2)
    return F.grouped_mm(x.t(), dy, offs=offsets)


def _like_gradient(like, weight, trained):
    if not trained:
        return like.new_empty(0)
    experts, i, n = weight.shape
    return like.new_empty((experts, n, i)).transpose(1, 2) if weight.stride(1) == 1 else like.new_empty((experts, i, n))


def _fake(h, scale, weight, offsets, *gate):
    return h.new_empty((h.shape[0], weight.shape[2]))


def _fake_bwd(drows, h, scale, weight, offsets, trained, *gate):
    return h.new_empty(h.shape), scale.new_empty(scale.shape), _like_gradient(h, weight, trained)


_TENSORS = "Tensor h, Tensor scale, Tensor weight, Tensor offsets"
_GATE = "bool interleaved, float limit, float alpha, float shift"
moe_down = plain_op("moe_down", f"({_TENSORS}, {_GATE}) -> Tensor rows", _fwd, _fake)
moe_down_bwd = plain_op(
    "moe_down_bwd",
    f"(Tensor drows, {_TENSORS}, bool trained, {_GATE}) -> (Tensor dh, Tensor dscale, Tensor dweight)",
    _bwd,
    _fake_bwd,
)
trace_launches(moe_down, _fwd, symbolic=True)
trace_launches(moe_down_bwd, _bwd, symbolic=True)


def _save(ctx, inputs, output):
    *tensors, ctx.interleaved, ctx.limit, ctx.alpha, ctx.shift = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, drows):
    gate = ctx.interleaved, ctx.limit, ctx.alpha, ctx.shift
    trained = ctx.needs_input_grad[2]
    dh, dscale, dweight = moe_down_bwd(drows, *ctx.saved_tensors, trained, *gate)
    return dh, dscale, dweight if trained else None, *[None] * 5


register_autograd("moe_down", _backward, _save)


def _up(rows, weight, offsets):
    return F.grouped_mm(rows, weight, offs=offsets)


def _up_bwd(dh, rows, weight, offsets, trained):
    dh = dh.contiguous()
    return F.grouped_mm(dh, weight.transpose(1, 2), offs=offsets), _weight_gradient(rows, dh, weight, offsets, trained)


def _up_backward(ctx, dh):
    trained = ctx.needs_input_grad[1]
    drows, dweight = moe_up_bwd(dh, *ctx.saved_tensors, trained)
    return drows, dweight if trained else None, None


moe_up = plain_op(
    "moe_up", "(Tensor rows, Tensor weight, Tensor offsets) -> Tensor h", _up,
    lambda rows, weight, offsets: rows.new_empty((rows.shape[0], weight.shape[2])),
)  # fmt: skip
moe_up_bwd = plain_op(
    "moe_up_bwd",
    "(Tensor dh, Tensor rows, Tensor weight, Tensor offsets, bool trained) -> (Tensor drows, Tensor dweight)",
    _up_bwd,
    lambda dh, rows, weight, offsets, trained: (rows.new_empty(rows.shape), _like_gradient(rows, weight, trained)),
)
trace_launches(moe_up, _up, symbolic=True)
trace_launches(moe_up_bwd, _up_bwd, symbolic=True)
register_autograd("moe_up", _up_backward, lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
