"""``h = x + residual; y = rms_norm(h)``, both used -> kernels/add_rms_norm.py."""

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import unlike_sum
from fx_fusion.graph.size_hints import too_small
from fx_fusion.kernels.add_rms_norm import add_rms_norm
from fx_fusion.patterns.rms_norm import CAST_ORDERS, pow_mean_rsqrt
from fx_fusion.patterns.rms_norm import guard as norm_guard


def add_then_norm(x, residual, weight, eps, offset, round_first):
    h = x + residual
    return pow_mean_rsqrt(h, weight, eps, offset, round_first), h


def guard(x, residual, weight, eps, offset, round_first):
    return unlike_sum(x, residual) or norm_guard(x, weight, eps, offset, round_first)


def why_keep(x, residual, weight, eps, offset, round_first):
    return too_small(x)


FUSION = Fusion(
    name="add_rms_norm",
    instead="F.rms_norm(x + residual, (n,), weight, eps)",
    pattern=add_then_norm,
    inputs={"x": "... n", "residual": "... n", "weight": "n", "eps": 1e-6},
    variants=CAST_ORDERS,
    kernel=add_rms_norm,
    guard=guard,
    why_keep=why_keep,
    traffic=("8*m*n*bytes", "10*m*n*bytes"),
    before=("rms_norm",),
    cases=(
        case("one_element", m=1, n=1, bench=False),
        case("odd", m=3, n=781, bench=False),
        case("wide", m=3, n=20001, bench=False, statics={"round_first": True}),
        case("llama_1b", m=16384, n=2048),
        case("llama_8b", m=16384, n=4096),
    ),
    source="Zhang and Sennrich 2019, arXiv:1910.07467",
)
