"""Parameters and elementwise formulas of the kernels of ``group_norm_dispatch``; its docstring has their symbols.

In the code, of one element or one channel:

    centered  x − mean
    scale     rstd · w
    dof       L − correction (degrees of freedom)
    dz_J      dz · J, for evonorm_s0 dy · J
    mean_A    A / L
    mean_B    B / dof
"""

import math

import triton
import triton.language as tl

from fx_fusion.kernels.lib.fast_math import sigmoid

# KIND of a norm
GROUP_NORM = tl.constexpr(0)
GROUP_NORM_SWISH = tl.constexpr(1)
EVONORM_S0 = tl.constexpr(2)


class Norm:
    """A norm of a tensor of images: its sizes and its parameters.

    ``kind`` is GROUP_NORM, GROUP_NORM_SWISH or EVONORM_S0."""

    def __init__(self, x, groups: int, weight, bias, v, kind: tl.constexpr, correction: int):
        self.kind, self.groups = kind.value, groups
        self.n, self.c = x.shape[:2]
        self.size = math.prod(x.shape[2:])
        self.all_groups, self.per_group = self.n * groups, self.c // groups
        self.length = self.per_group * self.size
        self.unit = math.gcd(self.size, 16)  # the first position of every channel is at a multiple of it
        self.dof = float(self.length - correction)
        self._parameters = tuple(t if t is None else t.contiguous() for t in (weight, bias, v))
        self.flags = {"KIND": self.kind, "HAS_W": weight is not None, "HAS_B": bias is not None}
        self.sums = 3 if self.kind == EVONORM_S0.value else 2  # gradients of the parameters: db, dw, dv

    def parameters(self, other):
        """Returns weight, bias and v; ``other``, memory of any kind, for one that there is not: kernels do not read it."""
        return [other if t is None else t for t in self._parameters]


@triton.jit
def of_channels(ptr, c, live, other, HAS: tl.constexpr):
    """Returns a parameter of channels ``c`` in fp32; ``other`` where the norm HAS none."""
    if HAS:
        value = tl.load(ptr + c, live, other).to(tl.float32)
    else:
        value = tl.where(live, other, other) + tl.zeros_like(c).to(tl.float32)
    return value


@triton.jit
def parameters(w_ptr, b_ptr, v_ptr, c, live, KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr):
    """Returns w, b and v of channels ``c`` in fp32."""
    w = of_channels(w_ptr, c, live, 1.0, HAS_W)
    b = of_channels(b_ptr, c, live, 0.0, HAS_B)
    v = of_channels(v_ptr, c, live, 0.0, KIND == EVONORM_S0)
    return w, b, v


@triton.jit
def result(x, mean, scale, b, v, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Returns y."""
    if KIND == EVONORM_S0:
        y = x * sigmoid(v * x, EXACT) * scale + b
    else:
        y = (x - mean) * scale + b
        if KIND == GROUP_NORM_SWISH:
            y = y * sigmoid(y, EXACT)
    return y


@triton.jit
def gradients(x, dy, mean, scale, b, v, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Returns five terms of each element; factors that a channel's elements share are applied after its sums:

    db, dw / rstd, dv / scale    terms of the sums of a channel (dv: EVONORM_S0 only)
    dz_J                         dx / scale for constant mean and rstd
    centered                     x − mean"""
    centered = x - mean
    if KIND == EVONORM_S0:
        s = sigmoid(v * x, EXACT)
        t = x * s
        x_ds = t - t * s  # x σ (1 − σ)
        db = dy
        dw = dy * t
        dv = dy * x * x_ds
        dz_J = dy * (s + v * x_ds)
    else:
        db = dy
        if KIND == GROUP_NORM_SWISH:
            z = centered * scale + b
            s = sigmoid(z, EXACT)
            db = dy * (s + z * (s - s * s))
        dw = db * centered
        dv = dw
        dz_J = db
    return db, dw, dv, dz_J, centered


@triton.jit
def input_gradient(dz_J, centered, scale, rstd, mean_A, mean_B):
    """Returns dx."""
    return dz_J * scale - (centered * (rstd * mean_B * rstd) + rstd * mean_A)


@triton.jit
def store_sums(sums_ptr, at, all_channels, db, dw, dv, live, KIND: tl.constexpr):
    """Store db, dw and, for EVONORM_S0, dv of channels ``at`` in the rows of ``sums``: (2 or 3, all_channels)."""
    tl.store(sums_ptr + at, db, live)
    tl.store(sums_ptr + all_channels + at, dw, live)
    if KIND == EVONORM_S0:
        tl.store(sums_ptr + 2 * tl.cast(all_channels, tl.int64) + at, dv, live)
