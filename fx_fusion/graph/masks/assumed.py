"""Assumptions about a mask that comes into a graph as a tensor. They are checked when the graph runs.

A padding mask (batch, keys) may be all ones. A mask of an attention call, (batch, heads, queries, keys), comes in where
another graph or eager code built it: behind a graph break, in a layer that is compiled alone, from the user. It may be one
of these, by its values:

    none           hides nothing
    causal         shows k <= q
    keys           shows the keys that are not padding: one row for all queries and heads
    causal_keys    both
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.masks.expressions import DIMS
from fx_fusion.graph.masks.held import HIDDEN
from fx_fusion.graph.places import named
from fx_fusion.graph.terms import example

ONES = "ones"
KINDS = ("none", "causal", "keys", "causal_keys")  # the first that holds is the best
GUESS = "guess"  # causal where there are as many keys as queries, else none
_SENTENCES = {
    ONES: "is all ones", "none": "hides nothing", "causal": "hides what comes later",
    "keys": "hides padding", "causal_keys": "hides padding and what comes later",
}  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """An input of a graph, and what is assumed of it: ``ones`` or one of ``KINDS``."""

    node: fx.Node
    kind: str

    def __str__(self) -> str:
        return f"{named(self.node)} {_SENTENCES[self.kind]}"


def in_order(assumed: Iterable[Assumed]) -> tuple[Assumed, ...]:
    """Assumptions by the names of their inputs."""
    return tuple(sorted(assumed, key=lambda a: a.node.name))


def kind_for(node: fx.Node, wanted: str | None) -> str | None:
    """Return the kind to assume of a mask that comes in: ``wanted``, or a guess; None where nothing can be assumed."""
    mask = example(node)
    if wanted is None or mask.dim() != 4 or mask.requires_grad:
        return None
    if mask.dtype not in (torch.bool, *HIDDEN):
        return None
    square = statically_known_true(mask.shape[2] == mask.shape[3])
    kind = ("causal" if square else "none") if wanted == GUESS else wanted
    of_keys = kind in ("keys", "causal_keys")
    if of_keys and (mask.dtype != torch.bool or not statically_known_true(mask.shape[1] == 1)):
        return None
    return kind if square or kind in ("none", "keys") else None


def shown(kind: str, key_is_shown: Boolean) -> Boolean:
    """The predicate of a mask of this kind; ``key_is_shown``: of (b, k)."""
    earlier = sympy.Le(DIMS[3], DIMS[2])
    return {
        "none": sympy.true, "causal": earlier, "keys": key_is_shown, "causal_keys": sympy.And(earlier, key_is_shown),
    }[kind]  # fmt: skip
