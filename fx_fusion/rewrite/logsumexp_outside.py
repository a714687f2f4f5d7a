"""Log-probabilities written out, outside of the compiled model, as losses of reinforcement learning have them:

    logits.gather(-1, y[..., None]).squeeze(-1) - logits.logsumexp(-1)
    (logits - logits.logsumexp(-1, keepdim=True)).gather(-1, y[..., None])

``logsumexp`` of deferred logits over their classes and ``gather`` of one class a row are deferred, too. Their difference, in
either order, is what ``rewrite.log_probs_outside`` makes of a log_softmax; logits minus the logsumexp of each row are one.
What else reads any of them gets it as the program would have computed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.rewrite.loss_outside import may_wait
from fx_fusion.rewrite.result_dtype import result_dtype
from fx_fusion.rewrite.unread_logits import log_softmax_of_rows, log_softmax_written_out
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.runtime.sources import in_turn
from fx_fusion.runtime.tensor_methods import CASTS

# Of tensors whose number of elements stays the same these keep their order.
_LAYOUTS = {
    getattr(torch.Tensor, name)
    for name in ("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze", "select", "narrow", "__getitem__")
}
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def logsumexp_of_rows(logits: Tensor, keepdim: bool) -> Tensor:
    """``logsumexp`` over the last dim."""
    return torch.logsumexp(logits, -1, keepdim)


def class_of_rows(logits: Tensor, index: Tensor) -> Tensor:
    """The logit of one class of each row; ``index``: (..., 1)."""
    return logits.new_empty(index.shape) if logits.is_meta else torch.gather(logits, -1, index)


def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Tensor | None:
    """``torch.logsumexp`` of deferred logits over their classes, deferred; None for another one."""
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if len(dims) != 1 or type(dims[0]) is not int or dims[0] not in (-1, input.dim() - 1) or type(keepdim) is not bool:
        return None
    if not may_wait(input) or not input.is_floating_point() or input.dtype == torch.float64:
        return None
    stays = result_dtype(torch.logsumexp, input.device.type, input.dtype, dim=-1) == input.dtype
    return input.followed_by(logsumexp_of_rows, keepdim) if stays else None


def class_of_logits(input: Any, index: Tensor) -> Tensor | None:
    """``logits.gather(-1, index)``, deferred, of deferred logits and one class a row; None where that may not wait. The
    index may be written to before it is read."""
    return input.followed_by(class_of_rows, index.clone()) if may_wait(input) else None


def minus(take_class: Callable[..., Tensor | None], input: Any, other: Any, *, alpha: Any = 1) -> Tensor | None:
    """A difference of deferred logits, their logsumexp, and logits of one class of each row; None for any other one.
    ``take_class``: ``gather`` of deferred log-probabilities."""
    if type(other) is not DeferredTensor or alpha != 1 or other._source is None:
        return None
    left, right = _read_down(input), _read_down(other)
    if right is None:
        return None
    if right.function is logsumexp_of_rows and right.is_of(input) and other.shape == (*input.shape[:-1], 1):
        same = other.dtype == input.dtype and may_wait(input)
        return input.followed_by(log_softmax_written_out) if same else None
    if left is None or input.shape != other.shape or not left.is_of_the_same(right):
        return None
    functions = left.function, right.function
    if functions not in ((logsumexp_of_rows, class_of_rows), (class_of_rows, logsumexp_of_rows)):
        return None
    index, = (side.args[0] for side in (left, right) if side.function is class_of_rows)
    taken = take_class(left.logits().followed_by(log_softmax_of_rows, left.dtype), -1, index)
    if taken is None:
        return None
    taken = taken.view(input.shape).to(torch.promote_types(input.dtype, other.dtype))
    return taken if left.function is class_of_rows else -taken


class _OfRows:
    """One number for each row of deferred logits: a function of ``below`` behind other calls, and what it is given."""

    def __init__(self, below: Any, calls: tuple[Call, ...], dtype: torch.dtype):
        self.below, self.before, self.dtype = below, calls[:-1], dtype
        self.function, self.args, _ = calls[-1]

    def is_of_the_same(self, other: _OfRows) -> bool:
        return self.before == other.before and _are_alike(self.below, other.below)

    def is_of(self, logits: Any) -> bool:
        """Whether it is computed of these logits."""
        step = logits.step()
        if logits is self.below:
            return not self.before
        if step is None or step.below is not self.below:
            return False
        calls = step.args if step.func is in_turn else ((step.func, step.args, step.kwargs),)
        return calls == self.before

    def logits(self) -> Any:
        """The logits that it is computed of, anew."""
        made = self.below
        for function, args, kwargs in self.before:
            made = function(made, *args, **kwargs) if function in CASTS else made.followed_by(function, *args)
        return made


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two deferred tensors are the same casts and views of one, and nobody waits for a gradient of theirs."""
    if one is other:
        return True
    steps = one.step(), other.step()
    if None in steps or one.has_hooks() or other.has_hooks():
        return False
    called = [(step.func, step.args, step.kwargs, step.grad) for step in steps]
    return called[0] == called[1] and _are_alike(*(step.below for step in steps))


def _read_down(tensor: Any) -> _OfRows | None:
    """What a deferred tensor of one number a row is computed of, below casts that keep its values and other layouts of it;
    None where there is more between."""
    while (step := tensor.step()) is not None and step.grad and not tensor.has_hooks():
        if step.func is in_turn:
            between = any(made.has_hooks() for _, made in step.between())
            of_rows = step.args[-1][0] in (logsumexp_of_rows, class_of_rows)
            return _OfRows(step.below, step.args, tensor.dtype) if of_rows and not between else None
        if step.func in CASTS:
            kept = keeps_values(step.below.dtype, tensor.dtype)
        else:
            kept = step.func in _LAYOUTS and step.below.numel() == tensor.numel()
        if not kept:
            return None
        tensor = step.below
    return None
