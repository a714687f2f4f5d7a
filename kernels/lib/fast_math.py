"""Elementary functions in as few instructions as the hardware allows: elementwise kernels are bound by them."""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """Returns e^x; results below 2^-126 are 0. ``tl.exp`` keeps them, for three more instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x, EXACT: tl.constexpr):
    """Returns 1 / x for x > 0. A division takes five instructions, the square of a reciprocal root two; its error of 2^-22
    disappears when a result is rounded to 16 bits: EXACT is for results of 32."""
    if EXACT:
        y = 1.0 / x
    else:
        root = tl.rsqrt(x)
        y = root * root
    return y


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """Returns 1 / (1 + e^-x); EXACT as for ``reciprocal``."""
    return reciprocal(1.0 + exp(-x), EXACT)
