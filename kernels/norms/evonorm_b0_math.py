"""EvoNorm-B0's formulas at one element, for the kernels that evaluate them; symbols as in ``evonorm_b0.py``."""

import triton
import triton.language as tl

from fx_fusion.kernels.lib.fast_math import reciprocal


@triton.jit
def denominator(x, v, I_nc, L_c, EXACT: tl.constexpr):
    """Returns v x + I_nc, and 1 / d."""
    vx_I = v * x + I_nc
    return vx_I, reciprocal(tl.maximum(L_c, vx_I, propagate_nan=tl.PropagateNan.ALL), EXACT)


@triton.jit
def gradients(x, dy, v, I_nc, L_c, EXACT: tl.constexpr):
    """Returns 1 / d, the term of dw (dy · x / d), q / −w and r q / −w: the factor −w is applied once, to their sums."""
    vx_I, inv_d = denominator(x, v, I_nc, L_c, EXACT)
    dw = dy * (x * inv_d)
    q = dw * inv_d
    rq = tl.where(vx_I < L_c, 0.0, tl.where(vx_I == L_c, 0.5 * q, q))  # a tie: half to each, as max; NaN: both
    return inv_d, dw, q, rq
