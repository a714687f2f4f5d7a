"""EvoNorm-S0 in one pass: formulas, shapes, dtypes and traffic in ``norms/group_norm_dispatch.py``."""

import torch

from fx_fusion.kernels.lib.image_tiles import empty_images
from fx_fusion.kernels.norms.group_norm_dispatch import norm_bwd, norm_fwd
from fx_fusion.kernels.norms.group_norm_math import EVONORM_S0
from fx_fusion.ops.fused_op import fused_op


def _fwd(x, groups, v, weight, bias, eps, correction):
    y, _ = _fake(x, groups, v, weight, bias, eps, correction)
    return y, norm_fwd(x, y, groups, weight, bias, v, eps, EVONORM_S0, correction)


def _bwd(dy, x, groups, v, weight, bias, stats, eps, correction, needs):
    dx, (dweight, dbias, dv) = norm_bwd(dy, x, groups, weight, bias, v, stats, EVONORM_S0, correction)
    return dx, dv, dweight, dbias


def _fake(x, groups, v, weight, bias, eps, correction):
    return empty_images(x), torch.empty(2, x.shape[0] * groups, dtype=torch.float32, device=x.device)


evonorm_s0 = fused_op(
    "evonorm_s0",
    (
        "(Tensor x, int groups, Tensor v, Tensor weight, Tensor bias, float eps, int correction)"
        " -> (Tensor y, Tensor stats)",
        _fwd,
    ),
    (
        "(Tensor dy, Tensor x, int groups, Tensor v, Tensor weight, Tensor bias, Tensor stats, float eps, int correction,"
        " bool[] needs)"
        " -> (Tensor dx, Tensor dv, Tensor dweight, Tensor dbias)",
        _bwd,
    ),
    fake=_fake,
    stats=("stats",),
    grads=("x", "v", "weight", "bias"),
    cheap=True,
)
