"""Predicates on indices: the positions that a mask shows, without the parts that hold everywhere."""

from __future__ import annotations

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from fx_fusion.graph.masks.expressions import (
    Opaque,
    as_predicate,
    at_most_zero,
    condition_for,
    parts_of,
    upper_bound,
)
from fx_fusion.graph.masks.held import may_be_hidden, numbers_of


def visible(expression: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> Boolean:
    """Boolean mask: where it is true. Additive mask: where it adds 0, if it adds -inf (or the dtype's lowest) elsewhere."""
    if dtype == torch.bool:
        return as_predicate(expression, node)
    lowest = torch.finfo(dtype).min
    parts = parts_of(expression)
    for added, _ in parts:
        if added is sympy.nan or added.has(sympy.nan):
            raise Opaque(node, f"{node.name} is not a number somewhere")
        values = numbers_of(added)
        hides = values is not None and all(bool(value <= lowest) for value in values)
        if not hides and not added.is_zero:
            what = "what hides in a mask of another dtype" if may_be_hidden(added) else added
            raise Opaque(node, f"{node.name} adds {what} to the scores")
    return condition_for(parts, lambda added: added.is_zero)


def hides_by_one_number(expression: sympy.Basic, dtype: torch.dtype) -> bool:
    """Return True if an additive mask hides by one number alone that swallows any score it is added to.

    That is the lowest number of a dtype that counts as far as float32. Scores of a row that is hidden entirely are this
    number then, and no other."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    parts = parts_of(expression)
    numbers = [number for added, _ in parts if not added.is_zero for number in numbers_of(added) or (sympy.nan,)]
    return all(number.is_number and float(number) == torch.finfo(dtype).min for number in numbers)


def undecided(predicate: Boolean, sizes: dict[sympy.Symbol, sympy.Expr], node: fx.Node) -> Boolean:
    """Drop from a conjunction everything that holds at every index."""
    predicate = sympy.to_nnf(predicate, simplify=False) if not isinstance(predicate, (sympy.And, sympy.Or)) else predicate
    if isinstance(predicate, sympy.And):
        return sympy.And(*(undecided(p, sizes, node) for p in predicate.args))
    if isinstance(predicate, sympy.Or):
        return sympy.Or(*(undecided(p, sizes, node) for p in predicate.args))
    if isinstance(predicate, sympy.Eq) and all(_is_zero(side, sizes) for side in predicate.args):
        return sympy.true  # positions in one chunk, where all are in the first
    if isinstance(predicate, sympy.core.relational.Relational):
        bound = upper_bound(at_most_zero(predicate), sizes)
        if bound is not None and bound.is_nonpositive:
            return sympy.true
        lower = upper_bound(_negated(at_most_zero(predicate)), sizes)
        if lower is not None and lower.is_nonpositive:
            return sympy.false
    return predicate


def _is_zero(side: sympy.Basic, sizes: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """Return True if ``floor(i / n)`` is 0 at every index."""
    if not isinstance(side, sympy.floor):
        return bool(side.is_zero)
    above, below = side.args[0].as_numer_denom()
    bound = upper_bound(above - below + 1, sizes)
    return bool(above.is_nonnegative and below.is_positive and bound is not None and bound.is_nonpositive)


def _negated(expression: sympy.Expr | None) -> sympy.Expr | None:
    """``not (e <= 0)  <=>  1 - e <= 0``."""
    return None if expression is None else 1 - expression


def is_causal(predicate: Boolean, q: sympy.Symbol, k: sympy.Symbol) -> bool:
    """Return True if a predicate is exactly ``k <= q``."""
    if not isinstance(predicate, sympy.core.relational.Relational):
        return False
    expression = at_most_zero(predicate)
    return expression is not None and sympy.expand(expression - (k - q)) == 0
