"""Log-probabilities outside of the compiled model: ``F.log_softmax(model(x) / t, -1).gather(-1, y[..., None])``.

Losses of one's own and reinforcement learning take the log-probability of one class of each row. Deferred logits that a
number scales, and a log_softmax of them, are deferred too; ``gather`` and ``F.nll_loss`` of that take what the logits would
be made of (``rewrite.loss_outside``). What else reads log-probabilities gets them as the program would have computed them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fusion.kernels.logits.kept_logits import losses_of_kept_logits
from fx_fusion.kernels.logits.logit_rows import NO_IGNORE
from fx_fusion.kernels.token_log_probs import token_log_probs
from fx_fusion.rewrite.label_smoothing_outside import class_of_negated, negated_log_probs, sum_of_negated
from fx_fusion.rewrite.logsumexp_outside import class_of_logits, logsumexp, minus
from fx_fusion.rewrite.loss_outside import is_large, keeps_logits, loss_of_unread, may_wait
from fx_fusion.rewrite.result_dtype import result_dtype
from fx_fusion.rewrite.unread_logits import Operands, log_softmax_of_rows, operands_of, scaled
from fx_fusion.runtime.deferred_tensor import TAKEN


# -- what waits ----------------------------------------------------------------------------------------------------------
def _log_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor | None:
    """``F.log_softmax`` of deferred logits over their classes, deferred; None for another one."""
    if type(dim) is not int or dim not in (-1, input.dim() - 1) or dtype not in (None, torch.float32):
        return None
    if not may_wait(input) or input.dtype == torch.float64:
        return None
    dtype = dtype or result_dtype(torch.log_softmax, input.device.type, input.dtype, dim=-1)
    return input.followed_by(log_softmax_of_rows, dtype)


def _of_torch(input: Any, dim: Any, dtype: torch.dtype | None = None) -> Tensor | None:
    """``torch.log_softmax`` and ``Tensor.log_softmax``."""
    return _log_softmax(input, dim, dtype=dtype)


def _times(input: Any, other: Any) -> Tensor | None:
    """``logits * number``, deferred; None for what is no such product."""
    return _scaled(input, other, 1)


def _over(input: Any, other: Any, *, rounding_mode: Any = None) -> Tensor | None:
    """``logits / number``, deferred; None for what is no such quotient."""
    return _scaled(input, 1, other) if rounding_mode is None else None


def _scaled(input: Any, numerator: Any, denominator: Any) -> Tensor | None:
    numbers = [n for n in (numerator, denominator) if isinstance(n, (int, float)) and type(n) is not bool]
    if len(numbers) < 2 or not all(math.isfinite(n) and n != 0 for n in numbers):
        return None
    if not may_wait(input) or not input.is_floating_point():
        return None
    return input.followed_by(scaled, numerator, denominator)


# -- what takes it -------------------------------------------------------------------------------------------------------
def _gather(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Tensor | None:
    """``log_probs.gather(-1, index)`` of one class a row, from what the logits would be computed of; of logits, deferred.
    None if it has to read them. Raises StaleTensorError if that has changed."""
    if type(index) is not Tensor or index.dtype != torch.int64 or type(dim) is not int or sparse_grad:
        return None
    one_a_row = dim in (-1, input.dim() - 1) and tuple(index.shape) == (*input.shape[:-1], 1)
    if not one_a_row or index.device != input.device or not torch.is_grad_enabled() or not is_large(input):
        return None
    if not index.is_cuda and not ((index >= 0) & (index < input.shape[-1])).all():
        return None  # PyTorch's error
    found = operands_of(input)
    if found is None or found.taken_again():  # each would make them, and perhaps keep them
        return None
    if not found.log_probs:
        return class_of_logits(input, index)
    with torch.autocast(input.device.type, enabled=False), found.recipe.unfrozen():
        of_rows = class_of_negated if found.negated else _of_one_class
        taken = of_rows(input, found, index.reshape(-1))
    if taken is None:
        return None
    found.were_taken()
    return taken.view(index.shape).to(input.dtype)


def _of_one_class(input: Any, found: Operands, target: Tensor) -> Tensor:
    """The log-probability (rows), float32, of each row's ``target``."""
    x, lm_head, bias = found.for_a_product()
    if keeps_logits(found, x, lm_head):
        return losses_of_kept_logits(x, lm_head, bias, target, None, NO_IGNORE, 0.0, found.scale).neg_()
    return token_log_probs(x, lm_head, bias, target, 0.0, found.scale)[0]


def _take_along_dim(input: Any, indices: Any, dim: Any = None) -> Tensor | None:
    return _gather(input, dim, indices)


def _nll_loss(
    input: Any, target: Any, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Tensor | None:  # fmt: skip
    """``F.nll_loss`` of log-probabilities that nobody has read, like ``F.cross_entropy`` of logits."""
    if size_average is not None or reduce is not None:
        return None
    return loss_of_unread(input, target, weight, ignore_index, reduction, of_log_probs=True)


def _take(function: Callable[..., Tensor | None], *of: Any) -> None:
    """Let ``function`` take the calls of these functions of torch; a call with other arguments (``out=``) reads."""
    signature = inspect.signature(function)

    def taken(*args: Any, **kwargs: Any) -> Tensor | None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return None
        return function(*bound.args, **bound.kwargs)

    TAKEN.update(dict.fromkeys(of, taken))


_take(_log_softmax, F.log_softmax)
_take(_of_torch, torch.log_softmax, torch.special.log_softmax, torch.Tensor.log_softmax)
_take(_nll_loss, F.nll_loss)
_take(logsumexp, torch.special.logsumexp)
for module in (torch, torch.Tensor):
    _take(_times, module.mul, module.multiply)
    _take(_over, module.div, module.divide, module.true_divide)
    _take(_gather, module.gather)
    _take(_take_along_dim, module.take_along_dim)
    _take(logsumexp, module.logsumexp)
    _take(functools.partial(minus, _gather), module.sub, module.subtract)
    _take(negated_log_probs, module.neg, module.negative)
    _take(sum_of_negated, module.sum)
_take(negated_log_probs, torch.Tensor.__neg__)
