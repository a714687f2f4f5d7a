"""LayerNorm: formulas, shapes, dtypes and traffic in ``norms/row_norm.py``. The result is contiguous, as torch's own is."""

import torch

from fx_fusion.kernels.norms.row_norm import empty_stats, norm_bwd, norm_fwd, result_dtype
from fx_fusion.ops.fused_op import fused_op


def _fwd(x, weight, bias, eps, round_first):
    y, _, stats = norm_fwd(x.contiguous(), None, weight, bias, eps, 0.0, round_first, center=True)
    return y, stats


def _bwd(dy, x, weight, bias, stats, eps, round_first, needs):
    return norm_bwd(dy, None, x.contiguous(), weight, bias, stats, 0.0, round_first, needs, center=True)


def _fake(x, weight, bias, eps, round_first):
    y = torch.empty(x.shape, dtype=result_dtype(x.dtype, weight, round_first), device=x.device)
    return y, empty_stats(x, center=True)


layer_norm = fused_op(
    "layer_norm",
    (
        "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool round_first) -> (Tensor y, Tensor stats)",
        _fwd,
    ),
    (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, float eps, bool round_first,"
        " bool[] needs) -> (Tensor dx, Tensor dweight, Tensor dbias)",
        _bwd,
    ),
    fake=_fake,
    stats=("stats",),
    grads=("x", "weight", "bias"),
    cheap=True,
    symbolic=True,
)
