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
import torch.nn.functional as F
from torch import Tensor, fx

from fx_fusion.fusion.legality import why_not_plain
from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import autocast_dtype, keeps_values
from fx_fusion.graph.size_hints import elements, expected
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.rewrite.deferral import deferrable_outputs
from fx_fusion.rewrite.editor import Editor
from fx_fusion.runtime.deferred_tensor import TAKEN, DeferredTensor
from fx_fusion.runtime.recipe import Recipe
from fx_fusion.torch_internals.dispatch import has_saved_tensor_hooks
from fx_fusion.torch_internals.fsdp import is_freed
from fx_fusion.torch_internals.nodes import is_erased

_FEWEST_CLASSES = 30000  # of a vocabulary; the widest layers that are none are narrower
_FEWEST_LOGITS = {"cuda": 2**26, "cpu": 2**24}  # below, they fit beside everything else, and launches cost more
_CASTS = {getattr(torch.Tensor, name) for name in ("float", "half", "bfloat16", "double", "to")}
_LAYOUTS = {getattr(torch.Tensor, name) for name in ("view", "reshape", "flatten", "contiguous")}


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
        if not plain or not _is_large(example(node)) or not example(node).requires_grad or not view.effects.region[node][0]:
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


def _is_large(logits: Tensor) -> bool:
    fewest = _FEWEST_LOGITS.get(logits.device.type)
    if fewest is None or logits.dim() == 0:
        return False
    return expected(logits.shape[-1]) >= _FEWEST_CLASSES and elements(logits) >= fewest


# -- while the loss is computed ------------------------------------------------------------------------------------------
def _cross_entropy(
    input: Any, target: Any, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """``F.cross_entropy`` of logits that nobody has read, from what they would be computed of; None if it has to read them.
    Raises StaleTensorError if that has changed."""
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    if not isinstance(target, Tensor) or type(target) is DeferredTensor or target.dtype != torch.int64:
        return None
    logits = _classes_last(input)
    if logits is None or logits.shape[:-1] != target.shape or not torch.is_grad_enabled() or not _is_large(logits):
        return None
    plain = weight is None or (not weight.requires_grad and weight.dtype != torch.float64 and weight.dim() == 1)
    if not plain or target.device != input.device or not 0 <= label_smoothing <= 1:
        return None  # or PyTorch says what is wrong
    if weight is not None and (len(weight) != logits.shape[-1] or weight.device != input.device):
        return None
    if not logits.is_cuda and not ((target == ignore_index) | ((target >= 0) & (target < logits.shape[-1]))).all():
        return None  # PyTorch's error
    found = None if input.has_hooks() else operands_of(logits)
    if found is None:
        return None
    dtype = found.recipe.of_linear
    with torch.autocast(input.device.type, enabled=False), found.recipe.unfrozen():
        needs = [t is not None and t.requires_grad for t in (found.rows, found.weight, found.bias)]
        rows = found.rows.reshape(-1, found.rows.shape[-1])
        x, lm_head, bias = (None if t is None else t.to(dtype) for t in (rows, found.weight, found.bias))
        options = (reduction, ignore_index, label_smoothing, 0.0, 1.0, needs, False)
        loss = linear_cross_entropy(x, lm_head, bias, target.reshape(-1), weight, *options)[0]
    found.were_taken()
    loss = loss.view(target.shape) if reduction == "none" else loss
    return loss.to(input.dtype if autocast_dtype(input.device.type) is None else torch.float32)


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


@dataclass(frozen=True)
class Operands:
    """What a linear layer makes logits of: ``rows`` (..., width) that are laid out as they are, and its weight and bias."""

    recipe: Recipe
    rows: Tensor
    weight: Tensor
    bias: Tensor | None

    def were_taken(self) -> None:
        """Remember that a loss was computed of them."""
        recipe, made = self.recipe, _linear(self.recipe)[0]
        recipe.rows_taken += self.rows.numel() // self.rows.shape[-1]
        recipe.call.was_taken(again=recipe.rows_taken * made.shape[-1] > made.numel())


def operands_of(logits: Any) -> Operands | None:
    """What unread logits are made of; None where there is more between than casts that keep values, other layouts of the
    rows, and slices of them. Raises StaleTensorError if that has changed."""
    steps, tensor = [], logits
    while (step := tensor.step()) is not None:
        steps.append((step, tensor))
        tensor = step.below
    recipe = tensor.source.recipe
    if recipe.of_linear in (None, torch.float64) or recipe.inference or not recipe.grad:
        return None
    if any(map(is_freed, recipe.operands)) or (has_saved_tensor_hooks() and not recipe.is_checkpointed):
        return None  # a checkpointed loss alone runs again when they may have been read
    if tensor.has_hooks() or any(made.has_hooks() for _, made in steps):  # they want the gradient of the logits
        return None
    recipe.check()
    (x, lm_head, bias), classes = _linear(recipe), tensor.shape[-1]
    for step, made in reversed(steps):
        if not step.grad or made.dim() == 0 or made.shape[-1] != classes or not keeps_values(step.below.dtype, made.dtype):
            return None
        if step.func in _LAYOUTS:
            x = x.reshape(*made.shape[:-1], x.shape[-1])
        elif step.func is torch.Tensor.__getitem__:
            if not _keeps_classes(step.args[0], step.below.dim()):
                return None
            x = x[step.args[0]]
        elif step.func not in _CASTS:
            return None
    if logits.dtype == torch.float64:
        return None
    if recipe.rows_taken:  # a loss again: there was a backward, perhaps, and a step by hand
        recipe.check_samples()
    return Operands(recipe, x, lm_head, bias)


def _keeps_classes(index: Any, dims: int) -> bool:
    """Whether an index takes rows by slices and numbers, and all classes."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or isinstance(item, (int, slice)) for item in items):
        return False
    reaches = Ellipsis in items or len(items) == dims  # the last dim, with the last item
    return not reaches or items[-1] is Ellipsis or items[-1] == slice(None)


def _linear(recipe: Recipe) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight and bias of the linear layer of a recipe."""
    placeholders = recipe.module.graph.find_nodes(op="placeholder")
    node = next(n for n in recipe.module.graph.nodes if n.op == "call_function" and n.target is F.linear)
    given = dict(zip(placeholders, recipe.as_called(), strict=True))
    named = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
    bias = named.get("bias")
    return given[named["input"]], given[named["weight"]], None if bias is None else given[bias]


TAKEN[F.cross_entropy] = _cross_entropy
