"""EvoNorm-S0 (and S0a), as timm writes it and as the paper does -> kernels/evonorm_s0.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import too_many_positions, wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.kernels.evonorm_s0 import evonorm_s0
from fx_fusion.patterns.sites.evonorm import (
    affine_end,
    casts_to,
    computed_in,
    deviation,
    only_user,
    other_operand,
    per_channel,
)


def swish_over_group_deviation(x, groups, v, weight, bias, eps, correction):
    v, weight, bias = (t.view(1, -1, *(1,) * (x.dim() - 2)).to(x.dtype) for t in (v, weight, bias))
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2] * x.shape[3])
    deviation = grouped.float().var(2, correction=correction, keepdim=True).add(eps).sqrt().to(x.dtype)
    deviation = deviation.expand(grouped.shape).reshape(x.shape)
    return x * (x * v).sigmoid() / deviation * weight + bias


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        if view.name(node) != "sigmoid" or example(node) is None or example(node).dim() != 4:
            continue
        nodes: set[fx.Node] = {node}
        try:
            yield _read(view, node, nodes)
        except NotThis as why:
            if len(nodes) > 3:  # x * sigmoid(v x) with one v a channel
                yield NearMiss("evonorm_s0", node, why.node or node, str(why))


def _read(view: View, sigmoid: fx.Node, nodes: set[fx.Node]) -> Match:
    scaled = view.arguments_of(sigmoid, "sigmoid")["input"]  # type: ignore[index]
    if view.name(scaled) != "mul" or not all(map(is_tensor, binary(view, scaled))) or len(scaled.users) != 1:
        raise NotThis(sigmoid, "not a sigmoid of v x")
    gated = only_user(view, sigmoid, ("mul",))
    x = other_operand(view, gated, sigmoid)
    others = [a for a in binary(view, scaled) if not view.same_value(a, x)]
    if len(others) != 1 or example(others[0]).numel() != example(x).shape[1]:
        raise NotThis(scaled, "not a sigmoid of v x")
    channels, dtype = example(x).shape[1], example(x).dtype
    v = per_channel(view, others[0], channels, dtype, nodes)
    nodes |= {scaled, gated}
    ratio = only_user(view, gated, ("div",))
    above, below = binary(view, ratio)
    if above is not gated or not is_tensor(below):
        raise NotThis(ratio, "x sigmoid(v x) divides, it is not divided")
    nodes.add(ratio)
    computed_in(dtype, scaled, sigmoid, gated, ratio)
    found = deviation(view, below, x)
    if found.groups is None:
        raise NotThis(found.var, f"the variance is over {found.dims} of x; expected groups of channels")
    end = affine_end(view, ratio, channels)
    inputs: dict[str, Any] = {
        "x": x, "groups": found.groups, "v": v, "weight": end.weight, "bias": end.bias, "eps": found.eps,
        "correction": found.correction,
    }  # fmt: skip
    everything = frozenset(nodes | found.nodes | end.nodes)
    return Match("evonorm_s0", (end.root,), everything, inputs, rounded=casts_to(dtype, everything))


def guard(x, groups, v, weight, bias, eps, correction):
    if x.shape[1] % groups:
        return f"{x.shape[1]} channels are not whole groups of {groups}"
    return wrong_dtype(x=x, v=v, weight=weight, bias=bias) or too_many_positions(x)


def why_keep(x, groups, v, weight, bias, eps, correction):
    return too_small(x)


FUSION = Fusion(
    name="evonorm_s0",
    pattern=swish_over_group_deviation,
    inputs={"x": "b c h w", "groups": 2, "v": "(c)", "weight": "(c)", "bias": "(c)", "eps": 1e-5, "correction": 0},
    images=("x",),
    find=find,
    kernel=evonorm_s0,
    guard=guard,
    why_keep=why_keep,
    traffic=("5*b*c*h*w*bytes", "12*b*c*h*w*bytes"),
    before=("swish",),
    cases=(
        case("two_elements", b=1, c=4, h=1, w=1, bench=False),
        case("odd", b=3, c=6, h=5, w=7, bench=False),
        case("large_group", b=1, c=4, h=90, w=95, bench=False),
        case("sample", b=3, c=6, h=5, w=7, bench=False, scalars={"correction": 1}),
        case("small_16", b=16, c=64, h=28, w=28, scalars={"groups": 32}),
        case("small_32", b=32, c=64, h=28, w=28, scalars={"groups": 32}),
        case("small_64", b=64, c=64, h=28, w=28, scalars={"groups": 32}),
        case("stage_1", b=64, c=256, h=56, w=56, scalars={"groups": 32}),
        case("stage_2", b=128, c=512, h=28, w=28, scalars={"groups": 32}),
    ),
    source="Liu et al. 2020, arXiv:2004.02967, table 2",
)
