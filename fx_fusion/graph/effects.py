"""Find what may not be reordered: in-place writes, aliases, and the grad-mode and autocast regions of a graph.

Aliasing is read off the storages of the fake tensors that Dynamo traced with, so a view of a view of a chunk is known
to share memory with its base. Writes are read off operator schemas and the naming rules of the Python API.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.torch_internals.fakes import example_of, storage_of
from fx_fusion.torch_internals.nodes import (
    ENTER_AUTOCAST,
    ENTER_OTHER,
    EXIT,
    IN_PLACE_OPERATORS,
    NUMPY_CALL,
    SET_GRAD,
    is_higher_order,
    may_write_to_operands,
    region_change,
    schemas_of,
    sets_a_hook,
    takes_inplace,
    written_parameters,
)

_IN_PLACE_DUNDERS = {f"__{op.__name__.strip('_')}__" for op in IN_PLACE_OPERATORS}


_RUNNING_STATISTICS = ("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_WRITES_TO_SEVERAL = re.compile(r"(_fused|_amp_foreach)_\w+_|fused_moving_avg_obs_fake_quant")


class Effects:
    """Writes, aliases and regions of one graph.

    Args:
        graph: the graph.
        order: the position of each node.
        around: the region that the graph runs in; None for what is ambient now.
    """

    def __init__(self, graph: fx.Graph, order: dict[fx.Node, int], around: tuple[Any, ...] | None = None):
        self.order = order
        self.writes: list[fx.Node] = []  # in graph order
        self._mutated: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._by_storage: dict[int, list[fx.Node]] = {}
        self.region: dict[fx.Node, tuple[Any, ...]] = {}
        state = (torch.is_grad_enabled(),) if around is None else around
        for node in graph.nodes:
            state = _next_region(node, state)
            self.region[node] = state
            for storage in storages(node):
                self._by_storage.setdefault(storage, []).append(node)
            written = tuple(_written(node))
            if written:
                self.writes.append(node)
                self._mutated[node] = written

    def adopt(self, node: fx.Node, beside: fx.Node) -> None:
        """A node that was inserted into the graph afterwards, which writes nothing."""
        self.region[node] = self.region[beside]
        for storage in storages(node):
            self._by_storage.setdefault(storage, []).append(node)

    def mutated(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The operands that ``node`` writes to."""
        return self._mutated.get(node, ())

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """Every node that may share memory with ``node``, itself included."""
        found = {alias: None for storage in storages(node) for alias in self._by_storage.get(storage, ())}
        return list(found) or [node]

    def written_inputs(self) -> set[fx.Node]:
        """The inputs of the graph that it writes to, buffers for example."""
        written = (alias for write in self.writes for operand in self.mutated(write) for alias in self.aliases(operand))
        return {alias for alias in written if alias.op in ("placeholder", "get_attr")}

    def returned(self, node: fx.Node) -> bool:
        """Return True if the graph returns ``node`` or a view of it."""
        return any(user.op == "output" for alias in self.aliases(node) for user in alias.users)

    def overwrites_dead_value(self, node: fx.Node) -> bool:
        """Return True if an in-place ``node`` is as good as its functional form.

        Nothing may read the old value afterwards, under any name, and it must not be an input of the graph. Under no_grad it
        must not have a gradient, because a tensor keeps its history when it is written to there."""
        for target in self.mutated(node):
            if example_of(target).requires_grad and not self.region[node][0]:
                return False
            for alias in self.aliases(target):
                if alias.op in ("placeholder", "get_attr"):
                    return False
                if self.order[alias] >= self.order[node]:
                    continue
                if any(self.order.get(user, len(self.order)) > self.order[node] for user in alias.users):
                    return False
        return True

    def written_after(self, position: int, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """The first write behind a graph position to memory of ``nodes``."""
        return self.writes_between(position, len(self.order), nodes) if self.writes else None

    def writes_between(
        self, first: int, last: int, nodes: Iterable[fx.Node], *, but: Collection[fx.Node] = ()
    ) -> fx.Node | None:
        """The first write in ``first..last`` (graph positions), none of ``but``, to memory of ``nodes``. Those that are made
        behind it do not count: they hold what it left."""
        nodes = list(nodes)
        for write in self.writes:
            at, written = self.order[write], self.mutated(write)
            if not first < at < last or write in but:
                continue
            changed = {storage for target in written for storage in storages(target)}
            for node in nodes:
                if self.order.get(node, -1) < at and (node in written or changed.intersection(storages(node))):
                    return write
        return None


@contextlib.contextmanager
def entered(region: tuple[Any, ...]) -> Iterator[None]:
    """The grad mode and the autocast regions of a node, on top of what is ambient."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(region[0]) if region else contextlib.nullcontext())
        for entry in region[1:]:
            if isinstance(entry, tuple) and entry[0] == "autocast":
                device, dtype, enabled, *cache = entry[1]
                stack.enter_context(torch.autocast(device, dtype, enabled, *cache))
        yield


def autocast_of(region: tuple[Any, ...], device: str) -> tuple[str, torch.dtype, bool]:
    """Return what autocast does in a region, for tensors of a device type."""
    with entered(region):
        dtype = autocast_dtype(device)
    return device, dtype or torch.float32, dtype is not None


def storages(node: fx.Node) -> list[int]:
    """Identities of the storages behind a node's example value (several for a tuple, none for a scalar)."""
    known = example_of(node)
    tensors = known if isinstance(known, (tuple, list)) else (known,)
    found = (storage_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
    return [storage for storage in found if storage is not None]


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that a node may write to. Where that can't be known, all of them."""
    target = node.target
    if node.op not in ("call_function", "call_method"):
        return []
    if (schemas := schemas_of(target)) is not None:
        written_to = {w: None for schema in schemas for w in _written_by_schema(node, schema)}
        return list(written_to | dict.fromkeys(_running_statistics(node, str(schemas[0].name).rpartition("::")[2])))
    if is_higher_order(target):
        return list(node.all_input_nodes) if may_write_to_operands(target) or _body_writes(node) else []
    written: list[Any] = [v for k, v in node.kwargs.items() if k == "out"]
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.startswith(NUMPY_CALL) or _WRITES_TO_SEVERAL.fullmatch(name):
        return list(node.all_input_nodes)
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place and getattr(target, "__module__", "") != "_operator"  # and_, or_: keywords, not writes
    in_place = in_place or name in _IN_PLACE_DUNDERS or _in(target, IN_PLACE_OPERATORS) or _asks_for_it(node)
    in_place = in_place or sets_a_hook(node)
    if in_place:
        written.extend(node.args[:1] or [node.kwargs[k] for k in ("input", "self") if k in node.kwargs])
    written.extend(_running_statistics(node, name))
    if name in ("embedding", "embedding_bag") and (node.kwargs.get("max_norm") or (len(node.args) > 3 and node.args[3])):
        written.extend(node.all_input_nodes)
    return [w for item in written for w in (item if isinstance(item, (tuple, list)) else (item,)) if isinstance(w, fx.Node)]


def _running_statistics(node: fx.Node, name: str) -> list[fx.Node]:
    """Return those that a call of a norm writes to; its schema says nothing of them."""
    if name not in _RUNNING_STATISTICS:
        return []
    first = 1 if getattr(node.target, "__module__", "").startswith("torch.nn") else 3  # torch.batch_norm: behind the weights
    found = (*node.args[first : first + 2], *(node.kwargs.get(k) for k in ("running_mean", "running_var")))
    return [statistic for statistic in found if isinstance(statistic, fx.Node)]


def _asks_for_it(node: fx.Node) -> bool:
    """``inplace=True``, by keyword or by position (``F.relu6(x, True)``)."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    if node.op != "call_function" or len(node.args) < 2 or True not in node.args:
        return False
    at = takes_inplace(node.target)  # type: ignore[arg-type]
    return at is not None and at < len(node.args) and node.args[at] is True


def _body_writes(node: fx.Node) -> bool:
    """Return True if a graph that a higher-order op is given writes to a placeholder of its own."""
    owner = node.graph.owning_module
    for operand in node.all_input_nodes:
        if operand.op != "get_attr" or owner is None:
            continue
        body = owner.get_submodule(str(operand.target)) if hasattr(owner, str(operand.target)) else None
        if not isinstance(body, fx.GraphModule):
            continue
        effects = Effects(body.graph, {n: i for i, n in enumerate(body.graph.nodes)})
        inputs = {s for n in body.graph.nodes if n.op == "placeholder" for s in storages(n)}
        for write in effects.writes:
            for written in effects.mutated(write):
                if written.op == "placeholder" or inputs.intersection(storages(written)):
                    return True
    return False


def _written_by_schema(node: fx.Node, schema: Any) -> list[fx.Node]:
    written: list[fx.Node] = []
    for i, name in written_parameters(schema):
        operand = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        items = operand if isinstance(operand, (tuple, list)) else (operand,)
        written.extend(item for item in items if isinstance(item, fx.Node))
    return written


def _in(target: Any, table: frozenset[Any]) -> bool:
    try:
        return target in table
    except TypeError:
        return False


def _next_region(node: fx.Node, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The ambient state after ``node``: grad mode first, then the stack of whatever else was entered."""
    change = region_change(node)
    if change == SET_GRAD:
        return (bool(node.args[0]), *state[1:])
    if change == ENTER_AUTOCAST:
        return (*state, ("autocast", node.args))
    if change == ENTER_OTHER:
        return (*state, node.name)
    if change == EXIT and len(state) > 1:
        return state[:-1]
    return state
