"""What may not be reordered: in-place writes, aliases, and the grad-mode and autocast regions of a graph.

Aliasing is read off the storages of the fake tensors that Dynamo traced with, so a view of a view of a chunk is known
to share memory with its base. Writes are read off operator schemas and the naming rules of the Python API.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_IN_PLACE_OPERATORS = {
    getattr(operator, name)
    for name in (
        "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift setitem delitem".split()
    )
}


class Effects:
    """Writes, aliases and regions of one graph."""

    def __init__(self, graph: fx.Graph, order: dict[fx.Node, int]):
        self.order = order
        self.writes: list[fx.Node] = []  # in graph order
        self._mutated: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._by_storage: dict[int, list[fx.Node]] = {}
        self.region: dict[fx.Node, tuple[Any, ...]] = {}
        state: tuple[Any, ...] = (torch.is_grad_enabled(),)
        for node in graph.nodes:
            state = _next_region(node, state)
            self.region[node] = state
            for storage in storages(node):
                self._by_storage.setdefault(storage, []).append(node)
            written = tuple(_written(node))
            if written:
                self.writes.append(node)
                self._mutated[node] = written

    def mutated(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The operands that ``node`` writes to."""
        return self._mutated.get(node, ())

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """Every node that may share memory with ``node``, itself included."""
        found = {alias: None for storage in storages(node) for alias in self._by_storage.get(storage, ())}
        return list(found) or [node]

    def overwrites_dead_value(self, node: fx.Node) -> bool:
        """Whether an in-place ``node`` is as good as its functional form: nothing reads the old value afterwards,
        under any name, and it is no input of the graph."""
        for target in self.mutated(node):
            for alias in self.aliases(target):
                if alias.op in ("placeholder", "get_attr"):
                    return False
                if self.order[alias] >= self.order[node]:
                    continue
                if any(self.order[user] > self.order[node] for user in alias.users):
                    return False
        return True

    def writes_between(self, first: int, last: int, nodes: set[fx.Node]) -> fx.Node | None:
        """The first write in ``first..last`` (graph positions) to memory of ``nodes`` by a node not among them."""
        touched = {storage for node in nodes for storage in storages(node)}
        for write in self.writes:
            if first < self.order[write] < last and write not in nodes:
                for target in self.mutated(write):
                    if target in nodes or touched.intersection(storages(target)):
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
    """What autocast does in a region, for tensors of a device type."""
    with entered(region):
        return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


def storages(node: fx.Node) -> list[int]:
    """Identities of the storages behind a node's example value (several for a tuple, none for a scalar)."""
    known = node.meta.get("example_value")
    tensors = known if isinstance(known, (tuple, list)) else (known,)
    found = []
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            try:
                found.append(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):  # wrapper subclasses own no storage
                continue
    return found


def _written(node: fx.Node) -> list[fx.Node]:
    target = node.target
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target)
    written = [v for k, v in node.kwargs.items() if k == "out"]
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and not name.startswith("_")
    in_place = in_place and getattr(target, "__module__", "") != "_operator"  # and_, or_: keywords, not writes
    if in_place or _in(target, _IN_PLACE_OPERATORS) or node.kwargs.get("inplace") is True:
        written.extend(node.args[:1])
    elif _takes_inplace_flag(node):
        written.extend(node.args[:1])
    if target is F.batch_norm or name == "batch_norm":
        written.extend(node.args[1:3])
    return [w for item in written for w in (item if isinstance(item, (tuple, list)) else (item,)) if isinstance(w, fx.Node)]


def _takes_inplace_flag(node: fx.Node) -> bool:
    """``F.silu(x, True)``: the flag given by position."""
    position = {F.silu: 1, F.relu: 1, F.dropout: 3, F.mish: 1, F.hardswish: 1, F.elu: 2, F.leaky_relu: 2}.get(node.target)  # type: ignore[arg-type, call-overload]
    return position is not None and len(node.args) > position and node.args[position] is True


def _written_by_schema(node: fx.Node, target: torch._ops.OpOverload) -> list[fx.Node]:
    written = []
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written.extend(g for g in (given if isinstance(given, (tuple, list)) else (given,)) if isinstance(g, fx.Node))
    return written


def _in(target: Any, table: set[Any]) -> bool:
    try:
        return target in table
    except TypeError:
        return False


def _next_region(node: fx.Node, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The ambient state after ``node``: grad mode first, then the stack of whatever else was entered."""
    if node.op != "call_function":
        return state
    name = getattr(node.target, "__name__", "")
    if name == "_set_grad_enabled":
        return (bool(node.args[0]), *state[1:])
    if name == "_enter_autocast":
        return (*state, ("autocast", node.args))
    if name in ("_enter_inference_mode", "_vmap_increment_nesting", "_grad_increment_nesting"):
        return (*state, node.name)
    if name in ("_exit_autocast", "_exit_inference_mode", "_vmap_decrement_nesting", "_grad_decrement_nesting"):
        return state[:-1] if len(state) > 1 else state
    return state
