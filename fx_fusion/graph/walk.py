"""For finders that read a graph step by step: how they stop, and the calls and arithmetic that they all meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from fx_fusion.graph.terms import Reader
from fx_fusion.graph.view import View


class NotThis(Exception):
    """The graph does something else here: at ``node``, for this reason."""

    def __init__(self, node: Any, reason: str):
        super().__init__(reason)
        self.node = node


def source_of(node: fx.Node) -> fx.Node | None:
    """The tensor that a view, cast or reshape is of, given by position or by name; None if it is no node."""
    source = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return source if isinstance(source, fx.Node) else None


def attention_calls(view: View) -> Iterator[tuple[fx.Node, Mapping[str, Any]]]:
    """Each call of scaled_dot_product_attention, and its arguments by name."""
    for node in view.graph.nodes:
        if (bound := view.arguments_of(node, "scaled_dot_product_attention")) is not None:
            yield node, bound


def binary(view: Reader, node: fx.Node) -> tuple[Any, Any]:
    """The operands of add, mul or div without ``alpha`` or ``rounding_mode``; raises NotThis for anything else."""
    bound = view.arguments(node) if view.name(node) in ("add", "mul", "div") else None
    if bound is None or bound.get("alpha", 1) != 1 or bound.get("rounding_mode") is not None:
        raise NotThis(node, f"{node.name} is not a plain sum, product or quotient")
    return view.folded(bound["input"]), view.folded(bound["other"])
