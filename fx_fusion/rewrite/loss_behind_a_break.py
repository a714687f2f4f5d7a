"""A loss in another graph than the lm_head: behind a graph break, or compiled by itself.

The graph of the loss gets logits that are deferred. Where nothing else in it looks at them, it runs in a version that begins
with the linear layer that makes them: lm_head and loss are one graph then, and fuse as in any other, chunk by chunk. Logits
that somebody has read, or that are made by more than a linear layer, go in as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.graph.rows_of_logits.finder import region_of
from fx_fusion.graph.rows_of_logits.values import Opaque
from fx_fusion.graph.view import View
from fx_fusion.rewrite.unread_logits import Operands, operands_of
from fx_fusion.runtime.capture import is_capturing
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.torch_internals.dynamo import sets_hooks_behind

Compiled = Callable[..., Any]

_MOST_BETWEEN = 16  # nodes


def only_read(gm: fx.GraphModule, deferred: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Those of the deferred inputs of a graph, as Dynamo wrote it, that it reads and nothing else: who has them sees what is
    written to them or to a view, hooks of theirs want their gradient, and a view that is returned has their memory. And
    whether it writes to one of them; then it is none."""
    if not deferred:
        return (), False
    placeholders, effects = gm.graph.find_nodes(op="placeholder"), View(gm.graph).effects
    writes = not effects.written_inputs().isdisjoint(placeholders[i] for i in deferred)
    if writes or sets_hooks_behind():
        return (), writes
    return tuple(i for i in deferred if not effects.returned(placeholders[i])), False


def only_losses_read(gm: fx.GraphModule, inputs: Collection[int], losses: Collection[str]) -> tuple[int, ...]:
    """Those of the ``inputs`` of a graph, as Dynamo wrote it, that only losses look at. ``losses``: the names of nodes of
    sites of losses, be they near misses (of slices, say)."""
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
    """Whether everything that is made of a node ends in nodes of these names, or is handed out beside them."""
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
    """A layer around a compiled ``graph``. Where one of the inputs at ``positions`` is unread logits of a linear layer, it
    calls a version that begins with that layer, compiled at first need."""
    versions: dict[str, Compiled] = {}

    def run_with_lm_head(args: Sequence[Any]) -> Any:
        """The results, or None where the graph has to have logits."""
        for i in positions:
            with _reading(args[i]) as found:
                if found is None:
                    continue
                operands = [t for t in (found.rows, found.weight, found.bias) if t is not None]
                made, wanted = found.recipe.of_linear, args[i].dtype
                kind = repr((i, made, wanted, [t.dtype for t in operands]))
                if kind not in versions:
                    if is_capturing():
                        return None
                    versions[kind] = compile_graph(_with_linear(graph, i, operands, made, wanted))
                with found.recipe.unfrozen():
                    results = versions[kind](*args[:i], *operands, *args[i + 1 :])
                found.were_taken()
                return results
        return None

    def wrap(compiled: Compiled) -> Compiled:
        def run(*args: Any) -> Any:
            results = run_with_lm_head(args)
            return compiled(*args) if results is None else results

        return run if positions else compiled

    return wrap


@contextlib.contextmanager
def _reading(logits: Any) -> Iterator[Operands | None]:
    """What a deferred input is made of, which nobody else reads inside; None where the graph has to have it."""
    source = logits._source if type(logits) is DeferredTensor else None
    if source is None or not torch.is_grad_enabled():
        yield None
        return
    with source.recipe.reading:
        found = None
        if logits._value is None and autocast_dtype(logits.device.type) in (None, source.recipe.of_linear):
            found = None if logits.has_hooks() else operands_of(logits)
        yield found if found is None or found.is_the_linear_layer else None


def _with_linear(
    graph: fx.GraphModule, position: int, operands: Sequence[Tensor], made: torch.dtype | None, wanted: torch.dtype
) -> fx.GraphModule:
    """The graph with a linear layer in place of an input: of ``operands`` (input, weight, perhaps a bias), in the dtype
    ``made``, and cast to ``wanted``."""
    result, copies = fx.Graph(), {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    given: list[fx.Node] = []
    for i, node in enumerate(placeholders):
        if i == position:
            given = [result.placeholder(f"{node.name}_{name}") for name in ("input", "weight", "bias")[: len(operands)]]
        else:
            copies[node] = result.node_copy(node)
    cast = [n if t.dtype == made else result.call_method("to", (n, made)) for n, t in zip(given, operands, strict=True)]
    logits = result.call_function(F.linear, tuple(cast))
    copies[placeholders[position]] = logits if made == wanted else result.call_method("to", (logits, wanted))
    result.output(result.graph_copy(graph.graph, copies))
    return fx.GraphModule(graph, result)
