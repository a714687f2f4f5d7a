"""GroupNorm + SiLU in one pass: formulas, shapes, dtypes and traffic in ``channel_norm``."""

from fx_fusion.kernels.channel_norm import GROUP_NORM_SWISH
from fx_fusion.kernels.group_norm import group_norm_op

group_norm_swish = group_norm_op("group_norm_swish", GROUP_NORM_SWISH)
