"""For finders that read a graph step by step: how they stop, and the arithmetic that they all meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fx_fusion.graph import signatures
from fx_fusion.graph.view import View


class NotThis(Exception):
    """The graph does something else here: at ``node``, for this reason."""

    def __init__(self, node: Any, reason: str):
        super().__init__(reason)
        self.node = node


def source_of(node: fx.Node) -> fx.Node | None:
    """The tensor that a view, cast or reshape is of, given by position or by name; None if it is no node."""
    found = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return found if isinstance(found, fx.Node) else None


def attention_calls(view: View) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Each call of scaled_dot_product_attention, and its arguments by name."""
    for node in view.graph.nodes:
        if view.name(node) == "scaled_dot_product_attention":
            bound = signatures.bind("scaled_dot_product_attention", node.args, dict(node.kwargs))
            if bound is not None:
                yield node, bound


def binary(view: View, node: fx.Node) -> tuple[Any, Any]:
    """The operands of add, mul or div without ``alpha`` or ``rounding_mode``; raises NotThis for anything else."""
    name = view.name(node)
    bound = signatures.bind(name, node.args, dict(node.kwargs)) if name in ("add", "mul", "div") else None
    if bound is None or bound.get("alpha", 1) != 1 or bound.get("rounding_mode") is not None:
        raise NotThis(node, f"{node.name} is not a plain sum, product or quotient")
    return view.constant(bound["input"]), view.constant(bound["other"])
