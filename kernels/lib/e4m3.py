"""Numbers in e4m3, the float8 format of 4 bits of exponent and 3 of mantissa, whose largest is 448. Source: Micikevicius et
al. 2022, arXiv:2209.05433."""

import triton
import triton.language as tl


@triton.jit
def in_e4m3(x, factor):
    """Returns x times factor within the range of e4m3; NaN stays."""
    x *= factor
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))


@triton.jit
def _power_of_two(scale):
    """Returns the next power of two; infinity stays."""
    return ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def row_scale(largest, POWER_OF_TWO: tl.constexpr):
    """Returns the scale of rows whose largest magnitude this is, and what their numbers are multiplied by."""
    largest = tl.where(largest < 1e-30, 1e-30, largest)
    scale = largest * (1.0 / 448.0)
    factor = 448.0 / largest
    if POWER_OF_TWO:
        scale = _power_of_two(scale)
        factor = 1.0 / scale
    return scale, factor


@triton.jit
def store_rows(q_ptr, scale_ptr, x, rows, cols, mask, m, n, POWER_OF_TWO: tl.constexpr):
    """Store whole rows of x, in registers, in e4m3, and their scales."""
    x = tl.where(mask, x.to(tl.float32), 0.0)
    scale, factor = row_scale(tl.max(tl.abs(x), 1), POWER_OF_TWO)
    tl.store(scale_ptr + rows, scale, rows < m)
    tl.store(q_ptr + rows[:, None] * n + cols, in_e4m3(x, factor[:, None]).to(q_ptr.dtype.element_ty), mask)
