"""Rows that a mask hides: what a region of rows computes of them does not depend on their logits.

    picked.masked_fill(~mask, 0), entropy.masked_fill(~mask, 0)

Padding and prompts are rows like these. Their logits need not be made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

_LAYOUT = {
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "alias", "detach", "clone", "permute", "transpose",
}  # fmt: skip
_NOT, _AND, _OR = {"bitwise_not", "logical_not"}, {"bitwise_and", "logical_and"}, {"bitwise_or", "logical_or"}


@dataclass(frozen=True)
class Hiding:
    """Say which rows of a body are hidden.

    Attributes:
        mask: the placeholder that hides a row where it is ``value``.
        steps: what is computed of a hidden row, in order.
        chosen: operands that stand for steps, calls of ``where`` and ``masked_fill``: one is known for a hidden row.
    """

    mask: fx.Node
    value: bool
    steps: list[fx.Node]
    chosen: dict[fx.Node, Any]


def hiding(body: fx.Graph, masks: Iterable[fx.Node], trained: Collection[fx.Node] = ()) -> Hiding | None:
    """Return which rows one of the masks hides; None where the seams of any row depend on its logits.

    Args:
        body: takes the logits, then inputs, and returns seams.
        masks: placeholders of inputs, booleans of which each row has one.
        trained: placeholders of inputs with a gradient, on which seams of hidden rows must not depend either.
    """
    seams = body.output_node().args[0]
    of_others = {next(iter(body.nodes)), *trained}
    for mask in masks:
        for value in (True, False):
            chosen = _chosen(body, mask, value)
            steps = _needed(body, seams, chosen) if chosen else None  # type: ignore[arg-type]
            if steps is not None and of_others.isdisjoint(steps):
                return Hiding(mask, value, steps, chosen)
    return None


def _chosen(body: fx.Graph, mask: fx.Node, value: bool) -> dict[fx.Node, Any]:
    """Return the operands that stand for calls which choose by a mask of this value."""
    known, chosen = {mask: value}, {}
    for node in body.nodes:
        name, args = getattr(node.target, "_opname", ""), node.args
        found = [known[n] for n in node.all_input_nodes if n in known]
        if not found:
            continue
        if name in _NOT:
            known[node] = not found[0]
        elif name in _LAYOUT:
            known[node] = found[0]
        elif name in _AND and (not all(found) or len(found) == 2):
            known[node] = all(found)
        elif name in _OR and (any(found) or len(found) == 2):
            known[node] = any(found)
        elif name == "where" and len(args) == 3 and args[0] in known:
            chosen[node] = args[1] if known[args[0]] else args[2]  # type: ignore[index]
        elif name == "masked_fill" and args[1] in known:
            chosen[node] = args[2] if known[args[1]] else args[0]  # type: ignore[index]
    return chosen


def _needed(body: fx.Graph, seams: Sequence[fx.Node], chosen: dict[fx.Node, Any]) -> list[fx.Node]:
    """Return what the seams of a hidden row are computed of."""
    needed: set[fx.Node] = set()
    waiting = list(seams)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            operand = chosen.get(node)
            waiting += node.all_input_nodes if node not in chosen else [operand] if isinstance(operand, fx.Node) else []
    return [node for node in body.nodes if node in needed]
