"""Checkpointed bodies: what their inputs are in the graph around them, so that a mask made there can be proved inside, and
how a value from there comes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from fx_fusion.graph.view import View


@dataclass(frozen=True)
class Outside:
    """The graph around a body, the call that runs it, and the call's operand for each placeholder of the body."""

    view: View
    call: fx.Node
    operands: dict[fx.Node, Any]


def carried_in(view: View, node: fx.Node) -> fx.Node:
    """``node`` of this graph or of one around it, in this graph: the body takes it as one more operand if it has to. The
    node must exist where the body is called."""
    if node.graph is view.graph:
        return node
    outside = view.outside
    if outside is None:
        raise ValueError(f"{node.name} is in no graph around this one")
    operand = carried_in(outside.view, node)
    for placeholder, given in outside.operands.items():
        if given is operand:
            return placeholder
    last = next(reversed(outside.operands))
    with view.graph.inserting_after(last):
        placeholder = view.graph.placeholder(f"{operand.name}_from_outside")
    placeholder.meta["example_value"] = operand.meta["example_value"]
    view.adopt(placeholder, last)
    outside.call.args = (*outside.call.args, operand)
    outside.operands[placeholder] = operand
    return placeholder


def link_bodies(views: Mapping[fx.GraphModule, View]) -> None:
    """Set ``View.outside`` of every body that one checkpointed call runs."""
    for module, view in views.items():
        calls = [n for n in module.graph.nodes if n.target is torch.ops.higher_order.tag_activation_checkpoint]
        uses = Counter(n.target for n in module.graph.nodes if n.op == "get_attr" for _ in n.users)
        for call in calls:
            attribute, *operands = call.args
            if not isinstance(attribute, fx.Node) or attribute.op != "get_attr" or uses[attribute.target] != 1:
                continue
            body = views.get(module.get_submodule(str(attribute.target)))  # type: ignore[call-overload]
            if body is None or body.outside is not None:
                continue
            inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
            if len(inputs) == len(operands):
                body.outside = Outside(view, call, dict(zip(inputs, operands, strict=True)))
