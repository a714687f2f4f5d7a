"""GroupNorm and GroupNorm + SiLU: formulas, shapes, dtypes and traffic in ``norms/group_norm_dispatch.py``."""

import torch

from fx_fusion.kernels.lib.image_tiles import empty_images
from fx_fusion.kernels.norms.group_norm_dispatch import norm_bwd, norm_fwd
from fx_fusion.kernels.norms.group_norm_math import GROUP_NORM
from fx_fusion.ops.fused_op import fused_op


def group_norm_op(name: str, kind):
    """Returns the op of GROUP_NORM or GROUP_NORM_SWISH; both have the same parameters."""

    def fwd(x, groups, weight, bias, eps):
        y, _ = fake(x, groups, weight, bias, eps)
        return y, norm_fwd(x, y, groups, weight, bias, None, eps, kind)

    def bwd(dy, x, groups, weight, bias, stats, eps, needs):
        dx, grads = norm_bwd(dy, x, groups, weight, bias, None, stats, kind)
        return dx, *(dx.new_empty(0) if g is None else g for g in grads)

    def fake(x, groups, weight, bias, eps):
        return empty_images(x), torch.empty(2, x.shape[0] * groups, dtype=torch.float32, device=x.device)

    return fused_op(
        name,
        ("(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor stats)", fwd),
        (
            "(Tensor dy, Tensor x, int groups, Tensor? weight, Tensor? bias, Tensor stats, float eps, bool[] needs)"
            " -> (Tensor dx, Tensor dweight, Tensor dbias)",
            bwd,
        ),
        fake=fake,
        stats=("stats",),
        grads=("x", "weight", "bias"),
        cheap=True,
    )


group_norm = group_norm_op("group_norm", GROUP_NORM)
