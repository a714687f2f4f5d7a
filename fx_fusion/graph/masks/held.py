"""Expressions as tensors hold them: constants are rounded, and only some dtypes can count."""

from __future__ import annotations

import itertools

import sympy
import torch
from torch import fx

from fx_fusion.graph.dtypes import name
from fx_fusion.graph.masks.bounds import Range, bounds_of
from fx_fusion.graph.masks.expressions import DIMS, Interpreter, Opaque, is_predicate, size_of, sympified
from fx_fusion.graph.terms import example

# What a mask that comes in hides by, where it is assumed to hide: -inf, or the lowest number of its dtype.
HIDDEN = {
    dtype: sympy.Symbol(f"hidden_{name(dtype)}", extended_negative=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_LOWEST = {symbol: torch.finfo(dtype).min for dtype, symbol in HIDDEN.items()}
# A symbolic size is at most this: a mask of that many queries and keys has 2^46 elements.
LARGEST_SIZE = 2**23
# An int of the caller, which may be a time in nanoseconds.
_LARGEST_NUMBER = 2**61


def may_be_hidden(expression: sympy.Basic) -> bool:
    """Return True if an expression contains the value by which a mask that comes in hides."""
    return not _LOWEST.keys().isdisjoint(expression.free_symbols)


def hidden_in(expression: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    """An expression after a cast, where what hides does in that dtype, too: of the lowest float32 bfloat16 makes -inf."""
    if not dtype.is_floating_point or not may_be_hidden(expression):
        return expression
    lowest = torch.finfo(dtype).min
    after = {s: torch.tensor(number, dtype=torch.float64).to(dtype).item() for s, number in _LOWEST.items()}
    if any(after[s] > lowest and after[s] != _LOWEST[s] for s in expression.free_symbols & after.keys()):
        raise Opaque(node, f"{node.name} rounds what hides in a mask that comes in")
    return expression.subs(dict.fromkeys((s for s, number in after.items() if number <= lowest), HIDDEN[dtype]))


def numbers_of(expression: sympy.Basic) -> list[sympy.Basic] | None:
    """The numbers that an expression without indices may be; None for another one."""
    symbols = sorted(expression.free_symbols, key=str)
    if not all(symbol in _LOWEST for symbol in symbols):
        return None
    choices = itertools.product(*((-sympy.oo, sympy.Float(_LOWEST[symbol])) for symbol in symbols))
    found = [expression.subs(dict(zip(symbols, chosen, strict=True))) for chosen in choices]
    return found if all(number.is_number for number in found) else None


def held(prover: Interpreter, expression: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    """Return an expression over the indices of ``node`` as a tensor of ``dtype`` holds it.

    Raises Opaque where the tensor may hold another number. A bfloat16 has no 257, an int8 wraps around, and an index plus a
    fraction is rounded."""
    if dtype == torch.bool or is_predicate(expression):
        return expression
    if dtype.is_floating_point and dtype not in HIDDEN:
        raise Opaque(node, f"{node.name} counts in {name(dtype)}")
    if expression.has(sympy.Piecewise):
        expression = sympy.piecewise_fold(expression)  # 1 - Piecewise((1, shown), (0, True)) has two values
    if not isinstance(expression, sympy.Piecewise):
        return _value(prover, expression, dtype, node)
    values = [_value(prover, value, dtype, node) for value, _ in expression.args]
    if values == [value for value, _ in expression.args]:
        return expression
    return sympy.Piecewise(*((value, condition) for value, (_, condition) in zip(values, expression.args, strict=True)))


def _value(prover: Interpreter, value: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    if value.is_number:
        return _constant(value, dtype, node)
    if dtype.is_floating_point and numbers_of(value) is not None:
        return value
    if not value.is_integer or dtype.is_complex:
        raise Opaque(node, f"{node.name} calculates with indices and fractions in {name(dtype)}, which rounds")
    lowest, highest = exact_range(dtype)
    reached = bounds_of(value, lambda atom: _range_of(prover, atom, (lowest, highest), node))
    if reached is None:
        raise Opaque(node, f"{node.name} may leave the range of {name(dtype)}: no bound of its value is known")
    if reached[0] < lowest or reached[1] > highest:
        most = max(reached, key=abs)
        why = f"holds integers exactly up to {highest}" if dtype.is_floating_point else "wraps around"
        raise Opaque(node, f"{node.name} may reach {most} in {name(dtype)}, which {why}")
    return value


def exact_range(dtype: torch.dtype) -> Range:
    """Return the range in which ``dtype`` holds every integer."""
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min, torch.iinfo(dtype).max
    last = round(2 / torch.finfo(dtype).eps)
    return -last, last


def _range_of(prover: Interpreter, atom: sympy.Basic, exact: Range, node: fx.Node) -> Range:
    """Return the range of an index, a size, an int of the caller, or an element of a tensor of the caller."""
    if not isinstance(atom, sympy.Symbol):
        # A tensor's values. Half of the range leaves room for the sums and differences that find documents in positions.
        return exact[0] // 2 + 1, exact[1] // 2
    if atom in DIMS:
        shape = example(node).shape
        position = DIMS.index(atom)
        size = size_of(shape[position]) if position < len(shape) else sympy.Integer(LARGEST_SIZE)
        if size.is_Integer:
            return 0, max(0, int(size) - 1)
        most = bounds_of(size, lambda symbol: _range_of(prover, symbol, exact, node))
        return 0, max(0, min(LARGEST_SIZE, LARGEST_SIZE if most is None else most[1]) - 1)
    highest = LARGEST_SIZE if prover.is_size(atom, node) else _LARGEST_NUMBER
    return (1 if atom.is_positive else 0 if atom.is_nonnegative else -highest), highest


def _constant(value: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    if not value.is_extended_real or dtype.is_complex:
        raise Opaque(node, f"{node.name} is {value}")
    if value.is_infinite and dtype.is_floating_point:
        return value
    if not dtype.is_floating_point:
        if not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
            raise Opaque(node, f"{node.name} holds {value} in {name(dtype)}, which wraps around")
        return sympy.Integer(int(value))
    if value.is_Integer and abs(value) < 2**63:  # not by way of float64, which would round it once more
        return sympified(torch.tensor(int(value)).to(dtype).item())
    return sympified(torch.tensor(float(value), dtype=torch.float64).to(dtype).item())
