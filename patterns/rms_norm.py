"""``x / rms(x) * weight`` in every cast order of the model zoo -> kernels/rms_norm.py."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import NearMiss
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.view import View
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.patterns.sites.lengths import (
    HINTS,
    is_centered,
    is_of_the_mean,
    is_scaled_by_its_width,
    over_length_plus_eps,
)

# round_first: the normalized value is cast to x's dtype, then multiplied (Llama); otherwise everything is float32 until
# the last cast (Gemma with offset 1, OLMo-2 with offset 0).
CAST_ORDERS = (
    {"offset": 0.0, "round_first": True},
    {"offset": 0.0, "round_first": False},
    {"offset": 1.0, "round_first": False},
    {"offset": 0.0, "round_first": False, "weight": None},
)


def scaled(normed, x, weight, offset, round_first):
    """The end of every spelling: the weight, and the cast back."""
    if weight is None:
        return normed.to(x.dtype)
    if round_first:
        return weight * normed.to(x.dtype)
    return (normed * (offset + weight.float() if offset else weight.float())).to(x.dtype)


def pow_mean_rsqrt(x, weight, eps, offset, round_first):
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return scaled(normed, x, weight, offset, round_first)


# A spelling returns NotImplemented for a cast order that it doesn't have.
# In float32 the three factors may come in any order. No canonical form merges these: it would have to re-associate a
# product, which rounds differently in lower precision.
def weight_first(x, weight, eps, offset, round_first):
    if weight is None or round_first:
        return NotImplemented
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * (offset + weight.float() if offset else weight.float()) * rstd).to(x.dtype)


def weight_into_rstd(x, weight, eps, offset, round_first):
    if weight is None or round_first:
        return NotImplemented
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * (rstd * (offset + weight.float() if offset else weight.float()))).to(x.dtype)


def torch_rms_norm(x, weight, eps, offset, round_first):
    """``F.rms_norm`` rounds once, at the end."""
    if round_first or offset:
        return NotImplemented
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def unread(view: View) -> Iterator[NearMiss]:
    """Divisions by the length of rows that are nearly an RMSNorm. An L2 normalization without a scale is none: RMSNorm is
    ``width ** 0.5`` times as large."""
    for node in view.graph.nodes:
        if view.name(node) == "normalize" and is_scaled_by_its_width(view, node):
            reason = "F.normalize divides by max(length, eps): RMSNorm adds eps under the root; write F.rms_norm"
            yield NearMiss("rms_norm", node, node, reason)
        found = over_length_plus_eps(view, node)
        if found is None or is_centered(view, found.x):
            continue
        if is_of_the_mean(view, found.length) or is_scaled_by_its_width(view, node):
            reason = "eps is added outside of the root: RMSNorm adds it under the root; write F.rms_norm"
            yield NearMiss("rms_norm", node, found.divisor, reason)


def guard(x, weight, eps, offset, round_first):
    return wrong_dtype(x=x, weight=weight)


def why_keep(x, weight, eps, offset, round_first):
    return too_small(x, symbolic=True)


FUSION = Fusion(
    name="rms_norm",
    instead="F.rms_norm(x, (n,), weight, eps)",
    hints=HINTS,
    pattern=pow_mean_rsqrt,
    spellings=(torch_rms_norm, weight_first, weight_into_rstd),
    inputs={"x": "... n", "weight": "n", "eps": 1e-6},
    variants=CAST_ORDERS,
    unread=unread,
    parallel=("...",),
    kernel=rms_norm,
    guard=guard,
    why_keep=why_keep,
    traffic=("5*m*n*bytes", "Piecewise((5*m*n*bytes, (m >= 4096) & (m >= 2*n)), (7*m*n*bytes, True))"),
    cases=(
        case("one_element", m=1, n=1, bench=False),
        case("odd", m=3, n=781, bench=False),
        case("wide", m=3, n=20001, bench=False, statics={"round_first": True}),
        case("head", m=262144, n=128, statics={"round_first": True}),
        case("llama_1b", m=16384, n=2048),
        case("llama_8b", m=16384, n=4096),
    ),
    source="Zhang and Sennrich 2019, arXiv:1910.07467",
)
