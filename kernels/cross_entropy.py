"""Cross-entropy of rows of logits: formulas, shapes, dtypes and traffic in ``logits/logit_rows``."""

import torch

from fx_fusion.kernels.logits.logit_rows import launch_rows
from fx_fusion.ops.fused_op import fused_op


def _fwd(logits, target, weight, ignore_index, label_smoothing, softcap, scale):
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    loss, stats = _fake(logits, target, weight, ignore_index, label_smoothing, softcap, scale)
    launch_rows(logits, target.contiguous(), weight, ignore_index, label_smoothing, softcap, scale, loss=loss, stats=stats)
    return loss, stats


def _bwd(dloss, logits, target, weight, stats, ignore_index, label_smoothing, softcap, scale, needs):
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch_rows(
        logits, target.contiguous(), weight, ignore_index, label_smoothing, softcap, scale,
        stats=stats, dloss=dloss, dlogits=dlogits,
    )  # fmt: skip
    return dlogits


def _fake(logits, target, weight, ignore_index, label_smoothing, softcap, scale):
    loss = torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device)
    return loss, torch.empty((2, logits.shape[0]), dtype=torch.float32, device=logits.device)


_OPTIONS = "int ignore_index, float label_smoothing, float softcap, float scale"

cross_entropy = fused_op(
    "cross_entropy",
    (f"(Tensor logits, Tensor target, Tensor? weight, {_OPTIONS}) -> (Tensor loss, Tensor stats)", _fwd),
    (
        f"(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor stats, {_OPTIONS}, bool[] needs)"
        " -> Tensor dlogits",
        _bwd,
    ),
    fake=_fake,
    stats=("stats",),
    grads=("logits",),
)
