"""Short causal convolution of each channel, with or without SiLU, forward and backward.

    z[t] = bias + Σ_j w[j] · x[t − taps + 1 + j]            x is 0 before the first token;  j = 0 .. taps − 1
    y    = z or silu(z)

    dz    = dy or dy · silu'(z)
    dx[t] = Σ_j w[j] · dz[t + taps − 1 − j]                 dz is 0 behind the last token
    dw[j] = Σ_t dz[t] · x[t − taps + 1 + j]                 dbias = Σ_t dz[t]

A program walks along a *strip* of the tokens of one sequence, four at a time, for a block of channels, and keeps the last
three tokens in registers: each element is read from memory once. Weights of two or three taps get taps of 0 in front.

Shapes     x, y: (b, c, t); weight: (c, 1, taps), taps <= 4; bias: (c) or None. Results have channels innermost; so has x in
           models, where it is a transposed product. Other inputs are copied.
Dtypes     bf16 | fp16 | fp32, mixed; arithmetic in fp32, one rounding per store.
Saved      x, weight, bias.
Traffic    forward 2·b·c·t elements, backward 3·b·c·t.
Source     Gu and Dao 2023, arXiv:2312.00752 (Mamba).
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.column_sums import column_sums
from fx_fusion.kernels.lib.device import multiprocessors
from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.fast_math import sigmoid
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.ops.fused_op import fused_op
from fx_fusion.ops.launch import launch

MOST_TAPS = 4
_STEP = tl.constexpr(4)  # tokens a step, as many as taps: what one step reads is what the next one keeps


@triton.jit
def _weights(w_ptr, cols, live, TAPS: tl.constexpr):
    """Return the weights of the last four taps."""
    w3 = tl.load(w_ptr + cols * TAPS + (TAPS - 1), live, 0.0).to(tl.float32)
    w2, w1, w0 = tl.zeros_like(w3), tl.zeros_like(w3), tl.zeros_like(w3)
    if TAPS > 1:
        w2 = tl.load(w_ptr + cols * TAPS + (TAPS - 2), live, 0.0).to(tl.float32)
    if TAPS > 2:
        w1 = tl.load(w_ptr + cols * TAPS + (TAPS - 3), live, 0.0).to(tl.float32)
    if TAPS > 3:
        w0 = tl.load(w_ptr + cols * TAPS, live, 0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _token(ptr, token, tokens, stride, cols, c):
    """Return one token's channels, 0 outside of the sequence."""
    there = cols < tl.where((token >= 0) & (token < tokens), c, 0)
    return tl.load(ptr + tl.cast(token, tl.int64) * stride + cols, there, 0.0).to(tl.float32)


@triton.jit
def _store(ptr, value, token, begin, end, cols, c):
    """Store one token's channels if it is one of begin .. end."""
    there = cols < tl.where((token >= begin) & (token < end), c, 0)
    tl.store(ptr + tl.cast(token, tl.int64) * c + cols, value.to(ptr.dtype.element_ty), there)


@triton.jit
def _sum(start, w0, w1, w2, w3, x0, x1, x2, x3, TAPS: tl.constexpr):
    """Return the sum over the taps that there are: a weight of 0 would make NaN of infinity."""
    total = start + w3 * x3
    if TAPS > 1:
        total += w2 * x2
    if TAPS > 2:
        total += w1 * x1
    if TAPS > 3:
        total += w0 * x0
    return total


@triton.jit
def _activated(z, SILU: tl.constexpr, EXACT: tl.constexpr):
    return z * sigmoid(z, EXACT) if SILU else z


@triton.jit
def _slope(dy, z, SILU: tl.constexpr, EXACT: tl.constexpr):
    """Return dz."""
    if SILU:
        s = sigmoid(z, EXACT)
        dy = dy * s * (1.0 + z * (1.0 - s))
    return dy


