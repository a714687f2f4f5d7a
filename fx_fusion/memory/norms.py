"""Norms behind a residual add in a joint graph: the op, or the launch that AOTAutograd traced in its place.

Such a norm has two results, y and the sum h. The backward reads h, and a product reads y: from h alone y
can be had again, which is a norm without the add.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fx_fusion.kernels.add_layer_norm import add_layer_norm
from fx_fusion.kernels.add_rms_norm import add_rms_norm
from fx_fusion.kernels.layer_norm import layer_norm
from fx_fusion.kernels.norms.row_norm_kernels import row_norm_fwd_kernel
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.memory.joint_graph import JointGraph
from fx_fusion.ops.launch import qualified_name
from fx_fusion.torch_internals.traced_kernels import launched

_FORWARD = qualified_name(row_norm_fwd_kernel)
_WITHOUT_ADD = {add_rms_norm.overload: rms_norm, add_layer_norm.overload: layer_norm}


@dataclass(frozen=True)
class NormOfASum:
    """``y = norm(h)``: nodes of the joint graph; ``norm``: y from h, weight and bias (those that there are)."""

    y: fx.Node
    operands: tuple[fx.Node, ...]
    norm: Callable[..., Tensor]

    @property
    def h(self) -> fx.Node:
        return self.operands[0]


def norms_of_sums(joint: JointGraph) -> Iterator[NormOfASum]:
    """Every norm behind an add."""
    for node in joint.forward:
        found = _of_op(node) or _of_launch(node)
        if found is not None:
            yield found


def _of_op(node: fx.Node) -> NormOfASum | None:
    op = _WITHOUT_ADD.get(node.target)
    y, h = (_result(node, i) for i in (0, 1))
    if op is None or y is None or h is None:
        return None
    _, _, *rest = node.args
    tensors = rest[: op.parameters.index("eps") - 1]
    return _with(op, y, h, tensors, rest[len(tensors) :])


def _of_launch(node: fx.Node) -> NormOfASum | None:
    found = launched(node)
    if found is None or qualified_name(found[0]) != _FORWARD or not found[1]["HAS_RES"]:
        return None
    given: Mapping[str, Any] = found[1]
    y, h = _result(node, "y_ptr"), _result(node, "h_ptr")
    if y is None or h is None:
        return None
    weight, bias = (given[f"{n}_ptr"] if given[f"HAS_{name}"] else None for n, name in (("w", "WEIGHT"), ("b", "BIAS")))
    if given["CENTER"]:
        return _with(layer_norm, y, h, [weight, bias], [given["eps"], given["ROUND_FIRST"]])
    return _with(rms_norm, y, h, [weight], [given["eps"], given["offset"], given["ROUND_FIRST"]])


def _with(op: Any, y: fx.Node, h: fx.Node, tensors: list[Any], constants: list[Any]) -> NormOfASum:
    there = [t is not None for t in tensors]

    def norm(x: Tensor, *given: Tensor) -> Tensor:
        rest = iter(given)
        return op(x, *(next(rest) if known else None for known in there), *constants)

    return NormOfASum(y, (h, *(t for t in tensors if t is not None)), norm)


def _result(node: fx.Node, key: int | str) -> fx.Node | None:
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == key), None)
