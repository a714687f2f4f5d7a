"""Outputs that are computed when somebody reads them.

A language model returns ``(loss, logits)`` and training reads the loss. Where a fusion absorbs everything that made the
logits, the compiled graph returns what they are computed *from*, and the backend puts a ``DeferredTensor`` in their
place: a tensor with shape, dtype and device, whose values appear at first use, exactly as the model would have computed
them, gradients included. Casts, views and ``detach`` of it stay deferred.

Who reads them in call after call (an evaluation, a trainer that logs accuracy) gets a version of the graph that computes
them beside the loss; only their gradients wait there (``runtime.reads``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import kind_of
from fx_fusion.graph.effects import autocast_of, storages
from fx_fusion.graph.places import module_of
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.runtime.capture import is_capturing
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.runtime.reads import Call, Reads
from fx_fusion.runtime.recipe import Losses, Recipe
from fx_fusion.runtime.steps import waiting
from fx_fusion.torch_internals.dispatch import has_saved_tensor_hooks
from fx_fusion.torch_internals.fakes import set_example
from fx_fusion.torch_internals.nodes import is_erased

_MAX_FOLLOWING = 16  # nodes between absorbed logits and the outputs made from them


# -- which outputs can wait (while matching) -----------------------------------------------------------------------
def deferrable_outputs(
    search: Search, chain: Sequence[fx.Node], inside: set[fx.Node], cuts: Sequence[fx.Node]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The outputs of the graph that are made from ``chain`` alone, if everything of it outside the fusion ends in
    outputs; and the nodes that lie between. ``((), ())`` where something else needs the values, or may not wait."""
    view = search.view
    if not search.may_defer:
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
    memory_of_sources = {memory for source in sources for memory in storages(source)}
    if any(memory_of_sources.intersection(storages(output)) for output in outputs):
        return (), ()  # a view of an input: the caller may write to one and read the other
    return tuple(outputs), tuple(following)


# -- cutting them off (while rewriting) ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Deferral:
    """Outputs that leave the graph and share memory: the module that computes them, from which nodes, and what they are
    called.

    ``computed``: the graph returns them all the same, without gradients. ``can_compute``: it could. ``of_linear``: they are
    the result, of this dtype, of one linear layer of the cuts, or a cast of it.
    """

    nodes: tuple[fx.Node, ...]
    module: fx.GraphModule
    cuts: tuple[fx.Node, ...]
    names: tuple[str, ...]
    autocast: tuple[str, torch.dtype, bool]
    grad: bool
    can_compute: bool = False
    computed: bool = False
    of_linear: torch.dtype | None = None


