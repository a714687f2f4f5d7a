"""Gated linear units of a joint graph whose results are multiplied in float8: their kernels write them so.

Where the products of a linear are written anew, what they multiply is quantized in a kernel of its own, which reads what the
kernel before it has just stored. For SwiGLU and GEGLU one kernel does both; the backward's hands out y as well, which the
gradient of the next weight multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.float8.gate import Gate, gate_of
from fx_fusion.float8.inserter import Inserter
from fx_fusion.float8.writer import Quantized, Writer
from fx_fusion.kernels.float8.glu import quantize_glu, quantize_glu_bwd
from fx_fusion.memory.joint_graph import JointGraph, erase_unread, users
from fx_fusion.torch_internals.partitioner import checkpoint_of, is_fusible


@dataclass(frozen=True)
class _Backward:
    """The backward of a gate whose results were quantized: dgate and dup, and the rows of each, or of both together."""

    gate: Gate
    results: tuple[fx.Node, fx.Node]
    rows: tuple[Quantized, ...]

    @property
    def made(self) -> set[fx.Node]:
        return {node for rows in self.rows for node in rows.made}


def quantize_in_gates(inserter: Inserter, written: Writer) -> None:
    """Let the gated linear units quantize what of their results was quantized behind them, backwards only where both of
    their results were. A result is known by what is a reshape of it and the length of its rows."""
    rows = {result: of for (result, width), of in written.rows.items() if _is_whole(result, width)}
    gates = {result: gate for result in rows if (gate := gate_of(result)) is not None}
    backwards = [*_of_both(rows, gates), *_of_both_together(rows, written)]
    if not gates and not backwards:
        return
    joint = JointGraph(inserter.graph)
    writer = _Gates(inserter, joint, written.power_of_two)
    behind: dict[tuple[fx.Node, fx.Node, str], list[_Backward]] = {}
    for backward in backwards:
        behind.setdefault(backward.gate.of, []).append(backward)
    ys: dict[_Backward, fx.Node] = {}
    for y, gate in gates.items():
        if gate.backward or checkpoint_of(gate.node) != checkpoint_of(rows[y].q):
            continue  # what a checkpoint says of y it would not say of the node that stands for it
        readers, own = joint.readers(y), behind.get(gate.of, [])
        handed_out = len(own) == 1 and own[0] not in ys and not joint.needs(own[0].gate.node, readers)
        if (readers and not handed_out) or writer.is_recomputed_from(y, rows[y]):
            continue  # y would be saved where it was not, or computed once more
        made = writer.forward(gate, y, rows[y])
        if readers:
            ys[own[0]] = made
    for backward in backwards:
        writer.backward(backward, ys.get(backward))
    erase_unread(inserter.graph, writer.unread)


def _of_both(rows: Mapping[fx.Node, Quantized], gates: Mapping[fx.Node, Gate]) -> Iterator[_Backward]:
    """The backwards of which dgate and dup were quantized each by itself."""
    by_place = {(gate.node, gate.result): result for result, gate in gates.items() if gate.backward}
    for (node, i), dgate in by_place.items():
        if i == 0 and (dup := by_place.get((node, 1))) is not None:
            yield _Backward(gates[dgate], (dgate, dup), (rows[dgate], rows[dup]))


def _of_both_together(rows: Mapping[fx.Node, Quantized], written: Writer) -> Iterator[_Backward]:
    """Yield those of which both were quantized beside each other, dgate first, and neither by itself."""
    for group, together in written.together.items():
        results = [product.source for product in group if _is_whole(*product.activation) and product.source not in rows]
        gates = [gate_of(result) for result in results]
        if len(group) == len(gates) == 2 and [gate and gate.result for gate in gates] == [0, 1]:
            dgate, dup = gates
            if dgate is not None and dup is not None and dgate.node is dup.node and dgate.backward:
                yield _Backward(dgate, (results[0], results[1]), (together,))


def _is_whole(result: fx.Node, width: Any) -> bool:
    """Return True if rows of this length are those of a node, of known sizes."""
    shape = result.meta["val"].shape
    return all(isinstance(size, int) for size in shape) and shape[-1] == width


class _Gates:
    """Writes gated linear units of one graph anew."""

    def __init__(self, inserter: Inserter, joint: JointGraph, power_of_two: bool):
        self._inserter, self._joint, self._power_of_two = inserter, joint, power_of_two
        self.unread: list[fx.Node] = []  # what may be read by nothing now

    def is_recomputed_from(self, y: fx.Node, rows: Quantized) -> bool:
        """Return True if kernels of Inductor's read y in the forward: what they make may be computed again, from gate and
        up."""
        return any(is_fusible(n) for n in self._other_readers(y, rows) if n not in self._joint.backward)

    def forward(self, gate: Gate, y: fx.Node, rows: Quantized) -> fx.Node:
        """Quantize y where it is made. Returns y, which is stored where the forward reads it otherwise, and then another
        node."""
        store = any(reader not in self._joint.backward for reader in self._other_readers(y, rows))
        function = _forward(gate.kind, self._power_of_two, y.meta["val"].shape if store else None)
        made = self._inserter.insert(function, gate.operands, gate.node, like=rows.q)
        *_, q, scale = made[:-1] if store else made
        rows.q.replace_all_uses_with(q)
        rows.scale.replace_all_uses_with(scale)
        self.unread += rows.made
        if store:
            y.replace_all_uses_with(made[-1])
        self.unread.append(y)
        return made[-1] if store else y

    def backward(self, backward: _Backward, y: fx.Node | None) -> None:
        """Quantize dgate and dup where they are made, store them where something else reads them, and hand out y, if it is
        given, to those of the backward that read it."""
        joint, gate = self._joint, backward.gate
        stored = [*(r if set(users(r)) - backward.made else None for r in backward.results), y]
        shapes = tuple(None if node is None else node.meta["val"].shape for node in stored)
        kept = [node for node in stored if node is not None]
        quantized = [node for rows in backward.rows for node in (rows.q, rows.scale)]
        function = _backward(gate.kind, self._power_of_two, shapes, together=len(backward.rows) == 1)
        made = self._inserter.insert(function, gate.operands, gate.node, like=gate.node)
        joint.is_of_backward(*made)
        found = made[len(made) - len(quantized) - len(kept) :]
        for node, again in zip(quantized, found, strict=False):
            node.replace_all_uses_with(again)
        for node, again in zip(kept, found[len(quantized) :], strict=True):
            if node is y:
                joint.read_instead(node, again)
            else:
                node.replace_all_uses_with(again)
        self.unread += [*backward.made, *backward.results, *kept]

    def _other_readers(self, result: fx.Node, rows: Quantized) -> list[fx.Node]:
        """Return who reads a result or a view of it, but for what quantizes it."""
        return [reader for reader in users(result) if reader not in rows.made]


@functools.cache
def _forward(kind: str, power_of_two: bool, y: torch.Size | None) -> Callable[..., tuple[Tensor, ...]]:
    """A function of gate and up: q and scale, and y in this shape."""

    def run(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        *rows, stored = quantize_glu(gate, up, kind, power_of_two, y is not None)
        return tuple(rows) if y is None else (*rows, stored.view(y))

    return run


@functools.cache
def _backward(
    kind: str, power_of_two: bool, shapes: tuple[torch.Size | None, ...], *, together: bool
) -> Callable[..., tuple[Tensor, ...]]:
    """A function of dy, gate and up: q and scale of dgate and of dup, or of both ``together``, and dgate, dup and y where a
    shape is given for them."""

    def run(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        made = quantize_glu_bwd(dy, gate, up, kind, power_of_two, [shape is not None for shape in shapes], together)
        stored = zip(made[4:], shapes, strict=True)
        return *made[: 2 if together else 4], *(value.view(shape) for value, shape in stored if shape is not None)

    return run
