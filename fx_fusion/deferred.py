"""Outputs that are computed when somebody reads them.

A language model returns ``(loss, logits)`` and training reads the loss. Where a fusion absorbs everything that made the
logits, the compiled graph returns what they are computed *from*, and the backend puts a ``DeferredTensor`` in their
place: a tensor with shape, dtype and device, whose values appear at first use, exactly as the model would have computed
them, gradients included. Casts, views and ``detach`` of it stay deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.canonicalize import View, is_tensor, value
from fx_fusion.deferred_tensor import DeferredTensor, Recipe
from fx_fusion.effects import autocast_of

_MAX_FOLLOWING = 16  # nodes between absorbed logits and the outputs made from them


# -- which outputs can wait (while matching) -----------------------------------------------------------------------
def deferrable_outputs(
    view: View, chain: Sequence[fx.Node], inside: set[fx.Node], cuts: Sequence[fx.Node]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The outputs of the graph that are made from ``chain`` alone, if everything of it outside the fusion ends in
    outputs; and the nodes that lie between. ``((), ())`` where something else needs the values, or may not wait."""
    if not view.may_defer:
        return (), ()
    # What is read later must still be there then.
    sources = [*cuts, *(n for n in view.graph.nodes if n.op == "placeholder" and is_tensor(n))]
    if view.effects.written_after(min(view.order[n] for n in chain), [*sources, *chain]) is not None:
        return (), ()
    outputs: dict[fx.Node, None] = {}
    following: dict[fx.Node, None] = {}
    stack = list(chain)
    allowed = {*chain, *cuts}
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.op == "output":
                outputs[node] = None
            elif user not in inside and user not in following:
                following[user] = None
                stack.append(user)
                operands = (*chain, *following)
                foreign = [
                    i for i in user.all_input_nodes if i not in allowed and i not in operands and i.op != "placeholder"
                ]
                if foreign or len(following) > _MAX_FOLLOWING or view.effects.mutated(user) or not view.is_pure(user):
                    return (), ()
    return tuple(outputs), tuple(following)


# -- cutting them off (while rewriting) ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Deferral:
    """One output node that leaves the graph: the module that computes it, and from which nodes."""

    node: fx.Node
    module: fx.GraphModule
    cuts: tuple[fx.Node, ...]
    autocast: tuple[str, torch.dtype, bool]
    grad: bool


def cut_off(node: fx.Node, cuts: Iterable[fx.Node], region: tuple[Any, ...]) -> Deferral:
    """A graph module that computes ``node`` from ``cuts`` and placeholders. Reads the graph; changes nothing."""
    given = set(cuts)
    needed: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}

    def visit(n: fx.Node) -> None:
        if n in needed or n in inputs:
            return
        if n in given or n.op == "placeholder":
            inputs[n] = None
            return
        for operand in n.all_input_nodes:
            visit(operand)
        needed[n] = None

    visit(node)
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in inputs}
    for n in needed:
        copies[n] = graph.node_copy(n, lambda operand: copies[operand])
    graph.output(copies[node])
    autocast = autocast_of(region, value(node).device.type)
    return Deferral(node, fx.GraphModule(torch.nn.Module(), graph), tuple(inputs), autocast, region[0])


class DeferredOutputs:
    """The outputs of one graph that were cut off; ``wrap`` makes the compiled graph return deferred tensors."""

    def __init__(self, gm: fx.GraphModule, deferrals: Sequence[Deferral], now: Callable[[Any], Any]):
        self.names = tuple(d.node.name for d in deferrals)
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        returned = list(output.args[0])  # type: ignore[arg-type]
        waiting = {d.node: d for d in deferrals}
        kept = [item for item in returned if item not in waiting]
        sources: dict[Deferral, list[tuple[str, int]]] = {}
        for deferral in deferrals:
            places: list[tuple[str, int]] = []
            for cut in map(now, deferral.cuts):
                if cut.op == "placeholder":
                    places.append(("argument", placeholders.index(cut)))
                    continue
                if cut not in kept:
                    kept.append(cut)
                places.append(("result", kept.index(cut)))
            sources[deferral] = places
        # For every original output: its place among the kept ones, or its deferral.
        self._plan = [waiting.get(item) or kept.index(item) for item in returned]
        self._sources = sources
        self._metas = {d: _static_meta(d.node) for d in deferrals}
        if deferrals:
            output.args = (tuple(kept),)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        if not self.names:
            return compiled

        def run(*args: Any) -> tuple[Any, ...]:
            results = compiled(*args)
            return tuple(
                results[item] if isinstance(item, int) else self._deferred(item, args, results) for item in self._plan
            )

        return run

    def _deferred(self, deferral: Deferral, args: Sequence[Any], results: Sequence[Any]) -> Tensor:
        operands = [args[i] if kind == "argument" else results[i] for kind, i in self._sources[deferral]]
        recipe = Recipe(deferral.module, operands, deferral.node.name, deferral.autocast, deferral.grad)
        meta = self._metas[deferral]
        return DeferredTensor.make(recipe, recipe.meta() if meta is None else meta, recipe.device())


def defer_outputs(gm: fx.GraphModule, deferrals: Sequence[Deferral], now: Callable[[Any], Any]) -> DeferredOutputs:
    """Take deferred outputs out of the graph's results and put what they are computed from in their place."""
    deferred = DeferredOutputs(gm, deferrals, now)
    for deferral in deferrals:
        _erase_dead(deferral.node, set(deferral.cuts))
    return deferred


def _erase_dead(node: fx.Node, stop: set[fx.Node]) -> None:
    if node.users or node in stop or node.op in ("placeholder", "output"):
        return
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        _erase_dead(operand, stop)


def _static_meta(node: fx.Node) -> Tensor | None:
    example = value(node)
    if not all(isinstance(n, int) for n in (*example.shape, *example.stride())):
        return None  # symbolic: known when it runs
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="meta")


# -- a deferred tensor as an input ---------------------------------------------------------------------------------
def activation_positions(gm: fx.GraphModule) -> tuple[int, ...]:
    """The inputs of a graph that another graph may have made: tensors that are no parameters."""
    inputs = [value(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return tuple(i for i, t in enumerate(inputs) if isinstance(t, Tensor) and not (t.is_leaf and t.requires_grad))


def read_deferred_inputs(positions: Sequence[int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiled code reads memory, and a deferred tensor has none before it is read. Dynamo unwraps what it traces; the
    buckets into which DDP splits one graph hand their results to each other without it."""

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if any(type(args[i]) is DeferredTensor for i in positions):
                args = tuple(a.materialize() if type(a) is DeferredTensor else a for a in args)
            return compiled(*args)

        return run if positions else compiled

    return wrap
