"""``h = x + residual; y = layer_norm(h)``, both used -> kernels/add_layer_norm.py."""

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import unlike_sum
from fx_fusion.graph.size_hints import too_small
from fx_fusion.kernels.add_layer_norm import add_layer_norm
from fx_fusion.patterns import layer_norm


def behind_an_add(norm):
    """A spelling of the norm -> the same spelling of the sum's norm."""

    def add_then_norm(x, residual, weight, bias, eps, round_first):
        h = x + residual
        y = norm(h, weight, bias, eps, round_first)
        return y if y is NotImplemented else (y, h)

    add_then_norm.__name__ = f"add_then_{norm.__name__}"
    return add_then_norm


def guard(x, residual, weight, bias, eps, round_first):
    return unlike_sum(x, residual) or layer_norm.guard(x, weight, bias, eps, round_first)


def why_keep(x, residual, weight, bias, eps, round_first):
    return too_small(x, symbolic=True)


FUSION = Fusion(
    name="add_layer_norm",
    instead="F.layer_norm(x + residual, (n,), weight, bias, eps)",
    pattern=behind_an_add(layer_norm.FUSION.pattern),
    spellings=tuple(map(behind_an_add, layer_norm.FUSION.spellings)),
    inputs={"x": "... n", "residual": "... n", "weight": "n", "bias": "n", "eps": 1e-5},
    variants=layer_norm.VARIANTS,
    parallel=("...",),
    kernel=add_layer_norm,
    guard=guard,
    why_keep=why_keep,
    traffic=("8*m*n*bytes", "10*m*n*bytes"),
    before=("layer_norm",),
    cases=(
        case("one_element", m=1, n=1, bench=False),
        case("odd", m=3, n=781, bench=False),
        case("wide", m=3, n=20001, bench=False, statics={"round_first": True}),
        case("bert_base", m=2048, n=768),
        case("gpt2_medium", m=16384, n=1024),
        case("gpt_j", m=16384, n=4096),
    ),
    source="Ba et al. 2016, arXiv:1607.06450",
)
