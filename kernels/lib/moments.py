"""Moments without cancellation: mean and m2 = Σ (x − mean)², accumulated by lane, lanes merged, means corrected.

A lane accumulates distances from a ``shift`` near its values: ``sums`` = Σ (x − shift), ``squares`` = Σ (x − shift)². Every
STEPS values ``rebased`` moves the shift to the mean so far. Lanes, then blocks, are merged with Chan's formula.
"""

import torch
import triton
import triton.language as tl

STEPS = tl.constexpr(32)  # values that a lane accumulates between two calls of ``rebased``


def rounds(dtype: torch.dtype, count: int) -> bool:
    """Returns whether the fp32 sum of ``count`` equal values may be rounded, so that their mean differs from them: values of
    11 bits (fp16) have exact sums up to 2^13 of them, values of 8 bits (bf16) up to 2^16."""
    return count > 2 ** (24 - {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24))


@triton.jit
def shifted(sums, squares, x, shift, live):
    """Returns sums and squares after one more value in each live lane. Takes three instructions, Welford's update eight."""
    distance = tl.where(live, x - shift, 0.0)
    return sums + distance, squares + distance * distance


@triton.jit
def rebased(sums, squares, shift, count):
    """Returns sums (0), squares (m2) and shift (the mean) of the ``count`` values of each lane, after moving the shift to
    their mean. The cancellation in m2 is bounded, as squares grow by STEPS values between two calls."""
    move = sums / tl.maximum(count, 1.0)
    squares = tl.maximum(squares - sums * move, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.zeros_like(sums), squares, shift + move


@triton.jit
def seen(length, LANES: tl.constexpr):
    """Returns how many of ``length`` values each lane has accumulated."""
    return tl.maximum((length - tl.arange(0, LANES) + LANES - 1) // LANES, 0).to(tl.float32)


@triton.jit
def merge(mean, m2, count, axis: tl.constexpr):
    """Returns count, mean and m2 over an axis of lanes with those of each lane, by Chan's formula."""
    total = tl.sum(count, axis)
    divisor = tl.maximum(total, 1.0)
    rounded = tl.div_rn(tl.sum(mean * count, axis), divisor)
    delta = mean - tl.expand_dims(rounded, axis)
    m2, error = corrected(tl.sum(m2 + delta * delta * count, axis), tl.sum(delta * count, axis), divisor)
    return total, rounded + error, m2


@triton.jit
def joined(count_a, mean_a, m2_a, count_b, mean_b, m2_b):
    """Returns count, mean and m2 of the values of a and b together, by Chan's formula. For count_a = 0 the share of b is
    exactly 1: a rounded product would move mean_b."""
    count = count_a + count_b
    share = tl.div_rn(count_b, tl.maximum(count, 1.0))
    delta = mean_b - mean_a
    return count, mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share


@triton.jit
def corrected(squares, sums, count):
    """Returns m2 and the error of a rounded mean, from ``squares`` and ``sums`` of the distances from it. Uncorrected, equal
    values have a variance, and 1 / sqrt(var + eps) amplifies it. Chan, Golub and LeVeque 1983, equation 1.7."""
    error = tl.div_rn(sums, count)
    return tl.maximum(squares - error * sums, 0.0, propagate_nan=tl.PropagateNan.ALL), error
