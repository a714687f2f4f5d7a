"""Norms in a joint graph whose result y the backward can have again from h, which it reads anyway.

The norm's own backward hands y out where AOTAutograd traced its launch and nothing that it waits for reads y. Otherwise y
is a norm of h that is launched once more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.kernels.add_layer_norm import add_layer_norm
from fx_fusion.kernels.add_rms_norm import add_rms_norm
from fx_fusion.kernels.layer_norm import layer_norm
from fx_fusion.kernels.norms.row_norm_kernels import row_norm_bwd_kernel, row_norm_fwd_kernel
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.memory.joint_graph import JointGraph, base
from fx_fusion.ops.launch import qualified_name
from fx_fusion.torch_internals.partitioner import compute_again
from fx_fusion.torch_internals.traced_kernels import functional_graph, insert, launch_with_result, launched, memory_for

FORWARD, _BACKWARD = qualified_name(row_norm_fwd_kernel), qualified_name(row_norm_bwd_kernel)
_WITHOUT_ADD = {add_rms_norm.overload: rms_norm, add_layer_norm.overload: layer_norm}


@dataclass(frozen=True)
class Norm:
    """``y = norm(h)``: nodes of the joint graph.

    Attributes:
        operands: h, weight and bias (those that there are).
        norm: y from the operands.
        behind_add: whether h is a sum that the same node made.
        bias: the bias, if there is one.
        backward: the launch of its backward, if it was traced: it can hand out y.
    """

    y: fx.Node
    operands: tuple[fx.Node, ...]
    norm: Callable[..., Tensor]
    behind_add: bool
    bias: fx.Node | None = None
    backward: fx.Node | None = None

    @property
    def h(self) -> fx.Node:
        return self.operands[0]


def norms(joint: JointGraph) -> Iterator[Norm]:
    """Every norm whose y can be had again so."""
    for node in joint.forward:
        found = _of_op(node) or _of_launch(joint, node)
        if found is not None:
            yield found


def _of_op(node: fx.Node) -> Norm | None:
    op = _WITHOUT_ADD.get(node.target)
    y, h = (result_of(node, i) for i in (0, 1))
    if op is None or y is None or h is None:
        return None
    _, _, *rest = node.args
    tensors = rest[: op.parameters.index("eps") - 1]
    return Norm(y, *_again(op, h, tensors, rest[len(tensors) :], y.meta["val"].dtype), behind_add=True)


def _of_launch(joint: JointGraph, node: fx.Node) -> Norm | None:
    found = launched(node)
    if found is None or qualified_name(found[0]) != FORWARD:
        return None
    given: Mapping[str, Any] = found[1]
    y = result_of(node, "y_ptr")
    h = result_of(node, "h_ptr") if given["HAS_RES"] else given["x_ptr"]
    if y is None or h is None:
        return None
    weight, bias = (given[f"{n}_ptr"] if given[f"HAS_{name}"] else None for n, name in (("w", "WEIGHT"), ("b", "BIAS")))
    dtype = y.meta["val"].dtype
    if given["CENTER"]:
        again = _again(layer_norm, h, [weight, bias], [given["eps"], given["ROUND_FIRST"]], dtype)
    else:
        again = _again(rms_norm, h, [weight], [given["eps"], given["offset"], given["ROUND_FIRST"]], dtype)
    return Norm(y, *again, given["HAS_RES"], bias, _backward(joint, result_of(node, "stats_ptr")))


def _again(
    op: Any, h: fx.Node, tensors: list[Any], constants: list[Any], dtype: torch.dtype
) -> tuple[tuple[fx.Node, ...], Callable[..., Tensor]]:
    there = [t is not None for t in tensors]

    def norm(x: Tensor, *given: Tensor) -> Tensor:
        rest = iter(given)
        return op(x, *(next(rest) if known else None for known in there), *constants).to(dtype)

    return (h, *(t for t in tensors if t is not None)), norm


def result_of(node: fx.Node, key: int | str) -> fx.Node | None:
    """The node that takes one of several results, by its number or, of a launch, by the name of its argument."""
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == key), None)


def _backward(joint: JointGraph, stats: fx.Node | None) -> fx.Node | None:
    """The launch that reads the statistics, if it is the only one."""
    readers = joint.readers(stats) if stats is not None else []
    found = launched(readers[0]) if len(readers) == 1 else None
    return readers[0] if found is not None and qualified_name(found[0]) == _BACKWARD else None


# -- having y again -----------------------------------------------------------------------------------------------------
def is_handed_out(joint: JointGraph, norm: Norm) -> bool:
    """Return True if the norm's backward can hand out y: none of y's readers has to run before it, and the bias is as it
    was."""
    if norm.backward is None or (norm.bias is not None and joint.is_lost(base(norm.bias))):
        return False
    return not joint.needs(norm.backward, joint.readers(norm.y))


def have_again(joint: JointGraph, norm: Norm) -> None:
    """Let the backward read y from the norm's own backward, or from a norm that is launched there."""
    if norm.backward is not None and is_handed_out(joint, norm):
        joint.read_instead(norm.y, _handed_out(joint, norm, norm.backward))
        return
    made = insert(functional_graph(norm.norm, [n.meta["val"] for n in norm.operands]), joint.graph, norm.operands, norm.h)
    for node in (*made, *joint.read_instead(norm.y, made[-1])):
        compute_again(node)


def _handed_out(joint: JointGraph, norm: Norm, backward: fx.Node) -> fx.Node:
    memory = memory_for(norm.y.meta["val"], backward.kwargs["kwargs"]["h_ptr"], backward)  # type: ignore[index]
    bias = {} if norm.bias is None else {"HAS_BIAS": True, "b_ptr": norm.bias}
    launch, y = launch_with_result(backward, "y_ptr", memory, {"STORE_Y": True, **bias})
    joint.is_of_backward(memory, launch, y)
    return y
