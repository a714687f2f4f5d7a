"""Residual add and RMSNorm in one pass: ``h = x + residual``, ``y = rms_norm(h)``; both are results.

Formulas, shapes, dtypes and traffic in ``norms/row_norm.py``. In the backward the gradients of ``x`` and ``residual`` are
one tensor.
"""

import torch

from fx_fusion.kernels.norms.row_norm import empty_stats, norm_bwd, norm_fwd, result_dtype, sum_dtype
from fx_fusion.ops.fused_op import fused_op


def _fwd(x, residual, weight, eps, offset, round_first):
    return norm_fwd(x, residual, weight, None, eps, offset, round_first, center=False)


def _bwd(dy, dh, weight, h, rstd, eps, offset, round_first, needs):
    return norm_bwd(dy, dh, h, weight, None, rstd, offset, round_first, needs, center=False)[:2]


def _fake(x, residual, weight, eps, offset, round_first):
    dtype = sum_dtype(x, residual)
    y = torch.empty_like(x, dtype=result_dtype(dtype, weight, round_first))
    return y, torch.empty_like(x, dtype=dtype), empty_stats(x, center=False)


def _bwd_reference(dy, dh, weight, h, rstd, eps, offset, round_first, needs):
    """Returns the gradients of the norm alone at h, with dh added to that of h."""
    if dy is None:
        dweight = torch.zeros_like(weight) if weight is not None and needs[1] else dh.new_empty(0)
        return torch.empty_like(h).copy_(dh), dweight  # never dh itself: a result is new memory
    bwd = torch.ops.fx_fusion.rms_norm_bwd.default
    dx, dweight = bwd(dy, h, weight, rstd, eps, offset, round_first, [True, needs[1]])
    return dx if dh is None else dx + dh, dweight


add_rms_norm = fused_op(
    "add_rms_norm",
    (
        "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool round_first)"
        " -> (Tensor y, Tensor h, Tensor rstd)",
        _fwd,
    ),
    (
        "(Tensor? dy, Tensor? dh, Tensor? weight, Tensor h, Tensor rstd, float eps, float offset, bool round_first,"
        " bool[] needs) -> (Tensor dx, Tensor dweight)",
        _bwd,
    ),
    fake=_fake,
    stats=("rstd",),
    depends_on={"h": ("x", "residual")},
    grads=(("h", "x", "residual"), "weight"),
    backward_reference=_bwd_reference,
    symbolic=True,
)
