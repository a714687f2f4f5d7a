"""Losses of rows that a graph returns: they are computed outside of it, with the loss that is made of them.

    log_probs, entropy = model(x)             computed of logits in the graph, a number a token
    loss = (log_probs * weights).sum()        outside
    loss.backward()

What gradient each row gets is known outside only. In the graph the logits would have to be kept for it, or made again.
So the graph ends with the logits, which are deferred (``rewrite.returned_logits``). What it does with them is called outside
as if the user had written it there; those calls wait, and ``rewrite.losses_outside`` computes them with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fx_fusion.fusion.legality import why_not_plain
from fx_fusion.graph.effects import autocast_of
from fx_fusion.graph.linear import linear_of
from fx_fusion.graph.rows_of_logits.values import is_plain_call
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.rewrite.returned_logits import is_large
from fx_fusion.runtime.capture import is_capturing
from fx_fusion.runtime.reads import Reads
from fx_fusion.runtime.recorded_ops import PYTHONS, RECORDED, SPLITS
from fx_fusion.runtime.sources import PLACE
from fx_fusion.torch_internals.dispatch import has_saved_tensor_hooks
from fx_fusion.torch_internals.fakes import FakeTensor
from fx_fusion.torch_internals.fsdp import is_gathered_for_its_module_alone, owner_of

Compiled = Callable[..., Any]
_MOST_CALLS = 96


_OF_SHAPES = {"size", "dim", "numel"}  # which do not read a tensor


@dataclass(frozen=True)
class Tail:
    """Hold what a graph did with its logits.

    Attributes:
        calls: what is called, in order, of each other's results, of the logits and of other results of the graph.
        given: of which results of the graph, by their nodes.
        arguments: and of which of its arguments.
        plan: for every original output its place among the results of the graph, or the call that makes it.
        autocast: device type, dtype and whether it is on, around the calls.
        head: the arguments of the graph that are weight and bias of the linear layer.
    """

    calls: list[fx.Node]
    given: dict[fx.Node, int]
    arguments: dict[fx.Node, int]
    plan: list[int | fx.Node]
    autocast: tuple[str, torch.dtype, bool]
    head: list[int]

    def wrap(self, deferring: Compiled, reads: Reads, compile_whole: Callable[[], Compiled]) -> Compiled:
        """Around the compiled graph: return what the graph returned before. Where the logits could not wait, and while they
        are wanted in call after call, call what ``compile_whole`` returns, the graph with what it does with them, made at
        first need."""
        whole: list[Compiled] = []

        def run(*args: Any) -> tuple[Any, ...]:
            if not any(isinstance(a, FakeTensor) for a in args) and (bool(whole) or not is_capturing()):
                at_once = reads.will_be_at_once()
                if at_once or not self._may_wait(args):
                    if not whole:
                        whole.append(compile_whole())
                    if at_once:
                        reads.next_call().at_once()
                    return tuple(whole[0](*args))
            results = deferring(*args)
            made = self._called(results, args)
            return tuple(results[at] if isinstance(at, int) else made[at] for at in self.plan)

        return run

    def _may_wait(self, arguments: Sequence[Any]) -> bool:
        """Return True if losses outside find the linear layer as it is, and hooks on what is saved want nothing of it."""
        head = [arguments[at] for at in self.head]
        gathered = any(owner_of(t) is not None or is_gathered_for_its_module_alone(t) for t in head)
        return not gathered and not has_saved_tensor_hooks()

    def _called(self, results: Sequence[Any], arguments: Sequence[Any]) -> dict[fx.Node, Any]:
        """Return the results of the calls, which wait where the logits do."""
        device, dtype, enabled = self.autocast
        values = {node: results[at] for node, at in self.given.items()}
        values |= {node: arguments[at] for node, at in self.arguments.items()}
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            for call in self.calls:
                args, kwargs = fx.map_arg((call.args, call.kwargs), values.__getitem__)
                function: Any = getattr(args[0], call.target) if isinstance(call.target, str) else call.target
                token = PLACE.set(call.meta.get("stack_trace") or "")
                try:
                    values[call] = function(*(args[1:] if isinstance(call.target, str) else args), **kwargs)
                finally:
                    PLACE.reset(token)
        return values


def take_rows_outside(gm: fx.GraphModule) -> Tail | None:
    """Let a graph that returns losses of rows of its logits return the logits, in place; return what it did with them. None,
    and nothing is changed, where it does not, or where the calls could not wait."""
    large = [n for n in gm.graph.nodes if is_tensor(n) and example(n).requires_grad and is_large(example(n))]
    if not large:
        return None
    view = View(gm.graph)
    linears = [n for n in large if linear_of(view, n) is not None]
    if len(linears) != 1:
        return None
    (logits,) = linears
    calls, linear = _calls_of(view, logits), linear_of(view, logits)
    operands = [] if linear is None else [n for n in (linear.x, linear.weight, linear.bias) if n is not None]
    if any(why_not_plain(example(n)) is not None for n in (logits, *operands)):
        return None
    if not calls or not _returns_trained_rows(logits, calls) or not _may_wait(view, logits, calls):
        return None
    return _cut(gm, view, logits, calls, operands[1:])


def _calls_of(view: View, logits: fx.Node) -> list[fx.Node]:
    """Return all that is computed of logits, in order."""
    reached = {logits}
    for node in view.graph.nodes:
        if node.op != "output" and any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    return [node for node in view.graph.nodes if node in reached and node is not logits]


def _returns_trained_rows(logits: fx.Node, calls: Sequence[fx.Node]) -> bool:
    """Return True if the graph returns numbers of rows that have a gradient, and not the logits or what has classes."""
    classes = example(logits).shape[-1]
    returned = [n for n in (logits, *calls) if any(user.op == "output" for user in n.users)]
    if not all(is_tensor(n) for n in returned) or any(classes in example(n).shape for n in returned):
        return False
    return any(example(n).requires_grad and example(n).dim() for n in returned)


def _may_wait(view: View, logits: fx.Node, calls: Sequence[fx.Node]) -> bool:
    """Return True if every call is one whose result waits, in one mode, and nothing that they read changes behind."""
    effects, region = view.effects, view.effects.region[calls[0]]
    if len(calls) > _MOST_CALLS or not effects.region[logits][0] or not region[0]:
        return False
    if any(effects.region[n] != region or effects.mutated(n) or not _is_recorded(n) or not is_plain_call(n) for n in calls):
        return False
    read = [n for call in calls for n in call.all_input_nodes if is_tensor(n)]
    return effects.written_after(view.order[logits], [logits, *read]) is None


def _is_recorded(node: fx.Node) -> bool:
    if not is_tensor(node) and not isinstance(example(node), (tuple, list)):
        return node.target in _OF_SHAPES or getattr(node.target, "__module__", "") == "_operator"
    if node.op == "call_method":
        function = getattr(Tensor, str(node.target), None)
        return function in RECORDED or function in SPLITS
    known = node.target in RECORDED or node.target in SPLITS or node.target in PYTHONS
    return node.op == "call_function" and known and node.target is not F.linear


def _cut(gm: fx.GraphModule, view: View, logits: fx.Node, calls: Sequence[fx.Node], head: Sequence[fx.Node]) -> Tail:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    inside, calls = set(calls), _with_sizes(view, logits, calls)
    placeholders = gm.graph.find_nodes(op="placeholder")
    read: dict[fx.Node, fx.Node] = {}  # what calls take, equal ones (``~mask``, written twice) once
    for node in (n for call in calls for n in call.all_input_nodes if n not in calls and n is not logits):
        read[node] = next((known for known in read if view.same_value(known, node)), node)
    results = [logits, *(n for n in dict.fromkeys(read.values()) if n.op != "placeholder")]
    kept = [item for item in returned if item not in inside]
    kept += [n for n in results if n not in kept]
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in (logits, *dict.fromkeys(read.values()))}
    copies |= {n: copies[known] for n, known in read.items()}
    copied = [copies.setdefault(call, graph.node_copy(call, copies.__getitem__)) for call in calls]
    given = {copies[n]: kept.index(n) for n in results}
    arguments = {copies[n]: placeholders.index(n) for n in read.values() if n.op == "placeholder"}
    plan = [copies[n] if n in inside else kept.index(n) for n in returned]
    autocast = autocast_of(view.effects.region[calls[0]], example(logits).device.type)
    output.args = (tuple(kept),)
    for call in reversed(calls):
        if not call.users:
            gm.graph.erase_node(call)
    gm.recompile()
    return Tail(copied, given, arguments, plan, autocast, [placeholders.index(n) for n in head if n.op == "placeholder"])


def _with_sizes(view: View, logits: fx.Node, calls: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the calls with those that make sizes for them, which no graph returns as they are."""
    wanted, waiting = set(calls), list(calls)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in wanted and node is not logits and node.op != "placeholder" and not is_tensor(node):
                wanted.add(node)
                waiting.append(node)
    return [node for node in view.graph.nodes if node in wanted]
