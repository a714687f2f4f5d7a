"""A loss in another graph than the lm_head: behind a graph break, or compiled by itself.

The graph of the loss gets logits that are deferred. Where nothing else in it looks at them, it runs in a version that begins
with what makes them, a linear layer and perhaps calls in between (``rewrite.losses_outside``). Then lm_head and loss are one
graph, and fuse as in any other, chunk by chunk. Logits that somebody has read go in as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.graph.rows_of_logits.finder import region_of
from fx_fusion.graph.rows_of_logits.values import Opaque
from fx_fusion.graph.terms import example, same_shape
from fx_fusion.graph.view import View
from fx_fusion.rewrite.losses_outside import Record, record_of
from fx_fusion.runtime.capture import is_capturing
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.torch_internals.dynamo import sets_hooks_behind

Compiled = Callable[..., Any]

_MOST_BETWEEN = 16  # nodes
_MOST_VERSIONS = 8  # of one graph


def only_read(gm: fx.GraphModule, deferred: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Return those of the deferred inputs of a graph, as Dynamo wrote it, that it reads and nothing else; and whether it
    writes to one of them (then it is none).

    Who has an input sees what is written to it or to a view. Its hooks want its gradient. A view that is returned has its
    memory. A cast that is returned may be made anew, although ``float()`` of float32 returns its operand."""
    if not deferred:
        return (), False
    placeholders, view = gm.graph.find_nodes(op="placeholder"), View(gm.graph)
    writes = not view.effects.written_inputs().isdisjoint(placeholders[i] for i in deferred)
    if writes or sets_hooks_behind():
        return (), writes
    return tuple(i for i in deferred if not _is_returned(view, placeholders[i])), False


def _is_returned(view: View, logits: fx.Node) -> bool:
    """Return True if a graph returns logits that come in, or a view of them."""
    returned = [n for n in view.effects.aliases(logits) if any(user.op == "output" for user in n.users)]
    casts = [n for n in returned if view.transparent(n) is logits and same_shape(example(n), example(logits))]
    return len(returned) > len(casts)


def only_losses_read(gm: fx.GraphModule, inputs: Collection[int], losses: Collection[str]) -> tuple[int, ...]:
    """Return those of the ``inputs`` of a graph, as Dynamo wrote it, that only losses look at.

    ``losses``: the names of nodes of sites of losses, be they near misses (of slices, say)."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(i for i in inputs if _ends_in(placeholders[i], losses))


def read_by_rows(gm: fx.GraphModule, inputs: Collection[int]) -> tuple[int, ...]:
    """Return those of the ``inputs`` of a graph whose rows each are read by themselves, whatever the loss.

    The graph is as Dynamo wrote it, its inputs are the tensors that it will be called with."""
    if not inputs:
        return ()
    placeholders, view = gm.graph.find_nodes(op="placeholder"), View(gm.graph)
    return tuple(i for i in inputs if _is_read_by_rows(view, placeholders[i]))


def _is_read_by_rows(view: View, node: fx.Node) -> bool:
    try:
        region = region_of(view, node, may_return=True)
    except Opaque:
        return False
    return bool(region.ends or region.rest)


def _ends_in(node: fx.Node, names: Collection[str]) -> bool:
    """Return True if everything that is made of a node ends in nodes of these names, or is handed out beside them."""
    seen: dict[fx.Node, None] = {}
    stack, ends = [node], False
    while stack:
        for user in stack.pop().users:
            ends |= user.name in names
            if user.op != "output" and user.name not in names and user not in seen:
                if len(seen) == _MOST_BETWEEN:
                    return False
                seen[user] = None
                stack.append(user)
    return ends and not any(not n.users for n in seen)


def beginning_with_lm_head(
    positions: Sequence[int], graph: fx.GraphModule, compile_graph: Callable[[fx.GraphModule], Compiled]
) -> Callable[[Compiled], Compiled]:
    """A layer around a compiled ``graph``. Where one of the inputs at ``positions`` is logits that nobody has read, or has
    classes and is made of them, it calls a version that begins with what makes it, compiled at first need."""
    versions: dict[Any, Compiled] = {}

    def run_beginning_with_lm_head(args: Sequence[Any]) -> Any:
        """The results, or None where the graph has to have logits."""
        for i in positions:
            with _reading(args[i]) as record:
                if record is None:
                    continue
                key = i, record.key, record.numbers, tuple(t.dtype for t in record.operands)
                if key not in versions:
                    if is_capturing() or len(versions) == _MOST_VERSIONS:
                        return None
                    versions[key] = compile_graph(_beginning_with(record, graph, i))
                with record.recipe.unfrozen():
                    results = versions[key](*args[:i], *record.operands, *args[i + 1 :])
                record.recipe.was_taken(args[i].numel() // record.recipe.classes)
                return results
        return None

    def wrap(compiled: Compiled) -> Compiled:
        def run(*args: Any) -> Any:
            results = run_beginning_with_lm_head(args)
            return compiled(*args) if results is None else results

        return run if positions else compiled

    return wrap


@contextlib.contextmanager
def _reading(logits: Any) -> Iterator[Record | None]:
    """Yield what a deferred input is made of, which nobody else reads inside; None where the graph has to have it."""
    source = logits._source if type(logits) is DeferredTensor else None
    if source is None or not source.classes or not torch.is_grad_enabled():
        yield None
        return
    with source.recipe.reading:
        record = None
        if logits._value is None and autocast_dtype(logits.device.type) in (None, source.recipe.of_linear):
            record = None if logits.has_hooks() else record_of(source.recipe, [source])
        yield record


def _beginning_with(record: Record, graph: fx.GraphModule, position: int) -> fx.GraphModule:
    """The graph with a record in place of an input."""
    made, (logits,) = record.graph()
    operands = made.find_nodes(op="placeholder")
    result, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if i != position:
            copies[node] = result.node_copy(node)
            continue
        for operand in operands:
            copies[operand] = result.placeholder(f"{node.name}_{operand.name}")
        taken = node
    result.graph_copy(made, copies)
    copies[taken] = copies[logits]
    result.output(result.graph_copy(graph.graph, copies))
    return fx.GraphModule(graph, result)
