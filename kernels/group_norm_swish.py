"""GroupNorm + SiLU in one pass: formulas, shapes, dtypes and traffic in ``norms/group_norm_dispatch.py``."""

from fx_fusion.kernels.group_norm import group_norm_op
from fx_fusion.kernels.norms.group_norm_math import GROUP_NORM_SWISH

group_norm_swish = group_norm_op("group_norm_swish", GROUP_NORM_SWISH)
