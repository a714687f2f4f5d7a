"""``h = x + residual; y = rms_norm(h)``, both used -> kernels/add_rms_norm.py."""

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import unlike_sum
from fx_fusion.graph.size_hints import too_small
from fx_fusion.kernels.add_rms_norm import add_rms_norm
from fx_fusion.patterns.rms_norm import CAST_ORDERS, pow_mean_rsqrt, torch_rms_norm, weight_first, weight_into_rstd
from fx_fusion.patterns.rms_norm import guard as norm_guard
from fx_fusion.patterns.sites.lengths import HINTS


def after_add(norm):
    """A spelling of RMSNorm, of a sum that is a result too."""

    def add_then_norm(x, residual, weight, eps, offset, round_first):
        h = x + residual
        y = norm(h, weight, eps, offset, round_first)
        return y if y is NotImplemented else (y, h)

    add_then_norm.__name__ = f"add_then_{norm.__name__}"
    return add_then_norm


add_then_norm = after_add(pow_mean_rsqrt)


def guard(x, residual, weight, eps, offset, round_first):
    return unlike_sum(x, residual) or norm_guard(x, weight, eps, offset, round_first)


def why_keep(x, residual, weight, eps, offset, round_first):
    return too_small(x, symbolic=True)


FUSION = Fusion(
    name="add_rms_norm",
    instead="F.rms_norm(x + residual, (n,), weight, eps)",
    hints=HINTS,
    pattern=add_then_norm,
    spellings=tuple(after_add(norm) for norm in (torch_rms_norm, weight_first, weight_into_rstd)),
    inputs={"x": "... n", "residual": "... n", "weight": "n", "eps": 1e-6},
    variants=CAST_ORDERS,
    parallel=("...",),
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
