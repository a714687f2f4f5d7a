"""A loss outside of the compiled model: ``logits = model(x); loss = F.cross_entropy(logits.view(-1, n), y.view(-1))``.

No graph holds lm_head and loss together. Logits that a graph returns and that nothing else in it reads are deferred, too,
and ``F.cross_entropy`` of logits that nobody has read is one call of the op that makes them in chunks. What else reads them
gets them as the model would have computed them: by one product, as before. Where nothing takes them in call after call, they
are made at once (``runtime.reads``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.fusion.legality import why_not_plain
from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.graph.size_hints import elements, expected
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.kernels.lib.device import memory_of_device
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits.kept_logits import losses_of_kept_logits
from fx_fusion.kernels.logits.logit_chunks import again_takes_longer
from fx_fusion.rewrite.deferral import deferrable_outputs
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.unread_logits import Operands, operands_of
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.torch_internals.dispatch import has_saved_tensor_hooks
from fx_fusion.torch_internals.nodes import is_erased

_FEWEST_CLASSES = 30000  # of a vocabulary; the widest layers that are none are narrower
_MOST_KEPT = 8  # logits that are kept for the backward have this part of the device's memory at most
_FEWEST_LOGITS = {"cuda": 2**26, "cpu": 2**24}  # below, they fit beside everything else, and launches cost more


# -- while a graph is rewritten ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Head:
    """A linear layer whose large result a graph trains, returns, as ``output``, and does not read."""

    linear: fx.Node
    operands: list[fx.Node]
    output: fx.Node


def heads(search: Search) -> list[Head]:
    """Every such layer of a graph that is not rewritten yet."""
    view = search.view
    found = []
    for node in view.graph.nodes:
        bound = view.arguments_of(node, "linear")
        if bound is None:
            continue
        operands = [bound[name] for name in ("input", "weight", "bias") if bound[name] is not None]
        plain = all(is_tensor(n) and why_not_plain(example(n)) is None for n in (node, *operands))
        if not plain or not is_large(example(node)) or not example(node).requires_grad or not view.effects.region[node][0]:
            continue
        outputs, _ = deferrable_outputs(search, [node], set(), operands)
        if len(outputs) == 1 and view.source(outputs[0]).base is node:  # it, or a cast of it that keeps its values
            found.append(Head(node, operands, outputs[0]))
    return found


def defer_for_a_loss_outside(found: Iterable[Head], editor: Editor) -> None:
    """Defer the results of those that no rewrite has touched."""
    for head in found:
        if not is_erased(head.linear) and editor.now(head.output) is head.output:
            editor.defer([head.output], head.operands, like=head.linear, of_linear=example(head.linear).dtype)


def is_large(logits: Tensor) -> bool:
    """Whether logits are those of a vocabulary, and too many to be made at once without need."""
    fewest = _FEWEST_LOGITS.get(logits.device.type)
    if fewest is None or logits.dim() == 0:
        return False
    return expected(logits.shape[-1]) >= _FEWEST_CLASSES and elements(logits) >= fewest


def may_wait(deferred: Any) -> bool:
    """Whether what is computed of deferred logits may be deferred, too. In a loss that is checkpointed alone it may not:
    when it runs again they have been read, and it would save other tensors."""
    alike = deferred.source.recipe.is_checkpointed or not has_saved_tensor_hooks()
    return alike and is_large(deferred) and torch.is_grad_enabled()


# -- while the loss is computed ------------------------------------------------------------------------------------------
def cross_entropy_of_unread(
    input: Any, target: Any, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """``F.cross_entropy`` of logits that nobody has read, from what they would be computed of; None if it has to read them.
    Raises StaleTensorError if that has changed."""
    if size_average is not None or reduce is not None or not 0 <= label_smoothing <= 1:
        return None  # or PyTorch says what is wrong
    return loss_of_unread(input, target, weight, ignore_index, reduction, label_smoothing)


def loss_of_unread(
    input: Any, target: Any, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float = 0.0, *,
    of_log_probs: bool = False,
) -> Tensor | None:  # fmt: skip
    """The cross-entropy of deferred logits, or of the log-probabilities that are made of them; None if it has to read
    them."""
    if reduction not in ("mean", "sum", "none"):
        return None
    if not isinstance(target, Tensor) or type(target) is DeferredTensor or target.dtype != torch.int64:
        return None
    logits = _classes_last(input)
    if logits is None or logits.shape[:-1] != target.shape or not torch.is_grad_enabled() or not is_large(logits):
        return None
    around = autocast_dtype(input.device.type)
    of_weight = (input.dtype,) if around is None else (torch.float32, torch.bfloat16, torch.float16)
    plain = weight is None or (not weight.requires_grad and weight.dtype in of_weight and weight.dim() == 1)
    if not plain or target.device != input.device:
        return None
    if weight is not None and (len(weight) != logits.shape[-1] or weight.device != input.device):
        return None
    if not logits.is_cuda and not ((target == ignore_index) | ((target >= 0) & (target < logits.shape[-1]))).all():
        return None  # PyTorch's error
    found = None if input.has_hooks() else operands_of(logits)
    if found is None or found.log_probs != of_log_probs or found.negated:
        return None
    with torch.autocast(input.device.type, enabled=False), found.recipe.unfrozen():
        loss = _loss(found, target.reshape(-1), weight, reduction, ignore_index, label_smoothing)
    found.were_taken()
    loss = loss.view(target.shape) if reduction == "none" else loss
    return loss.to(input.dtype if around is None else torch.float32)


def _loss(
    found: Operands, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:  # fmt: skip
    x, lm_head, bias = found.for_a_product()
    if reduction == "none" and keeps_logits(found, x, lm_head):
        return losses_of_kept_logits(x, lm_head, bias, target, weight, ignore_index, label_smoothing, found.scale)
    options = (reduction, ignore_index, label_smoothing, 0.0, found.scale, found.needs, False)
    return linear_cross_entropy(x, lm_head, bias, target, weight, *options)[0]


def keeps_logits(found: Operands, x: Tensor, lm_head: Tensor) -> bool:
    """Whether a loss whose rows have gradients of their own had better keep its logits for the backward: x is wide, and they
    have a small part of the memory."""
    aligned = lm_head.shape[0] * x.element_size() % 16 == 0
    return aligned and may_keep(found, x, lm_head) and again_takes_longer(x.shape[1], x.dtype, x.device.type)


def may_keep(found: Operands, x: Tensor, lm_head: Tensor) -> bool:
    """Whether the logits may be kept for the backward. Tensors that hooks pack, of checkpoints or offloading, are the
    inputs, not what is kept beside them. Of several losses each would keep the logits."""
    if has_saved_tensor_hooks() or found.recipe.is_checkpointed or found.taken_again():
        return False
    return x.shape[0] * lm_head.shape[0] * x.element_size() * _MOST_KEPT <= memory_of_device(x)


def _classes_last(logits: Any) -> Any:
    """Logits (rows, classes), or (batch, length, classes) below the transposition that ``F.cross_entropy`` wants; None for
    others."""
    if logits.dim() == 2:
        return logits
    step = logits.step() if logits.dim() == 3 else None
    swaps = step is not None and (
        (step.func is torch.Tensor.transpose and {d % 3 for d in step.args} == {1, 2})
        or (step.func is torch.Tensor.permute and step.args in ((0, 2, 1), ((0, 2, 1),)))
    )
    return step.below if swaps and step is not None and step.grad else None
