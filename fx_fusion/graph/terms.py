"""Terms: what a node means, in one form for all of its spellings; and the questions asked of example values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.torch_internals.fakes import example_of

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


def described(term: Term) -> str:
    """Return what a term is in the words of a user: the name of its op, or of the function that has no known op."""
    if term.op == "part":
        dim, index, count = term.attrs
        return f"part {index + 1} of {count} of a split along dim {dim}"
    if term.op != "opaque":
        return term.op
    node = term.attrs[0]
    if node.op not in ("call_method", "call_function"):
        return {"placeholder": "an input of this graph", "get_attr": "a constant of this graph"}.get(node.op, "a submodule")
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))


@dataclass(frozen=True)
class Edge:
    """An operand: the node that makes its values, the casts on the way that round, and the nodes crossed."""

    base: Any
    roundings: tuple[torch.dtype, ...] = ()
    crossed: tuple[fx.Node, ...] = ()


class Reader(Protocol):
    """The questions that a rule may ask the view of the graph whose node it reads (``View``)."""

    def name(self, node: fx.Node) -> str | None: ...
    def term(self, node: Any) -> Term: ...
    def edge(self, operand: Any) -> Edge: ...
    def same_source(self, a: Any, b: Any) -> bool: ...
    def folded(self, item: Any) -> Any: ...
    def arguments(self, node: fx.Node) -> Mapping[str, Any] | None: ...


def example(node: Any) -> Any:
    """The example value (a fake tensor, a symbolic scalar) of a node; anything else is its own value."""
    if isinstance(node, Term):
        node = node.nodes[0]
    return example_of(node) if isinstance(node, fx.Node) else node


def is_tensor(node: Any) -> bool:
    """Return True if a node, or what stands for one, is a tensor."""
    return isinstance(example(node), torch.Tensor)


def is_scalar(node: Any) -> bool:
    """Return True if this is a Python number or a node that is one (``.item()`` under dynamic shapes), not a 0-d tensor."""
    return isinstance(example(node), (int, float, torch.SymInt, torch.SymFloat))


def same_sizes(a: Any, b: Any) -> bool:
    """Return True if two sequences of sizes are equal for every value of their symbols. Adds no guard."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two shapes are equal for every value of their symbols. Adds no guard."""
    return same_sizes(a.shape, b.shape)


def symmetric(term: Term) -> bool:
    """Return True if the first two operands may be swapped."""
    return term.op in _SYMMETRIC and len(term.operands) == 2


def over_last_dim(dims: Any, node: Any) -> bool:
    """Return True if a reduction of ``node`` is over its last dim alone."""
    dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    return dims in ((-1,), (example(node).dim() - 1,))


def negative_dim(dim: int, rank: int) -> int:
    """A dim counted from the end."""
    return dim - rank if dim >= 0 else dim
