"""``silu(group_norm(x))`` -> kernels/group_norm_swish.py: every ResNet block of a diffusion model."""

import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.kernels.group_norm_swish import group_norm_swish
from fx_fusion.patterns import group_norm


def silu_of_group_norm(x, groups, weight, bias, eps):
    return F.silu(F.group_norm(x, groups, weight, bias, eps))


def silu_of_group_norm_in_float32(x, groups, weight, bias, eps):
    return F.silu(group_norm.in_float32(x, groups, weight, bias, eps))


FUSION = Fusion(
    name="group_norm_swish",
    instead="F.silu(F.group_norm(x, groups, weight, bias, eps))",
    pattern=silu_of_group_norm_in_float32,
    spellings=(silu_of_group_norm,),
    inputs=group_norm.FUSION.inputs,
    images=group_norm.FUSION.images,
    variants=group_norm.VARIANTS,
    kernel=group_norm_swish,
    guard=group_norm.guard,
    why_keep=group_norm.why_keep,
    traffic=group_norm.FUSION.traffic,
    before=("group_norm", "swish"),
    cases=group_norm.CASES,
    source="Wu and He 2018, arXiv:1803.08494; Ramachandran et al. 2017, arXiv:1710.05941",
)
