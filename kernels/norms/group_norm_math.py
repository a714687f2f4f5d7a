"""What every kernel of ``channel_norm`` is given, and what it computes at an element; the formulas stand there."""

import math

import triton
import triton.language as tl

from fx_fusion.kernels.lib.fast_math import sigmoid

GROUP_NORM, GROUP_NORM_SWISH, EVONORM_S0 = 0, 1, 2


class Norm:
    """A norm of a tensor of images: sizes, and parameters as kernels take them (any tensor where there is none)."""

    def __init__(self, x, groups: int, weight, bias, v, kind: int, correction: int):
        self.kind, self.groups = kind, groups
        self.n, self.c = x.shape[:2]
        self.size = math.prod(x.shape[2:])
        self.all_groups, self.per_group = self.n * groups, self.c // groups
        self.length = self.per_group * self.size
        self.unit = math.gcd(self.size, 16)  # what every row of positions starts at a multiple of
        self.freedom = float(self.length - correction)
        self.parameters = tuple(x if t is None else t.contiguous() for t in (weight, bias, v))
        self.flags = {"KIND": kind, "HAS_W": weight is not None, "HAS_B": bias is not None}
        self.sums = 3 if kind == EVONORM_S0 else 2  # gradients of parameters: db, dw, dv


@triton.jit
def of_channels(ptr, c, live, other, HAS: tl.constexpr):
    """One parameter of each channel in fp32; ``other`` where there is none."""
    if HAS:
        value = tl.load(ptr + c, live, other).to(tl.float32)
    else:
        value = tl.where(live, other, other) + tl.zeros_like(c).to(tl.float32)
    return value


@triton.jit
def parameters(w_ptr, b_ptr, v_ptr, c, live, KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr):
    """w, b and v of channels."""
    w = of_channels(w_ptr, c, live, 1.0, HAS_W)
    b = of_channels(b_ptr, c, live, 0.0, HAS_B)
    v = of_channels(v_ptr, c, live, 0.0, KIND == 2)
    return w, b, v


@triton.jit
def result(x, mean, scale, b, v, KIND: tl.constexpr, EXACT: tl.constexpr):
    """``scale`` is rstd · w."""
    if KIND == 2:
        y = x * sigmoid(v * x, EXACT) * scale + b
    else:
        y = (x - mean) * scale + b
        if KIND == 1:
            y = y * sigmoid(y, EXACT)
    return y


@triton.jit
def gradients(x, dy, mean, scale, b, v, KIND: tl.constexpr, EXACT: tl.constexpr):
    """At every element, without what is the same in a channel: terms of db, of dw / rstd, of dv / scale, of the part of
    dx / scale that does not go through the statistics, and x - mean."""
    apart = x - mean
    if KIND == 2:
        s = sigmoid(v * x, EXACT)
        t = x * s
        bent = t - t * s
        db = dy
        dw = dy * t
        dv = dy * x * bent
        direct = dy * (s + v * bent)
    else:
        db = dy
        if KIND == 1:
            z = apart * scale + b
            s = sigmoid(z, EXACT)
            db = dy * (s + z * (s - s * s))
        dw = db * apart
        dv = dw
        direct = db
    return db, dw, dv, direct, apart


@triton.jit
def of_input(direct, apart, scale, rstd, across, along):
    """dx: ``across`` and ``along`` are the group's sums of dxhat, and of dxhat · xhat, by what they are divided by."""
    return direct * scale - (apart * (rstd * along * rstd) + rstd * across)


@triton.jit
def store_sums(sums_ptr, at, all_channels, db, dw, dv, live, KIND: tl.constexpr):
    tl.store(sums_ptr + at, db, live)
    tl.store(sums_ptr + all_channels + at, dw, live)
    if KIND == 2:
        tl.store(sums_ptr + 2 * tl.cast(all_channels, tl.int64) + at, dv, live)
