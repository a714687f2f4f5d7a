"""Functions in as few instructions as the hardware has for them: kernels wait for what they do at each element."""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """Results below 2^-126 are 0; ``tl.exp`` keeps them, for three instructions more."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x, EXACT: tl.constexpr):
    """1 / x of x > 0. The square of a reciprocal root is two instructions, a division five; it is off by 2^-22, which
    numbers of 16 bits do not show: EXACT is for those of 32."""
    if EXACT:
        y = 1.0 / x
    else:
        root = tl.rsqrt(x)
        y = root * root
    return y


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    return reciprocal(1.0 + exp(-x), EXACT)
