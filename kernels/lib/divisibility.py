"""Divisors of sizes and strides, told to Triton. It specializes kernels for multiples of 16, not of 8 or 4 (776 columns,
50280 classes): without this it loads their elements one by one instead of 16 bytes at once."""

import math

import triton
import triton.language as tl


@triton.jit
def multiple(n, of: tl.constexpr):
    """Returns n in a form that shows that it is a multiple of ``of``."""
    return n if of == 16 or of == 1 else n // of * of


def unit_of(*sizes: int) -> int:
    """Returns the largest of 1, 2, 4, 8 and 16 that divides all ``sizes``: the ``UNIT`` of a kernel."""
    return math.gcd(16, *sizes)