def sharing_memory(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The nodes in groups that are views of each other, or the same tensor."""
    groups: list[tuple[set[int], list[fx.Node]]] = []
    for node in nodes:
        memory = set(storages(node))
        group = next((g for g in groups if g[0] & memory), None)
        if group is None:
            groups.append((memory, [node]))
        else:
            group[1].append(node)
    return [members for _, members in groups]


def cut_off(
    nodes: Sequence[fx.Node], cuts: Iterable[fx.Node], region: tuple[Any, ...], *, can_compute: bool = False,
    of_linear: torch.dtype | None = None,
) -> Deferral:  # fmt: skip
    """A graph module that computes ``nodes`` from ``cuts`` and placeholders. Reads the graph; changes nothing."""
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

    for node in nodes:
        visit(node)
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in inputs}
    for n in needed:
        copies[n] = graph.node_copy(n, lambda operand: copies[operand])
    graph.output(tuple(copies[node] for node in nodes))
    autocast = autocast_of(region, example(nodes[0]).device.type)
    module, names = fx.GraphModule(torch.nn.Module(), graph), tuple(map(called, nodes))
    return Deferral(tuple(nodes), module, tuple(inputs), names, autocast, region[0], can_compute, of_linear=of_linear)


def called(node: fx.Node) -> str:
    """Return what the model calls an output: the name of what it is a cast of (accelerate casts logits to float32). The
    module that made it is added where the name does not speak of logits."""
    while len(node.all_input_nodes) == 1 and _is_cast(example(below := node.all_input_nodes[0]), example(node)):
        node = below
    module = module_of(node)
    return f"{node.name} (of {module})" if module and "logits" not in node.name else node.name


def _is_cast(before: Any, after: Any) -> bool:
    both = isinstance(before, Tensor) and isinstance(after, Tensor) and before.is_floating_point()
    return both and after.is_floating_point() and before.dtype != after.dtype and same_shape(before, after)


class DeferredOutputs:
    """The outputs of one graph that were cut off; ``wrap`` makes the compiled graph return deferred tensors."""

    def __init__(self, gm: fx.GraphModule, deferrals: Sequence[Deferral], now: Callable[[Any], Any]):
        self.waiting = tuple(name for d in deferrals if not d.computed for name in d.names)
        self.computed = tuple(name for d in deferrals if d.computed for name in d.names)
        beside_the_loss = [d for d in deferrals if d.of_linear is None]
        self.can_compute = bool(beside_the_loss) and all(d.can_compute for d in beside_the_loss)
        self._deferrals = tuple(deferrals)
        self._metas = [_static_metas(d.nodes) for d in deferrals]
        self._dtypes = [[example(node).dtype for node in d.nodes] for d in deferrals]
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        returned = list(output.args[0])  # type: ignore[arg-type]
        waiting = {now(node): (d, i) for d, deferral in enumerate(deferrals) for i, node in enumerate(deferral.nodes)}
        computed = {node for node, (d, _) in waiting.items() if deferrals[d].computed}
        kept = [item for item in returned if item not in waiting or item in computed]
        self._values = [[kept.index(now(n)) for n in d.nodes] if d.computed else None for d in deferrals]
        self._sources: list[list[tuple[str, int]]] = []  # of each deferral
        for deferral in deferrals:
            places: list[tuple[str, int]] = []
            for cut in map(now, deferral.cuts):
                if cut.op == "placeholder":
                    places.append(("argument", placeholders.index(cut)))
                    continue
                if cut not in kept:
                    kept.append(cut)
                places.append(("result", kept.index(cut)))
            self._sources.append(places)
        # For every original output: its place among the kept ones, or its deferral and its place there.
        self._plan = [waiting[item] if item in waiting else kept.index(item) for item in returned]
        if deferrals:
            output.args = (tuple(kept),)

    def wrap(
        self, compiled: Callable[..., Any], reads: Reads, losses: Losses | None = None, *, replayed: bool = False
    ) -> Callable[..., Any]:  # fmt: skip
        """Around the compiled graph: returns what the graph returned before. ``reads`` learns which calls are read.
        ``losses`` computes losses of what waits, as ``Recipe.losses`` says. ``replayed``: the next call of the graph writes
        over the results of this one, as a CUDA graph does. Losses that wait are computed before it."""
        if not self._deferrals:
            return compiled

        def run(*args: Any) -> tuple[Any, ...]:
            for recipe in waiting():
                mine = recipe.graph is self
                if not recipe.grad or (mine and replayed):
                    recipe.read_numbers()  # predictions that are collected would keep the tensors that they are made of
                if mine:
                    recipe.forget_copies(args)
            results = compiled(*args)
            call = reads.next_call()
            made = [self._made(d, args, results, call, losses) for d in range(len(self._deferrals))]
            return tuple(results[item] if isinstance(item, int) else made[item[0]][item[1]] for item in self._plan)

        return run

    def _made(
        self, d: int, args: Sequence[Any], results: Sequence[Any], call: Call, losses: Losses | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        deferral, metas = self._deferrals[d], self._metas[d]
        operands = [args[i] if kind == "argument" else results[i] for kind, i in self._sources[d]]
        places = self._values[d]
        values = None if places is None else tuple(results[i] for i in places)
        recipe = Recipe(
            deferral.module, operands, deferral.names, deferral.autocast, deferral.grad, call, values=values,
            of_linear=deferral.of_linear,
        )  # fmt: skip
        is_all = all(kind == "argument" for kind, _ in self._sources[d])
        # DDP calls what it compiled with fake tensors, to compile the next bucket. Of a CUDA graph that the user captures,
        # each replay has to make what is read behind it.
        if recipe.is_traced() or is_capturing() or not recipe.may_wait(is_all):
            return recipe.values()
        # What is checkpointed runs twice, alike.
        if recipe.of_linear is not None and not has_saved_tensor_hooks() and call.at_once():
            return recipe.values()
        recipe.graph, recipe.losses = self, losses
        metas = recipe.metas(self._dtypes[d]) if metas is None else metas
        recipe.kind = f", {kind_of(metas[0])},"
        return DeferredTensor.all_of(recipe, metas)


def defer_outputs(gm: fx.GraphModule, deferrals: Sequence[Deferral], now: Callable[[Any], Any]) -> DeferredOutputs:
    """Take deferred outputs out of the graph's results and put what they are computed from in their place."""
    deferred = DeferredOutputs(gm, deferrals, now)
    for deferral in deferrals:
        for node in deferral.nodes:
            _erase_dead(node, {now(cut) for cut in deferral.cuts})
    return deferred


def _erase_dead(node: fx.Node, stop: set[fx.Node]) -> None:
    if is_erased(node) or node.users or node in stop or node.op in ("placeholder", "output"):
        return
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        _erase_dead(operand, stop)


def _static_metas(nodes: Sequence[fx.Node]) -> tuple[Tensor, ...] | None:
    examples = [example(node) for node in nodes]
    if not all(isinstance(n, int) for example in examples for n in (*example.shape, *example.stride())):
        return None  # symbolic: known when it runs
    return tuple(torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device="meta") for e in examples)


