"""Structures of proved masks: a band around the diagonal, labels that query and key must share, and padding.

    visible(q, k)  =  low <= q - k <= high  and  label[q] == label[k] for every label
                      and  shown[k] for all of ``keys``  and  shown[q] for all of ``queries``

A causal window of w is ``low=0, high=w - 1``; a window to both sides ``low=-w, high=w``; packed documents are a band and
a label, the number of the document; attention in chunks is a label too, ``position // size``. In all of these every query
sees itself. Padding is read when the model runs: keys, or queries, that are hidden from all others, ``attention_mask != 0``
or ``input_ids != 0``. Whatever else a predicate says, it has no structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.logic.boolalg import Boolean
from torch import fx

from fx_fusion.graph.masks.expressions import at_most_zero
from fx_fusion.graph.places import named


@dataclass(frozen=True)
class Label:
    """A node of shape (s) or (b, s); ``row``: the one that counts for the whole batch, or None."""

    node: fx.Node
    row: int | None = None

    def __str__(self) -> str:
        return named(self.node)


@dataclass(frozen=True)
class Shown:
    """Positions that are not padding: where ``label`` compares to ``value`` so, by the name of torch's function."""

    label: Label
    compare: str
    value: int

    def __str__(self) -> str:
        return str(self.label)


ADDED, FILLED = "added", "filled"


@dataclass(frozen=True)
class Structure:
    """``low`` and ``high``: bounds of q - k, None where there is none. ``labels``: values by position, or a number:
    chunks of that many positions. ``keys``, ``queries``: those that padding leaves.

    ``hidden_rows``: what a row is that sees nothing: zeros (``""``, as in PyTorch's attention under booleans), or equal
    probabilities of all keys, as all scores are one number. The number was added to them, and they have their gradient
    (``ADDED``), or filled in (``FILLED``)."""

    low: int | None = None
    high: int | None = None
    labels: tuple[Label | int, ...] = ()
    keys: tuple[Shown, ...] = ()
    queries: tuple[Shown, ...] = ()
    hidden_rows: str = ""

    @property
    def shows_every_query_itself(self) -> bool:
        """Return True if every query sees a key, given as many keys as queries. Padding may hide all that a query sees."""
        return not self.keys and not self.queries

    def __and__(self, other: Structure) -> Structure:
        """Return the structure of positions that both show."""
        low, high = (
            pick((n for n in pair if n is not None), default=None)
            for pick, pair in ((max, (self.low, other.low)), (min, (self.high, other.high)))
        )
        both = ((*getattr(self, name), *getattr(other, name)) for name in ("labels", "keys", "queries"))
        labels, keys, queries = (tuple(dict.fromkeys(values)) for values in both)
        return Structure(low, high, labels, keys, queries, self.hidden_rows or other.hidden_rows)

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
        parts += [f"keys shown by {n}" for n in self.keys] + [f"queries shown by {n}" for n in self.queries]
        return ", ".join(parts)


CAUSAL = Structure(low=0)


def structure_of(
    predicate: Boolean, b: sympy.Basic, q: sympy.Symbol, k: sympy.Symbol, nodes: Mapping[Any, fx.Node]
) -> Structure | None:  # fmt: skip
    """The structure of a predicate on (b, q, k), or None. ``nodes``: what the functions in it stand for."""
    low: int | None = None
    high: int | None = None
    labels: dict[Label | int, None] = {}
    shown: dict[sympy.Basic, dict[Shown, None]] = {k: {}, q: {}}
    for condition in predicate.args if isinstance(predicate, sympy.And) else (predicate,):
        at = next((position for position in shown if not condition.has(*(i for i in shown if i != position))), None)
        if at is not None:
            padding = _shown(condition, b, at, nodes)
            if padding is None:
                return None
            shown[at][padding] = None
            continue
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
    found = Structure(low, high, tuple(labels), tuple(shown[k]), tuple(shown[q]))
    return None if found == Structure() else found


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
    """Rewrite a predicate without positions: within a run of rises by one, positions differ by q - k."""
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
    """Return the label that query and key must share by an equality, or None."""
    ours, theirs = (equality.lhs, equality.rhs) if equality.lhs.has(q) else (equality.rhs, equality.lhs)
    if ours.has(k) or sympy.expand(ours.subs(q, k) - theirs) != 0:
        return None
    if (values := _values_at(ours, b, q, nodes)) is not None:
        return values
    if isinstance(ours, sympy.floor):
        size = 1 / sympy.expand(ours.args[0]).coeff(q)
        if size.is_Integer and size > 0 and sympy.expand(ours.args[0] - q / size) == 0:
            return int(size)
    return None


def _values_at(applied: Any, b: sympy.Basic, position: sympy.Symbol, nodes: Mapping[Any, fx.Node]) -> Label | None:
    """The values that a function stands for, if it is taken at this position."""
    if applied.func not in nodes or applied.args[-1] != position:
        return None
    row = applied.args[0] if len(applied.args) == 2 else b
    if row.is_Integer and len(applied.args) == 2:
        return Label(nodes[applied.func], int(row))
    return Label(nodes[applied.func]) if row == b else None


_COMPARED = {sympy.Ne: "ne", sympy.Eq: "eq", sympy.Gt: "gt", sympy.Ge: "ge", sympy.Lt: "lt", sympy.Le: "le"}


def _shown(
    condition: Boolean, b: sympy.Basic, position: sympy.Symbol, nodes: Mapping[Any, fx.Node]
) -> Shown | None:  # fmt: skip
    """Return the padding that a condition on one position describes, or None."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return None
    values, number = condition.lhs, condition.rhs
    if not number.is_Integer:
        condition = condition.reversed
        values, number = condition.lhs, condition.rhs
    label = _values_at(values, b, position, nodes) if number.is_Integer else None
    compare = _COMPARED.get(type(condition))
    return None if label is None or compare is None or abs(number) >= 2**31 else Shown(label, compare, int(number))
