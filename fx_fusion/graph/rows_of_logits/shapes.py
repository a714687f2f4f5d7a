"""Say which dims of a view or a broadcast hold the same elements."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.rows_of_logits.values import CLASS, FEW, ONE, Label, NoRule, Opaque, Rows, Split, Typed
from fx_fusion.graph.size_hints import expected


def groups_of(old: Sequence[Any], new: Sequence[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the dims of both shapes that hold the same elements, without dims of size 1."""
    left = [i for i, n in enumerate(old) if not statically_known_true(n == 1)]
    right = [i for i, n in enumerate(new) if not statically_known_true(n == 1)]
    while left or right:
        if not left or not right:
            raise Opaque("a view of a size that is not known")
        ours, theirs = [left.pop(0)], [right.pop(0)]
        while not statically_known_true(_product(old, ours) == _product(new, theirs)):
            smaller = math.prod(expected(old[i]) for i in ours) < math.prod(expected(new[i]) for i in theirs)
            side, rest = (ours, left) if smaller else (theirs, right)
            if not rest:
                raise Opaque("a view of a size that is not known")
            side.append(rest.pop(0))
        yield ours, theirs


def _product(sizes: Sequence[Any], dims: Sequence[int]) -> Any:
    result: Any = 1
    for dim in dims:
        result = result * sizes[dim]
    return result


def viewed(logits: Sequence[Any], before: Tensor, after: Tensor, typed: Typed) -> list[Label]:
    """Return the labels of a view of a value: dims of size 1 come and go, row axes are merged and split as they were.

    ``logits``: the sizes of the row axes, then the classes. Raises Split where an axis would have to be several."""
    for size, label in zip(before.shape, typed.labels, strict=True):
        if label == ONE and not statically_known_true(size == 1):
            raise Opaque("a view of what was expanded")
        if label in (CLASS, FEW) and statically_known_true(size == 1):
            raise Opaque("a view of one class") if typed.has_classes else NoRule
    labels: list[Label] = [ONE] * after.dim()
    for old, new in groups_of(before.shape, after.shape):
        found = [typed.labels[i] for i in old]
        if len(old) == len(new) == 1:
            labels[new[0]] = found[0]
            continue
        rows = [label for label in found if isinstance(label, Rows)]
        follow = all(a.last == b.first for a, b in itertools.pairwise(rows))
        if len(rows) < len(found) or not rows or not follow:
            raise Opaque("a view mixes rows and classes")
        axes = [i for i in range(rows[0].first, rows[-1].last) if not statically_known_true(logits[i] == 1)]
        if len(new) == 1:
            labels[new[0]] = Rows(rows[0].first, rows[-1].last)
            continue
        sizes = [after.shape[i] for i in new]
        known = [logits[i] for i in axes]
        if len(known) == 1:
            raise Split(axes[0], sizes)
        if len(sizes) != len(known) or not all(map(statically_known_true, map(operator.eq, sizes, known))):
            raise Opaque("a view splits the rows in another way than the logits have them")
        for i, axis in zip(new, axes, strict=True):
            labels[i] = Rows(axis, axis + 1)
    return labels


def broadcast(tensor: Tensor, labels: Sequence[Label]) -> tuple[Label, ...]:
    """Return the labels of an operand that is broadcast to a value with ``labels``."""
    offset = len(labels) - tensor.dim()
    if offset < 0:
        raise Opaque("an operand has more dims than the rows")
    return tuple(ONE if statically_known_true(size == 1) else labels[i + offset] for i, size in enumerate(tensor.shape))
