"""Terms: what a node means, in one form for all of its spellings; and the questions asked of example values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

_SYMMETRIC = {"add", "mul"}


@dataclass(frozen=True)
class Term:
    """``op(*operands)`` with literal ``attrs``. ``nodes`` are the graph nodes that it stands for, the root first.

    An operand is a node, a number, or a Term of its own where no node of the graph is that value
    (``x / sqrt(y)`` reads ``mul(x, rsqrt(y))``).
    """

    op: str
    operands: tuple[Any, ...]
    attrs: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Edge:
    """An operand: the node that makes its values, the casts on the way that round, and the nodes crossed."""

    base: Any
    roundings: tuple[torch.dtype, ...] = ()
    crossed: tuple[fx.Node, ...] = ()


def value(node: Any) -> Any:
    """The example value (a fake tensor, a symbolic scalar) of a node; anything else is its own value."""
    if isinstance(node, Term):
        node = node.nodes[0]
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(value(node), torch.Tensor)


def is_scalar(node: Any) -> bool:
    """A Python number or a node that is one (``.item()`` under dynamic shapes), not a 0-d tensor."""
    return isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat))


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two shapes are equal for every value of their symbols. Adds no guard."""
    return a.dim() == b.dim() and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))


def symmetric(term: Term) -> bool:
    """Whether the first two operands may be swapped."""
    return term.op in _SYMMETRIC and len(term.operands) == 2


def negative_dim(dim: int, rank: int) -> int:
    """A dim counted from the end."""
    return dim - rank if dim >= 0 else dim
