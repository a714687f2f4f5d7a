"""Expressions over indices: what masks are made of, and bounds on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from fx_fusion.torch_internals.fakes import expression_of, lower_bound

DIMS = [sympy.Symbol(f"i{n}", integer=True, nonnegative=True) for n in range(8)]


class Opaque(Exception):
    """A node that the interpreter does not understand."""

    def __init__(self, node: fx.Node, reason: str):
        super().__init__(reason)
        self.node, self.reason = node, reason


class Interpreter(Protocol):
    """The part of ``MaskProver`` that rules use."""

    def name(self, node: fx.Node) -> str: ...
    def at(self, operand: Any, node: fx.Node, dims: list[Any] | None = None) -> sympy.Basic: ...
    def numbers(self, operand: Any, node: fx.Node) -> sympy.Basic: ...
    def anywhere(self, operand: fx.Node, node: fx.Node) -> sympy.Basic: ...
    def is_size(self, symbol: sympy.Symbol, node: fx.Node) -> bool: ...


def is_predicate(expression: sympy.Basic) -> bool:
    """Return True if an expression is a condition. (A sympy Symbol counts as a Boolean, an index is none.)"""
    return isinstance(expression, Boolean) and not isinstance(expression, sympy.Symbol)


def size_of(size: Any) -> sympy.Expr:
    """The expression of a number. A symbol in it has the sign that its range in the ShapeEnv allows it at every call: a
    size is positive, an int argument or an ``.item()`` may be 0 or negative."""
    if isinstance(size, (torch.SymInt, torch.SymFloat)):
        expression = expression_of(size)
        return expression.subs({s: _with_its_sign(s, size) for s in expression.free_symbols})
    return sympy.sympify(size)


def _with_its_sign(symbol: sympy.Symbol, number: torch.SymInt | torch.SymFloat) -> sympy.Symbol:
    if not symbol.is_integer:
        return sympy.Symbol(symbol.name, real=True)
    lowest = lower_bound(number, symbol)
    if lowest >= 1:
        return sympy.Symbol(symbol.name, integer=True, positive=True)
    return sympy.Symbol(symbol.name, integer=True, nonnegative=True if lowest >= 0 else None)


def symbols_of(shape: Iterable[Any]) -> frozenset[str]:
    """Return the names of the symbols that are the size of a dim. In ``n % 16`` the number n may be of any size."""
    sizes = [expression_of(size) for size in shape if isinstance(size, torch.SymInt)]
    return frozenset(size.name for size in sizes if isinstance(size, sympy.Symbol))


def sympified(number: float) -> sympy.Basic:
    """Return a Python number for sympy, whole floats as integers."""
    is_whole = isinstance(number, float) and math.isfinite(number) and number.is_integer()
    return sympy.Integer(int(number)) if is_whole else sympy.sympify(number)


def as_number(expression: sympy.Basic) -> sympy.Basic:
    if not is_predicate(expression):
        return expression
    if expression in (sympy.true, sympy.false):
        return sympy.Integer(expression is sympy.true)
    return sympy.Piecewise((1, expression), (0, True))


def as_predicate(expression: sympy.Basic, node: fx.Node) -> Boolean:
    if is_predicate(expression):
        return expression
    if isinstance(expression, sympy.Piecewise):
        known = {e: e.is_zero for e, _ in expression.args}  # of what hides in a mask that comes in, too
        if None not in known.values():
            return condition_for(list(expression.args), lambda e: not known[e])
    return sympy.true if expression.is_nonzero else sympy.false if expression.is_zero else sympy.Ne(expression, 0)


def parts_of(expression: sympy.Basic) -> list[tuple[Any, Any]]:
    """The values of an expression, each with its condition, the first that holds."""
    expression = sympy.piecewise_fold(expression)
    return list(expression.args) if isinstance(expression, sympy.Piecewise) else [(expression, sympy.true)]


def combined(function: Callable[[Any, Any], Any], a: sympy.Basic, b: sympy.Basic, node: fx.Node) -> sympy.Basic:
    """Return ``function`` of two expressions. Raises Opaque where it may be NaN.

    Infinities are combined value by value, because sympy makes 0 of ``0 * Piecewise((-oo, c), ...)`` and of ``m - m``."""
    if not any(value.is_infinite is not False for value, _ in (*parts_of(a), *parts_of(b))):
        return function(a, b)
    pieces = []
    for (x, at_x), (y, at_y) in itertools.product(parts_of(a), parts_of(b)):
        condition = sympy.And(at_x, at_y)
        if condition is sympy.false:
            continue
        value = function(x, y)
        if value.has(sympy.nan, sympy.zoo) or (value.has(sympy.oo, -sympy.oo) and not value.is_number):
            raise Opaque(node, f"{node.name} may be NaN, because it calculates with an infinity")
        pieces.append((value, condition))
    return sympy.Piecewise(*pieces)


def condition_for(parts: list[tuple[Any, Any]], wanted: Callable[[Any], bool]) -> Boolean:
    """The condition under which a Piecewise takes a value that is ``wanted``."""
    result, earlier = sympy.false, sympy.false
    for expression, condition in parts:
        if wanted(expression):
            result = sympy.Or(result, sympy.And(condition, sympy.Not(earlier)))
        earlier = sympy.Or(earlier, condition)
    return result


def upper_bound(expression: sympy.Expr | None, sizes: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr | None:
    """The largest value of an affine expression over 0 <= i < size. None where it is not affine."""
    if expression is None:
        return None
    expression = sympy.expand(expression)
    for dim, size in sizes.items():
        if not expression.has(dim):
            continue
        slope = expression.coeff(dim, 1)
        if not slope.is_number or expression.has(dim**2) or sympy.expand(expression - slope * dim).has(dim):
            return None
        expression = sympy.expand(expression.subs(dim, size - 1 if slope > 0 else 0))
    # A positive symbol is 1 + t with t >= 0, so that sympy can see the sign.
    at_least_one = {
        s: 1 + sympy.Symbol(f"t_{s.name}", integer=True, nonnegative=True) for s in expression.free_symbols if s.is_positive
    }
    return sympy.expand(expression.subs(at_least_one))


def at_most_zero(relation: Any) -> sympy.Expr | None:
    """The integer expression e with ``relation <=> e <= 0``; None where the two sides need not be integers."""
    difference = sympy.expand(relation.lhs - relation.rhs)
    if not difference.is_integer:
        return None
    if isinstance(relation, sympy.Le):
        return difference
    if isinstance(relation, sympy.Lt):
        return difference + 1
    if isinstance(relation, sympy.Ge):
        return -difference
    if isinstance(relation, sympy.Gt):
        return -difference + 1
    return None