@triton.jit
def _causal_conv1d_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, tokens, c, x_batch, x_token, strips, length,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Store y of a strip of ``length`` tokens of a sequence."""
    c, x_batch, x_token = multiple(c, UNIT), multiple(x_batch, UNIT), multiple(x_token, UNIT)
    blocks = tl.cdiv(c, BLOCK)
    place = tl.program_id(0) // blocks
    batch, strip = place // strips, place % strips
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    live = cols < c
    x_ptr += batch.to(tl.int64) * x_batch
    y_ptr += batch.to(tl.int64) * tokens * c
    w0, w1, w2, w3 = _weights(w_ptr, cols, live, TAPS)
    bias = tl.zeros_like(w3)
    if BIAS:
        bias = tl.load(bias_ptr + cols, live, 0.0).to(tl.float32)
    first = strip * length
    end = tl.minimum(first + length, tokens)
    p, q, r = (
        _token(x_ptr, first - 3, tokens, x_token, cols, c), _token(x_ptr, first - 2, tokens, x_token, cols, c),
        _token(x_ptr, first - 1, tokens, x_token, cols, c),
    )  # fmt: skip
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    for t in tl.range(first, end, _STEP, num_stages=STAGES):
        a = _token(x_ptr, t, tokens, x_token, cols, c)
        b = _token(x_ptr, t + 1, tokens, x_token, cols, c)
        d = _token(x_ptr, t + 2, tokens, x_token, cols, c)
        e = _token(x_ptr, t + 3, tokens, x_token, cols, c)
        y0 = _activated(_sum(bias, w0, w1, w2, w3, p, q, r, a, TAPS), SILU, EXACT)
        y1 = _activated(_sum(bias, w0, w1, w2, w3, q, r, a, b, TAPS), SILU, EXACT)
        y2 = _activated(_sum(bias, w0, w1, w2, w3, r, a, b, d, TAPS), SILU, EXACT)
        y3 = _activated(_sum(bias, w0, w1, w2, w3, a, b, d, e, TAPS), SILU, EXACT)
        _store(y_ptr, y0, t, first, end, cols, c)
        _store(y_ptr, y1, t + 1, first, end, cols, c)
        _store(y_ptr, y2, t + 2, first, end, cols, c)
        _store(y_ptr, y3, t + 3, first, end, cols, c)
        p, q, r = b, d, e


@triton.jit
def _causal_conv1d_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, bias_ptr, dx_ptr, parts_ptr, tokens, c, dy_batch, dy_token, x_batch, x_token, strips, length,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Store dx of a strip of ``length`` tokens, a multiple of four, and its sums dw and dbias: (programs, 5, c).

    dx of a token needs dz of the next three, so the walk takes one step more, and stores three tokens behind."""
    c, dy_batch, dy_token = multiple(c, UNIT), multiple(dy_batch, UNIT), multiple(dy_token, UNIT)
    x_batch, x_token = multiple(x_batch, UNIT), multiple(x_token, UNIT)
    blocks = tl.cdiv(c, BLOCK)
    place = tl.program_id(0) // blocks
    batch, strip = place // strips, place % strips
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    live = cols < c
    dy_ptr += batch.to(tl.int64) * dy_batch
    x_ptr += batch.to(tl.int64) * x_batch
    dx_ptr += batch.to(tl.int64) * tokens * c
    w0, w1, w2, w3 = _weights(w_ptr, cols, live, TAPS)
    bias = tl.zeros_like(w3)
    if BIAS:
        bias = tl.load(bias_ptr + cols, live, 0.0).to(tl.float32)
    first = strip * length
    end = tl.minimum(first + length, tokens)
    p, q, r = (
        _token(x_ptr, first - 3, tokens, x_token, cols, c), _token(x_ptr, first - 2, tokens, x_token, cols, c),
        _token(x_ptr, first - 1, tokens, x_token, cols, c),
    )  # fmt: skip
    zero = tl.zeros_like(w3)
    f, g, h = zero, zero, zero  # dz of the last three tokens
    dw0, dw1, dw2, dw3, db = zero, zero, zero, zero, zero
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    for t in tl.range(first, first + length + _STEP, _STEP, num_stages=STAGES):
        a = _token(x_ptr, t, tokens, x_token, cols, c)
        b = _token(x_ptr, t + 1, tokens, x_token, cols, c)
        d = _token(x_ptr, t + 2, tokens, x_token, cols, c)
        e = _token(x_ptr, t + 3, tokens, x_token, cols, c)
        z0 = _sum(bias, w0, w1, w2, w3, p, q, r, a, TAPS)
        z1 = _sum(bias, w0, w1, w2, w3, q, r, a, b, TAPS)
        z2 = _sum(bias, w0, w1, w2, w3, r, a, b, d, TAPS)
        z3 = _sum(bias, w0, w1, w2, w3, a, b, d, e, TAPS)
        i = _slope(_token(dy_ptr, t, tokens, dy_token, cols, c), z0, SILU, EXACT)
        j = _slope(_token(dy_ptr, t + 1, tokens, dy_token, cols, c), z1, SILU, EXACT)
        k = _slope(_token(dy_ptr, t + 2, tokens, dy_token, cols, c), z2, SILU, EXACT)
        m = _slope(_token(dy_ptr, t + 3, tokens, dy_token, cols, c), z3, SILU, EXACT)
        _store(dx_ptr, _sum(zero, w0, w1, w2, w3, i, h, g, f, TAPS), t - 3, first, end, cols, c)
        _store(dx_ptr, _sum(zero, w0, w1, w2, w3, j, i, h, g, TAPS), t - 2, first, end, cols, c)
        _store(dx_ptr, _sum(zero, w0, w1, w2, w3, k, j, i, h, TAPS), t - 1, first, end, cols, c)
        _store(dx_ptr, _sum(zero, w0, w1, w2, w3, m, k, j, i, TAPS), t, first, end, cols, c)
        f, g, h = j, k, m
        if t < first + length:  # the last step is of the next strip
            dw0 += i * p + j * q + k * r + m * a
            dw1 += i * q + j * r + k * a + m * b
            dw2 += i * r + j * a + k * b + m * d
            dw3 += i * a + j * b + k * d + m * e
            db += i + j + k + m
        p, q, r = b, d, e
    at = parts_ptr + place.to(tl.int64) * 5 * c + cols
    tl.store(at, dw0, live)
    tl.store(at + c, dw1, live)
    tl.store(at + 2 * c, dw2, live)
    tl.store(at + 3 * c, dw3, live)
    tl.store(at + 4 * c, db, live)


