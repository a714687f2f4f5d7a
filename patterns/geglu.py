"""``gelu(gate) * up`` with any of the three GELUs, written out or not -> kernels/geglu.py."""

import torch
import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.kernels.geglu import geglu
from fx_fusion.patterns.swiglu import guard as glu_guard


def gelu_times_up(gate, up, kind):
    if kind == "quick_gelu":
        return gate * torch.sigmoid(1.702 * gate) * up
    return F.gelu(gate, approximate=kind.removeprefix("gelu_")) * up


def guard(gate, up, kind):
    return glu_guard(gate, up)


def why_keep(gate, up, kind):
    return "Inductor reaches the bandwidth of the memory (102 % of the copy rate at 16384 x 14336, bfloat16, H200)"


FUSION = Fusion(
    name="geglu",
    instead="F.gelu(gate) * up",
    pattern=gelu_times_up,
    inputs={"gate": "... n", "up": "... n"},
    variants=({"kind": "gelu_tanh"}, {"kind": "gelu_none"}, {"kind": "quick_gelu"}),
    parallel=("...", "n"),
    kernel=geglu,
    guard=guard,
    why_keep=why_keep,
    float8=True,
    before=("swish",),
    cases=(
        case("one_element", m=1, n=1, bench=False),
        case("odd", m=3, n=781, bench=False),
        case("llama_8b", m=16384, n=14336),
        case("gemma_2b", m=16384, n=16384),
    ),
    source="Shazeer 2020, arXiv:2002.05202",
)
