"""Gated linear units of a joint graph whose results are multiplied in float8: their kernels write them so.

Where the products of a linear are written anew, what they multiply is quantised in a kernel of its own, which reads what the
kernel before it has just stored. For SwiGLU and GEGLU one kernel does both; the backward's hands out y as well, which the
gradient of the next weight multiplies.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.float8.inserter import Inserter, erase_unread
from fx_fusion.float8.products import source
from fx_fusion.float8.writer import Quantised
from fx_fusion.kernels.float8.glu import quantise_glu, quantise_glu_bwd
from fx_fusion.kernels.geglu import geglu
from fx_fusion.kernels.lib.glu import ACTIVATIONS, glu_bwd_kernel, glu_fwd_kernel
from fx_fusion.kernels.swiglu import swiglu
from fx_fusion.memory.joint_graph import JointGraph, users
from fx_fusion.ops.launch import qualified_name
from fx_fusion.torch_internals.partitioner import checkpoint_of, is_fusible
from fx_fusion.torch_internals.traced_kernels import launched

_FORWARD, _BACKWARD = (swiglu.overload, geglu.overload), (swiglu.backward, geglu.backward)
_KINDS = {number.value: kind for kind, number in ACTIVATIONS.items()}
_FORWARD_KERNEL, _BACKWARD_KERNEL = qualified_name(glu_fwd_kernel), qualified_name(glu_bwd_kernel)


@dataclass(frozen=True)
class Gate:
    """``y = a(gate) * up``, or its backward: an op or the launch that AOTAutograd traced of it.

    Attributes:
        node: it.
        operands: gate and up; of a backward dy before them.
        kind: which a: a key of ``ACTIVATIONS``.
        result: which of its results was asked for: 0, or of a backward 0 for dgate, 1 for dup.
    """

    node: fx.Node
    operands: tuple[fx.Node, ...]
    kind: str
    result: int

    @property
    def backward(self) -> bool:
        return len(self.operands) == 3

    @property
    def of(self) -> tuple[fx.Node, fx.Node, str]:
        """What is the same for a forward and its backward."""
        gate, up = map(source, self.operands[-2:])
        return gate, up, self.kind


def gate_of(result: fx.Node) -> Gate | None:
    """The gated linear unit, or the backward of one, that a node is a result of."""
    if result.target in _FORWARD:
        gate, up, kind = (*result.args, "silu")[:3]
        return Gate(result, (gate, up), kind, 0)  # type: ignore[arg-type]
    if result.target is not operator.getitem:
        return None
    node, key = result.args
    assert isinstance(node, fx.Node)
    if node.target in _BACKWARD:
        dy, gate, up, kind = (*node.args[:-1], "silu")[:4]
        return Gate(node, (dy, gate, up), kind, key)  # type: ignore[arg-type]
    found = launched(node)
    name = "" if found is None else qualified_name(found[0])
    if found is None or name not in (_FORWARD_KERNEL, _BACKWARD_KERNEL):
        return None
    backward = name == _BACKWARD_KERNEL
    names = ("dy_ptr", "gate_ptr", "up_ptr")[not backward :]
    results = ("dgate_ptr", "dup_ptr") if backward else ("y_ptr",)
    return Gate(node, tuple(found[1][n] for n in names), _KINDS[found[1]["KIND"]], results.index(key))  # type: ignore[arg-type]


def quantise_in_gates(
    inserter: Inserter, quantised: Mapping[tuple[fx.Node, Any], Quantised], power_of_two: bool
) -> None:  # fmt: skip
    """Let the gated linear units quantise what was ``quantised`` of their results behind them, backwards only where both of
    their results were. It is known by what it is a reshape of and the length of its rows."""
    rows = {result: of for (result, width), of in quantised.items() if _is_whole(result, width)}
    gates = {result: gate for result in rows if (gate := gate_of(result)) is not None}
    if not gates:
        return
    joint = JointGraph(inserter.graph)
    writer = _Gates(inserter, joint, power_of_two)
    backwards = {n: both for n, both in _of_both_results(gates).items() if _may_be_written(*(rows[r] for r in both))}
    behind: dict[tuple[fx.Node, fx.Node, str], list[fx.Node]] = {}
    for node, (dgate, _) in backwards.items():
        behind.setdefault(gates[dgate].of, []).append(node)
    ys: dict[fx.Node, fx.Node] = {}
    for y, gate in gates.items():
        if gate.backward or checkpoint_of(gate.node) != checkpoint_of(rows[y].q):
            continue  # what a checkpoint says of y it would not say of the node that stands for it
        readers, own = joint.readers(y), behind.get(gate.of, [])
        handed_out = len(own) == 1 and own[0] not in ys and not joint.needs(own[0], readers)
        if (readers and not handed_out) or writer.is_recomputed_from(y, rows[y]):
            continue  # y would be saved where it was not, or computed once more
        made = writer.forward(gate, y, rows[y])
        if readers:
            ys[own[0]] = made
    for node, (dgate, dup) in backwards.items():
        writer.backward(gates[dgate], (dgate, dup), (rows[dgate], rows[dup]), ys.get(node))
    erase_unread(inserter.graph, writer.unread)


def _of_both_results(gates: Mapping[fx.Node, Gate]) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """The backwards of which both dgate and dup are there, and these."""
    by_place = {(gate.node, gate.result): result for result, gate in gates.items() if gate.backward}
    return {node: (dgate, by_place[node, 1]) for (node, i), dgate in by_place.items() if i == 0 and (node, 1) in by_place}


def _may_be_written(of_dgate: Quantised, of_dup: Quantised) -> bool:
    """Whether rows of dgate and dup are matrices by themselves, or one of them both, dgate first."""
    return of_dgate.beside == of_dup.beside and of_dgate.beside[1:] in ((), (of_dgate.q, of_dup.q))


def _is_whole(result: fx.Node, width: Any) -> bool:
    """Whether rows of this length are those of a node, of known sizes."""
    shape = result.meta["val"].shape
    return all(isinstance(size, int) for size in shape) and shape[-1] == width


class _Gates:
    """Writes gated linear units of one graph anew."""

    def __init__(self, inserter: Inserter, joint: JointGraph, power_of_two: bool):
        self._inserter, self._joint, self._power_of_two = inserter, joint, power_of_two
        self.unread: list[fx.Node] = []  # what may be read by nothing now

    def is_recomputed_from(self, y: fx.Node, rows: Quantised) -> bool:
        """Whether kernels of Inductor's read y in the forward: what they make may be computed again, from gate and up."""
        return any(is_fusible(n) for n in self._other_readers(y, rows) if n not in self._joint.backward)

    def forward(self, gate: Gate, y: fx.Node, rows: Quantised) -> fx.Node:
        """Quantise y where it is made. Returns y, which is stored where the forward reads it otherwise, and then another
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

    def backward(
        self, gate: Gate, results: tuple[fx.Node, fx.Node], rows: tuple[Quantised, Quantised], y: fx.Node | None
    ) -> None:
        """Quantise dgate and dup where they are made, store them where something else reads them, and hand out y, if it is
        given, to those of the backward that read it."""
        joint = self._joint
        stored = [*(r if self._other_readers(r, q) else None for r, q in zip(results, rows, strict=True)), y]
        shapes = tuple(None if node is None else node.meta["val"].shape for node in stored)
        kept = [node for node in stored if node is not None]
        quantised = [n for r in rows for n in (r.q, r.scale)]
        if rows[0].beside:
            quantised = [rows[0].beside[0], rows[0].scale]
        function = _backward(gate.kind, self._power_of_two, shapes, together=bool(rows[0].beside))
        made = self._inserter.insert(function, gate.operands, gate.node, like=gate.node)
        joint.is_of_backward(*made)
        found = made[len(made) - len(quantised) - len(kept) :]
        for node, again in zip(quantised, found, strict=False):
            node.replace_all_uses_with(again)
        self.unread += (*rows[0].made, *rows[1].made)
        for node, again in zip(kept, found[len(quantised) :], strict=True):
            if node is y:
                joint.read_instead(node, again)
            else:
                node.replace_all_uses_with(again)
        self.unread += [*results, *kept]

    def _other_readers(self, result: fx.Node, rows: Quantised) -> list[fx.Node]:
        """Who reads a result or a view of it, but for what quantises it."""
        return [reader for reader in users(result) if reader not in rows.made]


@functools.cache
def _forward(kind: str, power_of_two: bool, y: torch.Size | None) -> Callable[..., tuple[Tensor, ...]]:
    """A function of gate and up: q and scale, and y in this shape."""

    def run(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        *rows, stored = quantise_glu(gate, up, kind, power_of_two, y is not None)
        return tuple(rows) if y is None else (*rows, stored.view(y))

    return run


@functools.cache
def _backward(
    kind: str, power_of_two: bool, shapes: tuple[torch.Size | None, ...], *, together: bool
) -> Callable[..., tuple[Tensor, ...]]:
    """A function of dy, gate and up: q and scale of dgate and of dup, or of both ``together``, and dgate, dup and y where a
    shape is given for them."""

    def run(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        made = quantise_glu_bwd(dy, gate, up, kind, power_of_two, [shape is not None for shape in shapes], together)
        stored = zip(made[4:], shapes, strict=True)
        return *made[: 2 if together else 4], *(value.view(shape) for value, shape in stored if shape is not None)

    return run
