"""Bounds of integer expressions over indices, by interval arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import sympy
from sympy.core.function import AppliedUndef

Range = tuple[int, int]
_Interval = tuple[sympy.Rational, sympy.Rational]
_MOST_DIGITS = 400  # A power beyond that fits into no dtype.


def bounds_of(expression: sympy.Basic, range_of: Callable[[sympy.Basic], Range]) -> Range | None:
    """Return the least and the largest value that an expression may have, or None where no rule knows one of its parts.

    The bounds hold, but need not be reached: the same index in two places counts as two.

    Args:
        range_of: the range of a symbol, or of a function that stands for a tensor.
    """
    bounds = _bounds(expression, range_of)
    return None if bounds is None else (math.floor(bounds[0]), math.ceil(bounds[1]))


def _bounds(expression: sympy.Basic, range_of: Callable[[sympy.Basic], Range]) -> _Interval | None:
    if expression.is_Rational:
        return expression, expression
    if isinstance(expression, (sympy.Symbol, AppliedUndef)):
        low, high = range_of(expression)
        return sympy.Integer(low), sympy.Integer(high)
    parts = expression.args if not isinstance(expression, sympy.Piecewise) else [value for value, _ in expression.args]
    known = [_bounds(part, range_of) for part in parts]
    found = [pair for pair in known if pair is not None]
    if not found or len(found) < len(known):
        return None
    lows, highs = zip(*found, strict=True)
    match expression:
        case sympy.Add():
            return sum(lows), sum(highs)
        case sympy.Mul():
            low, high = found[0]
            for other in found[1:]:
                corners = [a * b for a, b in itertools.product((low, high), other)]
                low, high = min(corners), max(corners)
            return low, high
        case sympy.Pow():
            (low, high), (exponent, same) = found
            largest = max(abs(low), abs(high), sympy.Integer(1))
            if exponent != same or not exponent.is_Integer or exponent < 0 or exponent > _MOST_DIGITS:
                return None
            return (sympy.Integer(0) if exponent % 2 == 0 else -(largest**exponent)), largest**exponent
        case sympy.Abs():
            return sympy.Integer(0), max(abs(lows[0]), abs(highs[0]))
        case sympy.floor():
            return sympy.floor(lows[0]), sympy.floor(highs[0])
        case sympy.Max() | sympy.Min() | sympy.Piecewise():
            return min(lows), max(highs)
    return None
