"""``x * sigmoid(x)``, ``F.silu(x)`` -> kernels/swish.py."""

import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.kernels.swish import swish


def silu(x):
    return F.silu(x)


def guard(x):
    return wrong_dtype(x=x)


def why_keep(x):
    return "one pointwise function: Inductor fuses it with its neighbors, an op would keep them apart"


FUSION = Fusion(
    name="swish",
    instead="F.silu(x)",
    pattern=silu,
    inputs={"x": "... n"},
    parallel=("...", "n"),
    kernel=swish,
    guard=guard,
    why_keep=why_keep,
    cases=(
        case("one_element", m=1, n=1, bench=False),
        case("odd", m=3, n=781, bench=False),
        case("llama_8b", m=16384, n=14336),
        case("square", m=4096, n=4096),
    ),
    source="Ramachandran et al. 2017, arXiv:1710.05941",
)
