"""What a size or stride is a multiple of, said to Triton. It sees that of 16 by itself; of 8, or 4, it does not, and reads
numbers one by one where they could be read 16 bytes at once (776 columns, 50280 classes)."""

import math

import triton
import triton.language as tl


@triton.jit
def multiple(n, of: tl.constexpr):
    """n, which is a multiple of ``of``."""
    return n if of == 16 or of == 1 else n // of * of


def unit_of(*sizes: int) -> int:
    """The largest of 1, 2, 4, 8 and 16 that divides all of these: what kernels take as ``UNIT``."""
    return math.gcd(16, *sizes)
