"""Normalization of images by statistics of groups of channels: GroupNorm, GroupNorm + SiLU, EvoNorm-S0.

    L     = elements of a group: C/G channels of one image, all positions
    mean, var over a group,  rstd = 1 / sqrt(var + eps),  x̂ = (x − mean) · rstd

    group_norm     y = x̂ · w + b
    + silu         y = z σ(z),                    z = x̂ · w + b
    evonorm_s0     y = x σ(v x) · rstd · w + b        (rstd with var · L / (L − correction))

    dz            = dy,                           with silu:  dy · σ(z) (1 + z (1 − σ(z)))
    B             = Σ_group w · dz · x̂            evonorm_s0: Σ_group w · dy · x σ(v x) · rstd
    A             = Σ_group w · dz                evonorm_s0: 0
    dx            = rstd · (dz · w · J − A / L − x̂ · B / (L − correction))      J = 1;  evonorm_s0: σ(v x) + v x σ (1 − σ)
    dw, db, dv    = sums over images and positions of dz · x̂ (or dy · x σ · rstd), dz, dy · w · rstd · x² σ (1 − σ)

Shapes     x: (n, c, ...), contiguous or channels last (no copy; anything else is copied); weight, bias, v: (c).
Dtypes     bf16 | fp16 | fp32, parameters in any of them; arithmetic in fp32, one rounding per store.
Statistics sums of distances from a value of the lane and, every 32 values, from its mean so far; lanes merged with Chan's
           formula: never mean² against variance.
Saved      x, weight, bias, v, stats: mean and rstd, one of each a group.
Traffic    A group that stays in registers is read once: forward 2, backward 3 elements an element. Larger groups are read
           twice by the program that owns them, the second time out of the cache. Channels last, or too few groups to
           fill the GPU: partial sums by tiles, one small kernel, then the elements; 3 and 5 elements an element.
Source     Wu and He 2018, arXiv:1803.08494; Liu et al. 2020, arXiv:2004.02967, table 2 (S0).
"""

import torch

from fx_fusion.kernels.lib.column_sums import column_sums
from fx_fusion.kernels.lib.image_tiles import as_images, empty_images
from fx_fusion.kernels.norms import norm_by_group, norm_by_tile
from fx_fusion.kernels.norms.group_norm_math import Norm
from fx_fusion.kernels.norms.group_plan import group_plan


def norm_fwd(x, y, groups: int, weight, bias, v, eps: float, kind, correction: int = 0):
    """Fill y; returns stats: (2, n · groups) fp32, means and rstds."""
    x = as_images(x)
    stats = torch.empty(2, x.shape[0] * groups, dtype=torch.float32, device=x.device)
    if x.numel():
        norm = Norm(x, groups, weight, bias, v, kind, correction)
        plan = group_plan(norm, x, y, backward=False)
        if plan is None:
            norm_by_tile.forward(norm, x, y, stats, float(eps))
        else:
            norm_by_group.forward(norm, x, y, stats, float(eps), plan)
    return stats


def norm_bwd(dy, x, groups: int, weight, bias, v, stats, kind, correction: int = 0):
    """Returns dx and [dweight, dbias] or [dweight, dbias, dv]; None for a parameter that is None."""
    dx = empty_images(x)
    x, dy = as_images(x), as_images(dy)
    norm = Norm(x, groups, weight, bias, v, kind, correction)
    if x.numel():
        plan = group_plan(norm, x, dy, backward=True)
        if plan is None:
            sums = norm_by_tile.backward(norm, dy, x, stats, dx)
        else:
            sums = norm_by_group.backward(norm, dy, x, stats, dx, plan)
    else:
        sums = torch.zeros(norm.sums, 1, norm.c, dtype=torch.float32, device=x.device)
    dbias, dweight, *dv = column_sums(sums, [None if t is None else t.dtype for t in (bias, weight, v)[: norm.sums]])
    return dx, [dweight, dbias, *dv]
