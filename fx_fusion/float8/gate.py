"""A gated linear unit in a joint graph: the op, or the launch that AOTAutograd traced of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from fx_fusion.float8.products import source
from fx_fusion.kernels.geglu import geglu
from fx_fusion.kernels.lib.glu import ACTIVATIONS, glu_bwd_kernel, glu_fwd_kernel
from fx_fusion.kernels.swiglu import swiglu
from fx_fusion.ops.launch import qualified_name
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
        """Return what is the same for a forward and its backward."""
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