# -- a deferred tensor as an input ---------------------------------------------------------------------------------
def read_deferred_examples(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Return the example inputs of a graph that another graph's deferred outputs go into, as the tensors that it will be
    called with (``read_deferred_inputs``), and replace them in the graph, too.

    An op that returns its operand (``contiguous()``, ``mul_``) has the deferred tensor for its example as well. It shares
    the memory of the input, so it gets the same storage."""
    inputs, placeholders = list(example_inputs), gm.graph.find_nodes(op="placeholder")
    deferred = [i for i, node in enumerate(placeholders) if isinstance(example(node), DeferredTensor)]
    for node in gm.graph.nodes:
        if isinstance(tensor := example(node), DeferredTensor):
            set_example(node, tensor.as_traced())
    for i in deferred:
        inputs[i] = example(placeholders[i])
    return inputs


def activation_positions(gm: fx.GraphModule) -> tuple[int, ...]:
    """The inputs of a graph that another graph may have made: tensors that are no parameters."""
    inputs = [example(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return tuple(i for i, t in enumerate(inputs) if isinstance(t, Tensor) and not isinstance(t, torch.nn.Parameter))


def read_deferred_inputs(
    positions: Sequence[int], *, writes: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Compiled code reads memory, and a deferred tensor has none before it is read. Dynamo unwraps what it traces; the
    buckets into which DDP splits one graph hand their results to each other without it. ``writes``: the graph writes to
    one; it was captured as if each had memory of its own."""

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            deferred = [i for i in positions if type(args[i]) is DeferredTensor]
            if deferred:
                args = tuple(a.materialize() if type(a) is DeferredTensor else a for a in args)
                if writes and len({args[i].untyped_storage().data_ptr() for i in deferred}) < len(deferred):
                    raise RuntimeError(
                        "a compiled function was given two deferred tensors that are views of each other, and writes to "
                        "one: hand it tensor.clone() for one of them."
                    )
            return compiled(*args)

        return run if positions else compiled

    return wrap
