"""Residual add and LayerNorm in one pass: ``h = x + residual``, ``y = layer_norm(h)``; both are results.

Formulas, shapes, dtypes and traffic in ``norms/row_norm.py``. In the backward the gradients of ``x`` and ``residual`` are
one tensor.
"""

import torch

from fx_fusion.kernels.norms.row_norm import empty_stats, norm_bwd, norm_fwd, result_dtype, sum_dtype
from fx_fusion.ops.fused_op import fused_op


def _fwd(x, residual, weight, bias, eps, round_first):
    return norm_fwd(x, residual, weight, bias, eps, 0.0, round_first, center=True)


def _bwd(dy, dh, weight, bias, h, stats, eps, round_first, needs):
    return norm_bwd(dy, dh, h, weight, bias, stats, 0.0, round_first, needs, center=True)


def _fake(x, residual, weight, bias, eps, round_first):
    dtype = sum_dtype(x, residual)
    y = torch.empty_like(x, dtype=result_dtype(dtype, weight, round_first))
    return y, torch.empty_like(x, dtype=dtype), empty_stats(x, center=True)


def _bwd_reference(dy, dh, weight, bias, h, stats, eps, round_first, needs):
    """Returns the gradients of the norm alone at h, with dh added to that of h."""
    if dy is None:
        zeros = (
            torch.zeros_like(t) if t is not None and n else dh.new_empty(0)
            for t, n in zip((weight, bias), needs[1:], strict=True)
        )
        return torch.empty_like(h).copy_(dh), *zeros
    bwd = torch.ops.fx_fusion.layer_norm_bwd.default
    dx, dweight, dbias = bwd(dy, h, weight, bias, stats, eps, round_first, [True, *needs[1:]])
    return dx if dh is None else dx + dh, dweight, dbias


add_layer_norm = fused_op(
    "add_layer_norm",
    (
        "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, bool round_first)"
        " -> (Tensor y, Tensor h, Tensor stats)",
        _fwd,
    ),
    (
        "(Tensor? dy, Tensor? dh, Tensor? weight, Tensor? bias, Tensor h, Tensor stats, float eps,"
        " bool round_first, bool[] needs) -> (Tensor dx, Tensor dweight, Tensor dbias)",
        _bwd,
    ),
    fake=_fake,
    stats=("stats",),
    depends_on={"h": ("x", "residual")},
    grads=(("h", "x", "residual"), "weight", "bias"),
    backward_reference=_bwd_reference,
    symbolic=True,
)
