"""A gate between two products: both halves of one tensor, multiplied after an activation of the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fx_fusion.graph.view import View
from fx_fusion.kernels.moe_down import Gate

_ACTIVATIONS = {"silu": 1.0, "quick_gelu": 1.702}  # by the factor inside of the sigmoid
_PARTS = {
    (-1, 0, 2): ("halves", 0), (-1, 1, 2): ("halves", 1), (-1, 0, "end", 2): ("pairs", 0), (-1, 1, "end", 2): ("pairs", 1)
}  # fmt: skip


@dataclass(frozen=True)
class Gated:
    """The gate of ``h``, and all nodes between h and the result, which included."""

    gate: Gate
    h: fx.Node
    nodes: frozenset[fx.Node]


def gate_of(view: View, node: fx.Node) -> Gated | None:
    """Return the gate that a node computes, ``(up + shift) * gate * sigmoid(alpha * gate)``, or None."""
    product = view.term(node)
    if product.op != "mul" or len(product.operands) != 2:
        return None
    for activated, other in (product.operands, product.operands[::-1]):
        activation = view.term(activated) if isinstance(activated, fx.Node) else None
        if activation is not None and activation.op in _ACTIVATIONS and isinstance(other, fx.Node):
            nodes = {*product.nodes, *activation.nodes}
            found = _halves(view, activation.operands[0], other, nodes)
            if found is not None:
                h, gate = found
                gate = Gate(gate.interleaved, gate.limit, _ACTIVATIONS[activation.op], gate.shift)
                return Gated(gate, h, frozenset(nodes))
    return None


def _halves(view: View, gate: Any, up: fx.Node, nodes: set[fx.Node]) -> tuple[fx.Node, Gate] | None:
    """Return the tensor whose halves ``gate`` and ``up`` are, after what is done to each; adds the nodes of that."""
    shift, plus = 0.0, view.arguments_of(up, "add")
    if plus is not None and plus["other"] == 1 and plus["alpha"] == 1:
        nodes.add(up)
        up, shift = plus["input"], 1.0
    limits = [view.arguments_of(half, "clamp") for half in (gate, up)]
    limit = 0.0
    if all(limits):
        first, second = limits
        limit = first["max"]  # type: ignore[index]
        fits = isinstance(limit, (int, float)) and limit > 0 and first["min"] is None  # type: ignore[index]
        if not fits or (second["min"], second["max"]) != (-limit, limit):  # type: ignore[index]
            return None
        nodes |= {gate, up}
        gate, up = first["input"], second["input"]  # type: ignore[index]
    elif any(limits):
        return None
    parts = [view.term(half) for half in (gate, up) if isinstance(half, fx.Node)]
    kinds = [_PARTS.get(part.attrs) if part.op in ("part", "slice") else None for part in parts]
    if kinds not in ([("halves", 0), ("halves", 1)], [("pairs", 0), ("pairs", 1)]):
        return None
    h, also = (part.operands[0] for part in parts)
    if h is not also or not isinstance(h, fx.Node):
        return None
    for part in parts:
        nodes |= set(part.nodes)
    return h, Gate(interleaved=kinds[0] == ("pairs", 0), limit=float(limit), shift=shift)
