"""Expressions as tensors hold them: constants are rounded, and only some dtypes can count."""

from __future__ import annotations

import itertools
import math

import sympy
import torch
from torch import fx

from fx_fusion.graph.dtypes import name
from fx_fusion.graph.masks.expressions import DIMS, Opaque, is_predicate, size_of, upper_bound
from fx_fusion.graph.terms import example

# What a mask that comes in hides by, where it is assumed to hide: -inf, or the lowest number of its dtype.
HIDDEN = {
    dtype: sympy.Symbol(f"hidden_{name(dtype)}", extended_negative=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_LOWEST = {symbol: torch.finfo(dtype).min for dtype, symbol in HIDDEN.items()}
_COARSE = (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16)
_LARGE = 2**20  # what a symbolic size is taken for, and numbers that int32 is not trusted to multiply with


def may_be_hidden(expression: sympy.Basic) -> bool:
    """Whether an expression contains what a mask that comes in hides by."""
    return not _LOWEST.keys().isdisjoint(expression.free_symbols)


def hidden_in(expression: sympy.Basic, dtype: torch.dtype) -> sympy.Basic:
    """An expression after a cast, where what hides does in that dtype, too: of the lowest float32 bfloat16 makes -inf."""
    if not dtype.is_floating_point or not may_be_hidden(expression):
        return expression
    lowest = torch.finfo(dtype).min
    lower = [s for s, number in _LOWEST.items() if torch.tensor(number, dtype=torch.float64).to(dtype).item() <= lowest]
    return expression.subs(dict.fromkeys(lower, HIDDEN[dtype]))


def numbers_of(expression: sympy.Basic) -> list[sympy.Basic] | None:
    """The numbers that an expression without indices may be; None for another one."""
    symbols = sorted(expression.free_symbols, key=str)
    if not all(symbol in _LOWEST for symbol in symbols):
        return None
    choices = itertools.product(*((-sympy.oo, sympy.Float(_LOWEST[symbol])) for symbol in symbols))
    found = [expression.subs(dict(zip(symbols, chosen, strict=True))) for chosen in choices]
    return found if all(number.is_number for number in found) else None


def held(expression: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    """An expression over the indices of ``node`` as this dtype holds it. Raises Opaque where it may hold anything else: a
    bfloat16 has no 257, an int8 wraps around."""
    if dtype == torch.bool or is_predicate(expression):
        return expression
    if (dtype.is_floating_point or dtype in _COARSE) and expression.has(sympy.Piecewise):
        expression = sympy.piecewise_fold(expression)  # 1 - Piecewise((1, shown), (0, True)) has two values
    if not isinstance(expression, sympy.Piecewise):
        return _value(expression, dtype, node)
    values = [_value(value, dtype, node) for value, _ in expression.args]
    if values == [value for value, _ in expression.args]:
        return expression
    return sympy.Piecewise(*((value, condition) for value, (_, condition) in zip(values, expression.args, strict=True)))


def _value(value: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    if value.is_number:
        return _constant(value, dtype, node)
    if numbers_of(value) is None and dtype in _COARSE:
        raise Opaque(node, f"{node.name} holds indices in {name(dtype)}, which can't count far")
    if dtype == torch.int32 and _may_wrap(value, node):
        raise Opaque(node, f"{node.name} counts in int32, which may wrap around")
    return value


def _constant(value: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    if not value.is_extended_real or dtype.is_complex:
        raise Opaque(node, f"{node.name} is {value}")
    if value.is_infinite and dtype.is_floating_point:
        return value
    if not dtype.is_floating_point:
        if not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
            raise Opaque(node, f"{node.name} holds {value} in {name(dtype)}, which wraps around")
        return sympy.Integer(int(value))
    number = torch.tensor(float(value), dtype=torch.float64).to(dtype).item()
    return sympy.Integer(int(number)) if math.isfinite(number) and number.is_integer() else sympy.sympify(number)


def _may_wrap(value: sympy.Basic, node: fx.Node) -> bool:
    sizes = {dim: size_of(size) for dim, size in zip(DIMS, example(node).shape, strict=False)}
    for signed in (value, -value):
        bound = upper_bound(signed, sizes)
        most = None if bound is None else bound.subs(dict.fromkeys(bound.free_symbols, _LARGE))
        if most is None or not most.is_number:  # of documents, or divided
            return any(abs(number) > _LARGE for number in value.atoms(sympy.Number))
        if most > torch.iinfo(torch.int32).max:
            return True
    return False
