"""EvoNorm-B0's formulas at one element, for the kernels that evaluate them: see evonorm_b0.py."""

import triton
import triton.language as tl

from fx_fusion.kernels.lib.fast_math import reciprocal


@triton.jit
def over_larger(x, v, deviation, least, EXACT: tl.constexpr):
    """``v x + I``, and 1 / d."""
    right = v * x + deviation
    return right, reciprocal(tl.maximum(least, right, propagate_nan=tl.PropagateNan.ALL), EXACT)


@triton.jit
def gradients(x, dy, v, deviation, least, EXACT: tl.constexpr):
    """1 / d, dy · x / d, q and r q; the last two by −w what they are, which waits for their sums."""
    right, inverse = over_larger(x, v, deviation, least, EXACT)
    dw = dy * (x * inverse)
    q = dw * inverse
    won = tl.where(right < least, 0.0, tl.where(right == least, 0.5 * q, q))  # a tie: half to each, as max; NaN: both
    return inverse, dw, q, won
