"""EvoNorm-B0, forward and backward.

    I_nc  = sqrt(var of a channel of an image + eps)           L_c = sqrt(var of a channel over the batch + eps)
    d     = max(L_c, v x + I_nc)                                in evaluation L_c = sqrt(running_var + eps)
    y     = x / d · w + b

    q     = −dy · w · x / d²,   r = 1 where v x + I_nc > L_c, 1/2 where they are equal, else 0
    P_nc  = Σ_nc(r q) / (I_nc S),   Q_c = Σ_c((1 − r) q) / (L_c N S)        S positions, N images; in evaluation Q_c = 0
    dx    = dy · w / d + r q v + (x − mean_nc) P_nc + (x − mean_c) Q_c
    dw, db, dv = sums over images and positions of dy · x / d, dy, r q x

Shapes     x: (n, c, ...), contiguous or channels last; weight, bias, v, running_var: (c). ``var``: (c), biased, for the
           update of the running statistics.
Dtypes     bf16 | fp16 | fp32, parameters in any of them; arithmetic and statistics in fp32, one rounding per store.
Saved      x, v, weight, ``images``: mean_nc and I_nc, ``batch``: mean_c and L_c.
Traffic    forward x twice and y once, backward x and dy twice and dx once: the batch statistics need all of x first. By
           channel the second reads come out of the cache.
Source     Liu et al. 2020, arXiv:2004.02967, table 2 (B0).
"""

import torch

from fx_fusion.kernels.lib.image_tiles import as_images, empty_images
from fx_fusion.kernels.norms import evonorm_b0_by_channel as by_channel
from fx_fusion.kernels.norms import evonorm_b0_by_tile as by_tile
from fx_fusion.ops.fused_op import fused_op


def _fwd(x, v, weight, bias, running_var, eps):
    y, var, images, batch = _fake(x, v, weight, bias, running_var, eps)
    if not x.numel():
        return y, var.fill_(float("nan")), images, batch
    x = as_images(x)
    plan = by_channel.channel_plan(x, y, backward=False)
    tensors = x, v.contiguous(), weight.contiguous(), bias.contiguous(), running_var, y, var, images, batch
    if plan is None:
        by_tile.forward(*tensors, float(eps))
    else:
        by_channel.forward(*tensors, float(eps), plan)
    return y, var, images, batch


def _bwd(dy, x, v, weight, bias, running_var, images, batch, eps, needs):
    dx = empty_images(x)
    if not x.numel():
        return dx, *(torch.zeros_like(t) for t in (v, weight, bias))
    x, dy = as_images(x), as_images(dy)
    plan = by_channel.channel_plan(x, dy, dx, backward=True)
    tensors = dy, x, v.contiguous(), weight.contiguous(), bias.contiguous(), running_var, images, batch, dx
    grads = by_tile.backward(*tensors) if plan is None else by_channel.backward(*tensors, plan)
    return dx, *grads


def _fake(x, v, weight, bias, running_var, eps):
    n, c = x.shape[:2]
    var, images, batch = (torch.empty(s, dtype=torch.float32, device=x.device) for s in ((c,), (2, n, c), (2, c)))
    return empty_images(x), var, images, batch


evonorm_b0 = fused_op(
    "evonorm_b0",
    (
        "(Tensor x, Tensor v, Tensor weight, Tensor bias, Tensor? running_var, float eps)"
        " -> (Tensor y, Tensor var, Tensor images, Tensor batch)",
        _fwd,
    ),
    (
        "(Tensor dy, Tensor x, Tensor v, Tensor weight, Tensor bias, Tensor? running_var, Tensor images, Tensor batch,"
        " float eps, bool[] needs) -> (Tensor dx, Tensor dv, Tensor dweight, Tensor dbias)",
        _bwd,
    ),
    fake=_fake,
    stats=("images", "batch"),
    constants=("var",),
    grads=("x", "v", "weight", "bias"),
    cheap=True,
)
