"""RMSNorm: formulas, shapes, dtypes and traffic in ``norms/row_norm.py``."""

import torch

from fx_fusion.kernels.norms.row_norm import empty_stats, norm_bwd, norm_fwd, result_dtype
from fx_fusion.ops.fused_op import fused_op


def _fwd(x, weight, eps, offset, round_first):
    y, _, rstd = norm_fwd(x, None, weight, None, eps, offset, round_first, center=False)
    return y, rstd


def _bwd(dy, x, weight, rstd, eps, offset, round_first, needs):
    return norm_bwd(dy, None, x, weight, None, rstd, offset, round_first, needs, center=False)[:2]


def _fake(x, weight, eps, offset, round_first):
    return torch.empty_like(x, dtype=result_dtype(x.dtype, weight, round_first)), empty_stats(x, center=False)


rms_norm = fused_op(
    "rms_norm",
    ("(Tensor x, Tensor? weight, float eps, float offset, bool round_first) -> (Tensor y, Tensor rstd)", _fwd),
    (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float eps, float offset, bool round_first, bool[] needs)"
        " -> (Tensor dx, Tensor dweight)",
        _bwd,
    ),
    fake=_fake,
    stats=("rstd",),
    grads=("x", "weight"),
    cheap=True,
    symbolic=True,
)
