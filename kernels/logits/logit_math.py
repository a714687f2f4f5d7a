"""Blocks of one row of logits: z, running softmax sums per lane, and dz. Symbols of ``logit_rows``."""

import triton
import triton.language as tl

from fx_fusion.kernels.lib.fast_math import exp


@triton.jit
def tanh(x):
    """Returns tanh x, through exp of negative numbers only: it overflows for no x. Near 0, where 1 − e would lose its
    digits, the first terms of its Taylor series."""
    e = exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    s = x * x
    series = x * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0))))
    return tl.where(s < 0.01, series, tl.where(x < 0, -y, y))


@triton.jit
def load_z(pointers, live, scale, softcap, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Returns z of the logits at ``pointers``, −inf where not ``live``, and slope = 1 − (z / softcap)²."""
    z = tl.load(pointers, live, -float("inf")).to(tl.float32)
    slope = 1.0
    if SCALED:
        z *= scale
    if SOFTCAP:
        ratio = tanh(z / softcap)
        slope = 1.0 - ratio * ratio
        z = softcap * ratio
    if SCALED or SOFTCAP:
        z = tl.where(live, z, -float("inf"))
    return z, slope


@triton.jit
def end_columns(width, head, body, ALIGN: tl.constexpr, LANES: tl.constexpr):
    """Returns the columns of a row outside of head..head + body, one per lane, and which lanes have one: fewer than ALIGN
    before ``head`` and fewer than ALIGN behind the body."""
    e = tl.arange(0, LANES)
    cols = tl.where(e < ALIGN, e, head + body + e - ALIGN)
    return cols, tl.where(e < ALIGN, e < head, cols < width)


@triton.jit
def add_exp(tops, sums, z, LANES: tl.constexpr, EACH: tl.constexpr):
    """Update each lane's maximum ``tops`` and its sum Σ exp(z − tops), ``sums``, by EACH values of z; rescale sums once."""
    z = tl.reshape(z, (LANES, EACH))
    new_tops = tl.maximum(tops, tl.max(z, 1))
    base = tl.where(new_tops == -float("inf"), 0.0, new_tops)  # of a lane whose values are all −inf
    sums = sums * exp(tops - base) + tl.sum(exp(z - base[:, None]), 1)
    return new_tops, sums


@triton.jit
def add_exp_and_products(tops, sums, products, z, LANES: tl.constexpr, EACH: tl.constexpr):
    """Update as ``add_exp``, and Σ exp(z − tops) · (z − tops) in ``products``."""
    z = tl.reshape(z, (LANES, EACH))
    new_tops = tl.maximum(tops, tl.max(z, 1))
    base = tl.where(new_tops == -float("inf"), 0.0, new_tops)
    scaled = sums * exp(tops - base)
    products = products * exp(tops - base) + tl.where(scaled > 0, (tops - base) * scaled, 0.0)
    e = exp(z - base[:, None])
    products += tl.sum(tl.where(e > 0, e * (z - base[:, None]), 0.0), 1)
    return new_tops, scaled + tl.sum(e, 1), products


@triton.jit
def class_weights(weight_ptr, cols, live, HAS_WEIGHT: tl.constexpr):
    """Returns w of the classes ``cols``, 0 where not ``live``."""
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + cols, live, 0.0).to(tl.float32)
    else:
        w = tl.where(live, 1.0, 0.0)
    return w


@triton.jit
def weighted_z(weight_ptr, cols, live, z, HAS_WEIGHT: tl.constexpr):
    """Returns w · z of the classes ``cols``, 0 where not ``live``."""
    return tl.where(live, class_weights(weight_ptr, cols, live, HAS_WEIGHT) * z, 0.0)


@triton.jit
def dz_of(
    e, z, slope, top, q_sum, q_target, target, smooth, v, cols, live, weight_ptr, dentropy, mean,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Returns dl of the columns ``cols`` of a row; e = exp(z − top). The scalars of the row include its factors:
    q_sum · dloss · scale / total, q_target · dloss · scale, smooth = (ε / V) · dloss · scale, dentropy · scale / total."""
    dz = e * q_sum - tl.where(cols == target, q_target, 0.0)
    if SMOOTH:
        dz -= smooth * class_weights(weight_ptr, cols, live, HAS_WEIGHT)
    if ENTROPY:
        dz -= tl.where(e > 0, e * (z - top - mean), 0.0) * dentropy
    if SOFTCAP:
        dz *= slope
    if PADDED:
        dz = tl.where(cols < v, dz, 0.0)
    return dz
