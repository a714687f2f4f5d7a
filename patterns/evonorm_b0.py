"""EvoNorm-B0, as timm writes it and as the paper does, in training and evaluation -> kernels/evonorm_b0.py.

In training the batch variance also updates a buffer: the op returns it, and the update in the graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import too_many_positions, wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.terms import example, is_scalar, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.kernels.evonorm_b0 import evonorm_b0
from fx_fusion.patterns.sites.evonorm import (
    affine_end,
    casts_to,
    computed_in,
    deviation,
    only_user,
    other_operand,
    per_channel,
)


def over_larger_deviation(x, v, weight, bias, running_var, eps):
    var = x.float().var((0, 2, 3), unbiased=False)
    v, weight, bias = (t.view(1, -1, 1, 1).to(x.dtype) for t in (v, weight, bias))
    used = var if running_var is None else running_var.float()
    left = used.add(eps).sqrt().to(x.dtype).view(1, -1, 1, 1)
    right = x * v + x.float().var((2, 3), unbiased=False, keepdim=True).add(eps).sqrt().to(x.dtype)
    return x / left.max(right) * weight + bias, var.detach()


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        if not _is_maximum(view, node) or example(node).dim() != 4:
            continue
        nodes: set[fx.Node] = {node}
        try:
            yield _read(view, node, nodes)
        except NotThis as why:
            if len(nodes) > 2:  # a maximum that x is divided by, beside v x + something
                yield NearMiss("evonorm_b0", node, why.node or node, str(why))


def _is_maximum(view: View, node: fx.Node) -> bool:
    """The larger of two tensors; ``max`` with a dim is something else."""
    named = view.name(node) == "maximum" or node.target in ("max", torch.max)
    return named and len(node.args) == 2 and not node.kwargs and all(is_tensor(a) for a in node.args)


def _read(view: View, larger: fx.Node, nodes: set[fx.Node]) -> Match:
    ratio = only_user(view, larger, ("div",))
    x, divisor = binary(view, ratio)
    if divisor is not larger or not is_tensor(x):
        raise NotThis(ratio, "the larger deviation is divided, it does not divide")
    channels, dtype = example(x).shape[1], example(x).dtype
    nodes.add(ratio)
    left, right = larger.args
    if _product_with(view, left, x) is not None:
        left, right = right, left
    scaled = _product_with(view, right, x)
    if scaled is None:
        raise NotThis(right, "expected v x plus the deviation of each image")
    nodes |= {right, scaled}
    v = next(a for a in binary(view, scaled) if not view.same_value(a, x))
    v = per_channel(view, v, channels, dtype, nodes)
    computed_in(dtype, scaled, right, larger, ratio)
    of_image = deviation(view, other_operand(view, right, scaled), x)
    if of_image.groups is not None or of_image.dims != (-2, -1) or of_image.correction != 0:
        raise NotThis(of_image.var, "expected the (biased) variance of each channel of an image")
    end = affine_end(view, ratio, channels)
    nodes |= of_image.nodes | end.nodes
    inputs: dict[str, Any] = {"x": x, "v": v, "weight": end.weight, "bias": end.bias}
    outputs = [end.root]
    running = _running(view, left, channels, dtype)
    if running is not None:
        inputs["running_var"], eps, more = running
    else:
        of_batch = deviation(view, left, x)
        if of_batch.groups is not None or of_batch.dims != (-4, -2, -1) or of_batch.correction != 0:
            raise NotThis(of_batch.var, "expected the (biased) variance of each channel over the batch")
        eps, more = of_batch.eps, of_batch.nodes
        for user in of_batch.var.users:
            outside = user not in more
            if outside and view.effects.region[user][0] and (user.op, user.target) != ("call_method", "detach"):
                raise NotThis(user, f"{user.name} uses the batch variance; expected its update, without a gradient")
            if outside and of_batch.var not in outputs:
                outputs.append(of_batch.var)
    if eps != of_image.eps:
        raise NotThis(larger, f"eps is {eps} for the batch and {of_image.eps} for an image")
    everything = frozenset(nodes | more)
    return Match("evonorm_b0", tuple(outputs), everything, {**inputs, "eps": eps}, rounded=casts_to(dtype, everything))


def _product_with(view: View, total: Any, x: fx.Node) -> fx.Node | None:
    """The operand of a sum that is a product of x and something else."""
    if not isinstance(total, fx.Node) or view.name(total) != "add":
        return None
    for operand in binary(view, total):
        if isinstance(operand, fx.Node) and view.name(operand) == "mul":
            is_x = [view.same_value(a, x) for a in binary(view, operand) if is_tensor(a)]
            if len(is_x) == 2 and is_x[0] != is_x[1]:
                return operand
    return None


def _running(
    view: View, node: fx.Node, channels: Any, dtype: torch.dtype
) -> tuple[fx.Node, Any, set[fx.Node]] | None:  # fmt: skip
    """``sqrt(running_var + eps)``, rounded to ``dtype``, as one number a channel: the buffer, eps, the nodes; None if it
    is no buffer."""
    nodes: set[fx.Node] = set()
    if view.name(node) in ("expand", "expand_as"):
        nodes.add(node)
        node = node.args[0]
    try:
        root = per_channel(view, node, channels, dtype, nodes)
    except NotThis:
        return None
    if view.name(root) != "sqrt" or not root.args or view.name(root.args[0]) != "add":
        return None
    total = root.args[0]
    operands = binary(view, total)
    eps = next((o for o in operands if is_scalar(o)), None)
    running = next((o for o in operands if is_tensor(o)), None)
    if eps is None or running is None or example(running).numel() != channels:
        return None
    computed_in(torch.float32, root, total)
    exact = example(running).dim() > 2
    source = per_channel(view, running, channels, example(running).dtype, nodes) if exact else view.source(running).base
    if source.op not in ("placeholder", "get_attr") or example(source).requires_grad:
        return None
    return running, eps, nodes | {root, total}


def guard(x, v, weight, bias, running_var, eps):
    return wrong_dtype(x=x, v=v, weight=weight, bias=bias, running_var=running_var) or too_many_positions(x)


def why_keep(x, v, weight, bias, running_var, eps):
    return too_small(x)


FUSION = Fusion(
    name="evonorm_b0",
    pattern=over_larger_deviation,
    inputs={"x": "b c h w", "v": "(c)", "weight": "(c)", "bias": "(c)", "running_var": "(c)", "eps": 1e-3},
    images=("x",),
    variants=({"running_var": None},),
    find=find,
    kernel=evonorm_b0,
    guard=guard,
    why_keep=why_keep,
    traffic=("8*b*c*h*w*bytes", "14*b*c*h*w*bytes"),
    cases=(
        case("odd", b=3, c=6, h=5, w=7, bench=False),
        case("one_image", b=1, c=3, h=20, w=21, bench=False),
        case("small_16", b=16, c=64, h=28, w=28),
        case("small_32", b=32, c=64, h=28, w=28),
        case("small_64", b=64, c=64, h=28, w=28),
        case("stage_1", b=64, c=256, h=56, w=56),
        case("stage_2", b=128, c=512, h=28, w=28),
    ),
    source="Liu et al. 2020, arXiv:2004.02967, table 2",
)
