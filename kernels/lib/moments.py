"""Means and sums of squared distances without cancellation: one value after the other, lanes merged, means corrected."""

import torch
import triton
import triton.language as tl

STEPS = tl.constexpr(32)  # values of a lane between two calls of ``rebased``


def rounds(dtype: torch.dtype, count: int) -> bool:
    """Whether the fp32 sum of ``count`` equal values can be a rounded one, and their mean another value: numbers of 11 bits
    (fp16) have exact sums up to 2^13 of them, of 8 bits (bf16) up to 2^16."""
    return count > 2 ** (24 - {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24))


@triton.jit
def shifted(sums, squares, x, shift, live):
    """One more value in each live lane, as its distance from ``shift``: three instructions, Welford's update takes eight."""
    apart = tl.where(live, x - shift, 0.0)
    return sums + apart, squares + apart * apart


@triton.jit
def rebased(sums, squares, shift, count):
    """The same moments about the mean of the ``count`` values that each lane has seen: sums, squares (now m2) and shift
    (now the mean). Between two calls the squares grow by STEPS values, so what cancels here is bounded by that."""
    move = sums / tl.maximum(count, 1.0)
    squares = tl.maximum(squares - sums * move, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.zeros_like(sums), squares, shift + move


@triton.jit
def seen(length, LANES: tl.constexpr):
    """How many of ``length`` values each lane has seen."""
    return tl.maximum((length - tl.arange(0, LANES) + LANES - 1) // LANES, 0).to(tl.float32)


@triton.jit
def merge(mean, m2, count, axis: tl.constexpr):
    """Chan's formula along an axis: lanes that have seen ``count`` values each -> total count, mean and m2."""
    total = tl.sum(count, axis)
    at_least_one = tl.maximum(total, 1.0)
    middle = tl.div_rn(tl.sum(mean * count, axis), at_least_one)
    apart = mean - tl.expand_dims(middle, axis)
    m2, off = corrected(tl.sum(m2 + apart * apart * count, axis), tl.sum(apart * count, axis), at_least_one)
    return total, middle + off, m2


@triton.jit
def joined(count, mean, m2, n, middle, spread):
    """Chan's formula for two: moments of ``count`` values and of ``n`` more. The share of the first n is 1, exactly: a
    rounded product would move their mean."""
    both = count + n
    share = tl.div_rn(n, tl.maximum(both, 1.0))
    apart = middle - mean
    return both, mean + apart * share, m2 + spread + apart * apart * count * share


@triton.jit
def corrected(squares, sums, count):
    """Squares and sums of distances from a rounded mean -> m2, and what that mean is off by. Equal values have a distance
    of their own otherwise, and 1 / sqrt(var + eps) makes it large. Chan, Golub and LeVeque 1983, equation 1.7."""
    off = tl.div_rn(sums, count)
    return tl.maximum(squares - off * sums, 0.0, propagate_nan=tl.PropagateNan.ALL), off
