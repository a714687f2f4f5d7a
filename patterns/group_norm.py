"""Group norm -> kernels/group_norm.py. In the UNets and VAEs of diffusion models, and in vision backbones."""

import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import mixed_on_cpu, too_many_positions, wrong_dtype
from fx_fusion.graph.size_hints import too_small
from fx_fusion.kernels.group_norm import group_norm

VARIANTS: tuple[dict[str, None], ...] = ({}, {"weight": None, "bias": None})


def torch_group_norm(x, groups, weight, bias, eps):
    return F.group_norm(x, groups, weight, bias, eps)


def in_float32(x, groups, weight, bias, eps):
    """GroupNorm32 of guided diffusion: casts around the call. What is computed on a CPU, too, where PyTorch rounds more."""
    w, b = (None if t is None else t.float() for t in (weight, bias))
    return F.group_norm(x.float(), groups, w, b, eps).to(x.dtype)


def guard(x, groups, weight, bias, eps):
    if not isinstance(groups, int):
        return f"the number of groups is {groups}; the kernel takes a constant"
    if x.dim() < 3:
        return f"x has shape {tuple(x.shape)}; the kernel takes (images, channels, positions ...)"
    return wrong_dtype(x=x, weight=weight, bias=bias) or mixed_on_cpu(x, weight, bias) or too_many_positions(x)


def why_keep(x, groups, weight, bias, eps):
    return too_small(x)


CASES = (
    case("two_elements", b=1, c=4, m=1, bench=False),
    case("odd", b=3, c=6, m=37, bench=False),
    case("volume", b=2, c=10, m=37 * 8, bench=False),
    case("large_group", b=1, c=8, m=90 * 90, bench=False),
    case("unet_64", b=8, c=320, m=64 * 64, scalars={"groups": 32}),
    case("unet_16", b=8, c=1280, m=16 * 16, scalars={"groups": 32}),
    case("vae_128", b=16, c=512, m=128 * 128, scalars={"groups": 32}),
)

FUSION = Fusion(
    name="group_norm",
    instead="F.group_norm(x, groups, weight, bias, eps)",
    pattern=in_float32,
    spellings=(torch_group_norm,),
    inputs={"x": "b c ...", "groups": 2, "weight": "c", "bias": "c", "eps": 1e-5},
    images=("x",),
    variants=VARIANTS,
    kernel=group_norm,
    guard=guard,
    why_keep=why_keep,
    traffic=("5*b*c*m*bytes", "8*b*c*m*bytes"),
    cases=CASES,
    source="Wu and He 2018, arXiv:1803.08494",
)
