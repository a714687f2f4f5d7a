"""What a proved mask looks like: a band around the diagonal, and labels that query and key must share.

    visible(q, k)  =  low <= q - k <= high  and  label[q] == label[k] for every label

A causal window of w is ``low=0, high=w - 1``; a window to both sides ``low=-w, high=w``; packed documents are a band and
a label, the number of the document; attention in chunks is a label too, ``position // size``. In all of them every query
sees itself. Whatever else a predicate says, it has no structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean
from torch import fx

from fx_fusion.graph.masks.expressions import at_most_zero


@dataclass(frozen=True)
class Label:
    """A node of shape (s) or (b, s); with ``first_row`` the row at batch 0 counts for all."""

    node: fx.Node
    first_row: bool

    def __str__(self) -> str:
        return self.node.name


@dataclass(frozen=True)
class Structure:
    """``low`` and ``high``: bounds of q - k, None where there is none. ``labels``: values by position, or a number:
    chunks of that many positions."""

    low: int | None = None
    high: int | None = None
    labels: tuple[Label | int, ...] = ()

    def __str__(self) -> str:
        parts = [f"documents of {n}" if isinstance(n, Label) else f"chunks of {n}" for n in self.labels]
        if (self.low, self.high) == (0, None):
            parts.append("causal")
        elif self.low == 0 and self.high is not None:
            parts.append(f"causal window of {self.high + 1}")
        elif self.low is not None or self.high is not None:
            low, high = (
                "" if n is None else f"{n} <= " if left else f" <= {n}" for n, left in ((self.low, 1), (self.high, 0))
            )
            parts.append(f"window {low}q - k{high}")
        return ", ".join(parts)


def structure_of(
    predicate: Boolean, b: sympy.Basic, q: sympy.Symbol, k: sympy.Symbol, nodes: Mapping[Any, fx.Node]
) -> Structure | None:  # fmt: skip
    """The structure of a predicate on (b, q, k), or None. ``nodes``: what the functions in it stand for."""
    low: int | None = None
    high: int | None = None
    labels: dict[Label | int, None] = {}
    for condition in predicate.args if isinstance(predicate, sympy.And) else (predicate,):
        if isinstance(condition, sympy.Eq):
            label = _label(condition, b, q, k, nodes)
            if label is None:
                return None
            labels[label] = None
            continue
        excess = at_most_zero(condition) if isinstance(condition, sympy.core.relational.Relational) else None
        if excess is None:
            return None
        above, below = sympy.expand(excess - (k - q)), sympy.expand(excess - (q - k))
        if above.is_Integer and above <= 0:  # q - k >= above
            low = int(above) if low is None else max(low, int(above))
        elif below.is_Integer and below <= 0:  # q - k <= -below
            high = -int(below) if high is None else min(high, -int(below))
        else:
            return None
    return Structure(low, high, tuple(labels)) if labels or low is not None or high is not None else None


def counted_runs(summand: sympy.Basic, dims: Sequence[sympy.Symbol]) -> Any:
    """The positions p, if a running sum of this along the last dim (``p[.., i] - p[.., i - 1] != 1``) counts their runs of
    rises by one; None otherwise. What the first position is compared with starts no run of its own."""
    i = dims[-1]
    later = summand.subs(i, i + 1)
    if not isinstance(later, sympy.Ne):
        return None
    for here in later.atoms(sympy.core.function.AppliedUndef):
        if here.args != tuple(dims):
            continue
        excess = here.subs(i, i + 1) - here - 1
        if sympy.expand(later.lhs - later.rhs - excess) == 0 or sympy.expand(later.rhs - later.lhs - excess) == 0:
            return here.func
    return None


def within_runs(predicate: Boolean, runs: Mapping[Any, Any]) -> Boolean:
    """Where query and key share the number of a run, their positions differ by q - k: said without the positions."""
    if not isinstance(predicate, sympy.And):
        return predicate
    for condition in predicate.args:
        if not isinstance(condition, sympy.Eq):
            continue
        ours, theirs = condition.lhs, condition.rhs
        positions = runs.get(ours.func)
        if positions is None or ours.func != theirs.func or ours.args[:-1] != theirs.args[:-1]:
            continue
        at_ours, at_theirs = positions(*ours.args), positions(*theirs.args)
        others = [c.subs(at_ours, at_theirs + ours.args[-1] - theirs.args[-1]) for c in predicate.args if c is not condition]
        predicate = sympy.And(condition, *others)
    return predicate


def _label(
    equality: sympy.Eq, b: sympy.Basic, q: sympy.Symbol, k: sympy.Symbol, nodes: Mapping[Any, fx.Node]
) -> Label | int | None:  # fmt: skip
    """What an equality says that query and key must share."""
    ours, theirs = (equality.lhs, equality.rhs) if equality.lhs.has(q) else (equality.rhs, equality.lhs)
    if ours.has(k) or sympy.expand(ours.subs(q, k) - theirs) != 0:
        return None
    if ours.func in nodes and ours.args in ((q,), (b, q), (sympy.Integer(0), q)):
        return Label(nodes[ours.func], len(ours.args) == 2 and ours.args[0] == 0)
    if isinstance(ours, sympy.floor):
        size = 1 / sympy.expand(ours.args[0]).coeff(q)
        if size.is_Integer and size > 0 and sympy.expand(ours.args[0] - q / size) == 0:
            return int(size)
    return None