@planner
def causal_conv1d_plan(c: int, b: int, t: int, x, backward: bool) -> Plan:
    """Choose by ``c`` channels, ``b`` sequences of ``t`` tokens, and the multiprocessors of x's device. Numbers: a rule of
    thumb, as the kernels are bound by memory.

    Returns BLOCK channels of a program, STAGES of its loop, ``num_warps``, and ``length``, the tokens of a strip."""
    block = min(next_power_of_2(c), 512)
    programs = (4 if backward else 8) * multiprocessors(x)
    strips = max(1, programs // (cdiv(c, block) * b))
    length = max(16, cdiv(cdiv(t, strips), _STEP.value) * _STEP.value)
    return Plan(BLOCK=block, STAGES=1, num_warps=4, length=length)


def _channels_last(x):
    """Return x: (b, c, t) as (b, t, c) with unit stride along c."""
    rows = x.transpose(1, 2)
    return rows if rows.stride(2) == 1 or rows.shape[2] == 1 else rows.contiguous()


def _launch(kernel, plan, tensors, strides, x, weight, silu, bias):
    b, t, c = x.shape
    strips = cdiv(t, plan.length)
    launch(
        kernel, (cdiv(c, plan.BLOCK) * b * strips,), *tensors, t, c, *strides, strips, plan.length, TAPS=weight.shape[2],
        BIAS=bias, SILU=silu, UNIT=unit_of(c, *strides), **plan.meta(),
    )  # fmt: skip


def _fwd(x, weight, bias, silu):
    rows = _channels_last(x)
    b, t, c = rows.shape
    y = torch.empty((b, t, c), dtype=x.dtype, device=x.device)  # as in empty_images: not empty_strided
    if y.numel():
        plan, weights = causal_conv1d_plan(c, b, t, x, False), weight.contiguous()
        tensors = rows, weights, y if bias is None else bias.contiguous(), y
        _launch(_causal_conv1d_fwd_kernel, plan, tensors, rows.stride()[:2], rows, weight, silu, bias is not None)
    return y.transpose(1, 2)


def _bwd(dy, x, weight, bias, silu, needs):
    rows, dys = _channels_last(x), _channels_last(dy)
    b, t, c = rows.shape
    taps = weight.shape[2]
    dx = torch.empty((b, t, c), dtype=x.dtype, device=x.device)
    if not dx.numel():
        none = torch.zeros_like(weight) if bias is None else torch.zeros_like(bias)
        return dx.transpose(1, 2), torch.zeros_like(weight), none
    plan = causal_conv1d_plan(c, b, t, x, True)
    parts = torch.empty(1, b * cdiv(t, plan.length), 5 * c, dtype=torch.float32, device=x.device)
    weights = weight.contiguous()
    biases = parts if bias is None else bias.contiguous()
    tensors, strides = (dys, rows, weights, biases, dx, parts), (*dys.stride()[:2], *rows.stride()[:2])
    _launch(_causal_conv1d_bwd_kernel, plan, tensors, strides, rows, weight, silu, bias is not None)
    sums = column_sums(parts, [torch.float32])[0]
    assert sums is not None
    sums = sums.view(5, c)
    dweight = sums[MOST_TAPS - taps : MOST_TAPS].t().clone(memory_format=torch.contiguous_format).to(weight.dtype)
    dbias = sums.new_empty(0) if bias is None else sums[4].clone().to(bias.dtype)
    return dx.transpose(1, 2), dweight.unsqueeze(1), dbias


def _fake(x, weight, bias, silu):
    b, c, t = x.shape
    return torch.empty_strided((b, c, t), (t * c, 1, c), dtype=x.dtype, device=x.device)  # no view, as of a transposed one


causal_conv1d = fused_op(
    "causal_conv1d",
    ("(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor y", _fwd),
    (
        "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, bool silu, bool[] needs)"
        " -> (Tensor dx, Tensor dweight, Tensor dbias)",
        _bwd,
    ),
    fake=_fake,
    grads=("x", "weight", "bias"),
    cheap=True,
)
