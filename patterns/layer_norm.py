"""LayerNorm, called or written out -> kernels/layer_norm.py."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import mixed_on_cpu, wrong_dtype
from fx_fusion.fusion.match import NearMiss
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.view import View
from fx_fusion.kernels.layer_norm import layer_norm
from fx_fusion.patterns.sites.lengths import is_centered, over_length_plus_eps

# round_first: the normalized value is cast to x's dtype before the weight (DeBERTa); otherwise one cast at the end.
VARIANTS = (
    {"round_first": False},
    {"round_first": False, "bias": None},
    {"round_first": False, "weight": None, "bias": None},
    {"round_first": True},
    {"round_first": True, "bias": None},
)


def in_float32(x, weight, bias, eps, round_first):
    """OLMo, and models that keep their norms in float32: casts around the call. What is computed on a CPU, too, where
    PyTorch sums the gradients of weight and bias in 16 bits if x has 16."""
    if round_first:
        return affine(centered(x) * rstd_of(x, eps), x, weight, bias, round_first)
    w, b = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x.float(), (x.shape[-1],), w, b, eps).to(x.dtype)


def torch_layer_norm(x, weight, bias, eps, round_first):
    return NotImplemented if round_first else F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def centered(x):
    return x.float() - x.float().mean(-1, keepdim=True)


def rstd_of(x, eps):
    return torch.rsqrt(centered(x).pow(2).mean(-1, keepdim=True) + eps)


def affine(normed, x, weight, bias, round_first):
    """The end of every written-out spelling: weight, bias, and the cast back."""
    if round_first:
        y = weight * normed.to(x.dtype)
        return y if bias is None else y + bias
    y = normed if weight is None else normed * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def mean_of_squares(x, weight, bias, eps, round_first):
    if round_first:
        return NotImplemented
    return affine(centered(x) * rstd_of(x, eps), x, weight, bias, round_first)


def variance(x, weight, bias, eps, round_first):
    rstd = torch.rsqrt(x.float().var(-1, unbiased=False, keepdim=True) + eps)
    return affine(centered(x) * rstd, x, weight, bias, round_first)


def unread(view: View) -> Iterator[NearMiss]:
    """Norms over several dims, and by another deviation."""
    for node in view.graph.nodes:
        bound = view.arguments_of(node, "layer_norm")
        if bound is not None and isinstance(bound["normalized_shape"], (tuple, list)) and len(bound["normalized_shape"]) > 1:
            dims = len(bound["normalized_shape"])
            yield NearMiss("layer_norm", node, node, f"it is over the last {dims} dims; the kernel is over one")
        found = over_length_plus_eps(view, node)
        if found is not None and is_centered(view, found.x):
            reason = "eps is added to the deviation: LayerNorm adds it to the variance, under the root; write F.layer_norm"
            yield NearMiss("layer_norm", node, found.divisor, reason)


def guard(x, weight, bias, eps, round_first):
    return wrong_dtype(x=x, weight=weight, bias=bias) or mixed_on_cpu(x, weight, bias)


def why_keep(x, weight, bias, eps, round_first):
    return too_small(x, symbolic=True)


FUSION = Fusion(
    name="layer_norm",
    instead="F.layer_norm(x, (n,), weight, bias, eps)",
    pattern=in_float32,
    spellings=(torch_layer_norm, mean_of_squares, variance),
    inputs={"x": "... n", "weight": "n", "bias": "n", "eps": 1e-5},
    variants=VARIANTS,
    unread=unread,
    parallel=("...",),
    kernel=layer_norm,
    guard=guard,
    why_keep=why_keep,
    traffic=("5*m*n*bytes", "Piecewise((5*m*n*bytes, (m >= 4096) & (m >= 2*n)), (7*m*n*bytes, True))"),
    cases=(
        case("one_element", m=1, n=1, bench=False),
        case("odd", m=3, n=781, bench=False),
        case("wide", m=3, n=20001, bench=False, statics={"round_first": True}),
        case("bert_base", m=2048, n=768),
        case("gpt2_medium", m=16384, n=1024),
        case("gpt_j", m=16384, n=4096),
        case("long", m=65536, n=4096),
    ),
    source="Ba et al. 2016, arXiv:1607.06450",
)
