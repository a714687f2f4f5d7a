"""Losses against distributions outside of the compiled model: ``F.kl_div(F.log_softmax(model(x) / t, -1), softmax(y / t))``.

Of deferred log-probabilities (``rewrite.log_probs_outside``) and logits that nobody has read ``F.kl_div`` and
``F.cross_entropy`` with probabilities take what these would be made of, where they end in one number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fusion.kernels.linear_soft_cross_entropy import linear_soft_cross_entropy
from fx_fusion.rewrite.loss_outside import cross_entropy_of_unread, is_large
from fx_fusion.rewrite.result_dtype import result_dtype
from fx_fusion.rewrite.unread_logits import operands_of
from fx_fusion.runtime.deferred_tensor import TAKEN, DeferredTensor

_DIVISORS = {"mean": None, "batchmean": 1, "sum": 0}  # how many of the sizes a sum is divided by


def _kl_div(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False
) -> Tensor | None:  # fmt: skip
    """``F.kl_div`` of log-probabilities that nobody has read; None if it has to read them."""
    if size_average is not None or reduce is not None or reduction not in _DIVISORS or not isinstance(log_target, bool):
        return None
    kind = "log_probabilities" if log_target else "probabilities"
    loss = _taken(input, target, kind, input.shape[: _DIVISORS[reduction]], divergence=True)
    return None if loss is None else loss.to(_dtype_of(F.kl_div, input, target))


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """``F.cross_entropy`` of logits that nobody has read, with classes or probabilities; None if it has to read them."""
    if not isinstance(target, Tensor) or not target.is_floating_point():
        given = input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return cross_entropy_of_unread(*given)
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum") or input.dim() != 2:
        return None
    if weight is not None or label_smoothing != 0 or ignore_index >= 0:
        return None  # or PyTorch says what is wrong
    rows = input.shape[:1] if reduction == "mean" else ()
    loss = _taken(input, target, "probabilities", rows, divergence=False)
    return None if loss is None else loss.to(_dtype_of(F.cross_entropy, input, target))


def _taken(input: Any, target: Any, kind: str, divisors: Any, *, divergence: bool) -> Tensor | None:
    """The sum of all rows, divided by the sizes ``divisors``; None if the logits have to be read."""
    if type(input) is not DeferredTensor or type(target) is not Tensor or target.requires_grad:
        return None
    alike = target.shape == input.shape and target.device == input.device
    if not alike or target.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if not torch.is_grad_enabled() or not is_large(input) or input.has_hooks():
        return None
    found = operands_of(input)
    if found is None or found.log_probs != divergence or found.negated or found.taken_again():
        return None
    with torch.autocast(input.device.type, enabled=False), found.recipe.unfrozen():
        x, lm_head, bias = found.for_a_product()
        if x.dtype == torch.float16:
            return None
        weight = functools.reduce(lambda w, size: w / max(size, 1), divisors, 1.0)
        weights = torch.full(x.shape[:1], weight, dtype=torch.float32, device=x.device)
        options = (kind, divergence, 1.0, found.scale, found.needs)
        loss = linear_soft_cross_entropy(x, lm_head, bias, target, weights, *options)[0].sum()
        for size in divisors:
            loss = loss / size
    found.were_taken()
    return loss


def _dtype_of(loss: Callable[..., Tensor], input: Any, target: Tensor) -> torch.dtype:
    return result_dtype(loss, input.device.type, input.dtype, target.dtype, reduction="sum")


TAKEN[F.kl_div] = _kl_div
TAKEN[F.cross_entropy] = _cross_entropy
