"""Label smoothing by hand, outside of the compiled model, as transformers' ``LabelSmoother`` (``label_smoothing_factor``):

    log_probs = -F.log_softmax(logits, -1)
    nll, smoothed = log_probs.gather(-1, y), log_probs.sum(-1, keepdim=True)

Deferred log-probabilities with a minus are deferred, too. ``gather`` of them keeps the logits for one backward of both, and
computes the sum over all classes beside it: for ``sum`` of the same tensor, which would read them otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fx_fusion.kernels.logits.kept_logits import class_and_sum_of_kept_logits
from fx_fusion.rewrite.loss_outside import may_keep, may_wait
from fx_fusion.rewrite.unread_logits import Operands, log_softmax_of_rows, negated, operands_of
from fx_fusion.runtime.sources import in_turn

_sums = WeakIdKeyDictionary()  # by deferred log-probabilities with a minus, their sums over the classes, in float32


def negated_log_probs(input: Any) -> Tensor | None:
    """Minus deferred log-probabilities, deferred; None for other tensors."""
    step = input.step()
    if step is None or step.func is not in_turn or step.args[-1][0] is not log_softmax_of_rows:
        return None
    return input.followed_by(negated) if may_wait(input) else None


def class_of_negated(input: Any, found: Operands, target: Tensor) -> Tensor | None:
    """Minus the log-probability (rows), float32, of each row's ``target``; None where the logits can't be kept."""
    x, lm_head, bias = found.for_a_product()
    if not may_keep(found, x, lm_head) or x.dtype == torch.float16:
        return None
    of_class, _sums[input] = class_and_sum_of_kept_logits(x, lm_head, bias, target, found.scale)
    return of_class


def sum_of_negated(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor | None:
    """The sum over the classes of what a class was taken of before; None if it has to be read. Raises StaleTensorError if
    what it is made of has changed."""
    if input not in _sums or dim not in (-1, input.dim() - 1, (-1,), [-1]) or not torch.is_grad_enabled():
        return None
    if operands_of(input) is None or dtype not in (None, torch.float32):
        return None
    shape = (*input.shape[:-1], 1) if keepdim else input.shape[:-1]
    return _sums[input].view(shape).to(dtype or input.dtype)
