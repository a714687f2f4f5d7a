"""Linear layers whose weight is a DTensor, its rows on several ranks, and what a tensor-parallel plan puts around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.linear import Linear
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.torch_internals.containers import tree_leaves


@dataclass(frozen=True)
class Shards:
    """``linear``, whose columns lie on several ranks, gathered by ``nodes`` (itself the first) into a plain tensor; or
    ``scattered``: they stay where they are, a DTensor, and the loss is one too (``loss_parallel``)."""

    linear: fx.Node
    nodes: tuple[fx.Node, ...]
    scattered: bool = False

    def why_not(self, linear: Linear) -> str | None:
        """Return why its operands do not lie as a column-parallel layer's, or None."""
        operands = (("input", linear.x, "replicated"), ("weight", linear.weight, 0), ("bias", linear.bias, 0))
        for name, node, wanted in operands:
            if node is not None and placed(node) != wanted:
                return f"its {name} lies {_where(node)}; wanted: {_said(wanted)} over a mesh of one dim"
        classes, ranks = example(linear.weight).shape[0], self.ranks
        if not isinstance(classes, int) or classes <= (ranks - 1) * -(-classes // ranks):
            return f"{classes} classes leave one of {ranks} ranks without any"
        return None

    @property
    def ranks(self) -> int:
        """Return how many ranks the columns lie on."""
        return self._mesh.size()

    @property
    def part(self) -> tuple[str, int, int, int]:
        """The arguments ``group, first, classes, ranks`` of an op: what of the columns is this rank's."""
        classes = example(self.linear).shape[-1]
        most = -(-classes // self.ranks)
        return self._mesh.get_group().group_name, most * self._mesh.get_local_rank(), classes, self.ranks

    @property
    def _mesh(self) -> Any:
        return example(self.linear).device_mesh


def shards_below(node: fx.Node) -> Shards | None:
    """Return what hands out a column-parallel layer's result: as a plain tensor, ``to_local`` of one that was gathered; or
    as a DTensor, its columns where they are."""
    if is_tensor(node) and placed(node) == example(node).dim() - 1:
        return _scattered_below(node)
    if not is_call(node, "to_local") or not _takes_nothing_else(node):
        return None
    nodes = []
    below = node.args[0]
    while isinstance(below, fx.Node) and placed(below) == "replicated" and is_redistributed(below):
        nodes.append(below)
        below = below.args[0]
    if not nodes or not isinstance(below, fx.Node) or placed(below) != example(below).dim() - 1:
        return None
    linear, moved = _as_it_lies(below)
    return Shards(linear, (linear, *moved, *reversed(nodes)))


def _scattered_below(node: fx.Node) -> Shards:
    linear, moved = _as_it_lies(node)
    return Shards(linear, (linear, *moved), scattered=True)


def _as_it_lies(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return what is below calls that lay a DTensor out as it lies, and the calls."""
    nodes: list[fx.Node] = []
    while is_redistributed(node) and isinstance(node.args[0], fx.Node) and placed(node.args[0]) == placed(node):
        nodes.insert(0, node)
        node = node.args[0]
    return node, nodes


def made_of(x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The tensor from which a DTensor was made, and the calls that made it: ``from_local``, then ``redistribute``."""
    calls: list[fx.Node] = []
    made = ("from_local", "redistribute")
    while hasattr(example(x), "placements") and any(is_call(x, name) for name in made) and is_tensor(x.args[0]):
        calls.insert(0, x)
        x = x.args[0]  # type: ignore[assignment]
    return x, calls


def placed(node: Any) -> str | int | None:
    """Return how a DTensor lies over a mesh of one dim: ``"replicated"``, or the dim that is sharded; else None."""
    placements: Any = getattr(example(node), "placements", ()) if is_tensor(node) else ()
    if len(placements) != 1:
        return None
    placement = placements[0]
    if placement.is_replicate():
        return "replicated"
    return placement.dim % example(node).dim() if placement.is_shard() else None


def _where(node: fx.Node) -> str:
    placements = getattr(example(node), "placements", None)
    return "on this rank alone, a plain tensor" if placements is None else f"as {placements} of {example(node).device_mesh}"


def _said(wanted: str | int) -> str:
    return wanted if isinstance(wanted, str) else f"sharded along dim {wanted}"


def is_call(node: fx.Node, name: str) -> bool:
    """Return True if a node is a call of a DTensor's method or function; up to torch 2.12 Dynamo makes a function of it."""
    return (node.op == "call_method" and node.target == name) or (
        node.op == "call_function" and getattr(node.target, "__name__", "") in (f"prim_{name}", f"prim {name}", name)
    )


def is_redistributed(node: fx.Node) -> bool:
    """Return True if a node is a DTensor laid out otherwise, its values and its gradient not rounded to another dtype."""
    return is_call(node, "redistribute") and not any(isinstance(given, torch.dtype) for given in _given(node))


def _takes_nothing_else(node: fx.Node) -> bool:
    """Return True if a call has no arguments besides the tensor."""
    return not any(_given(node))


def _given(node: fx.Node) -> list[Any]:
    """Return what a call is given besides the tensor; up to torch 2.12 Dynamo has some of it in the closure of a
    function."""
    cells = [cell.cell_contents for cell in getattr(node.target, "__closure__", None) or ()]
    return tree_leaves((node.args[1:], dict(node.kwargs), cells))
