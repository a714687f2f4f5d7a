"""Group the dims of two shapes that hold the same elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.rows_of_logits.values import Opaque
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
