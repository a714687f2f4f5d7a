"""What deferred logits that nobody has read would be computed of: for losses that take that instead.

    logits = x · Wᵀ + b,  of all rows or of slices of them
    scaled = scale · logits                        where a number divides or multiplies them
    log p  = scaled − log Σ_c exp(scaled_c)        behind a log_softmax over the classes, or minus that
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.runtime.recipe import Recipe
from fx_fusion.runtime.sources import in_turn
from fx_fusion.runtime.tensor_methods import CASTS
from fx_fusion.torch_internals.dispatch import has_saved_tensor_hooks
from fx_fusion.torch_internals.fsdp import is_freed

_LAYOUTS = {getattr(torch.Tensor, name) for name in ("view", "reshape", "flatten", "contiguous")}


def log_softmax_of_rows(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """``log_softmax`` over the last dim, computed in ``dtype``."""
    return torch.log_softmax(logits, -1, dtype=dtype)


def log_softmax_written_out(logits: Tensor) -> Tensor:
    """Logits minus the logarithm of the sum of their exponentials."""
    return logits - torch.logsumexp(logits, -1, True)


def scaled(logits: Tensor, numerator: float, denominator: float) -> Tensor:
    """Logits times or over a number; the other of the two is 1."""
    return logits * numerator if denominator == 1 else logits / denominator


def negated(log_probs: Tensor) -> Tensor:
    """Minus log-probabilities."""
    return -log_probs


@dataclass(frozen=True)
class Operands:
    """What a linear layer makes logits of: ``rows`` (..., width) that are laid out as they are, and its weight and bias;
    ``scale``: what they are multiplied by; ``log_probs``: whether a log_softmax follows; ``negated``: and a minus."""

    recipe: Recipe
    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    log_probs: bool
    negated: bool = False

    @property
    def is_the_linear_layer(self) -> bool:
        """Whether nothing is computed of its result."""
        return self.scale == 1 and not self.log_probs

    @property
    def needs(self) -> list[bool]:
        """Whether the rows, the weight and the bias need a gradient."""
        return [t is not None and t.requires_grad for t in (self.rows, self.weight, self.bias)]

    def taken_again(self) -> bool:
        """Whether a loss that takes them takes rows that one took before."""
        made = _linear(self.recipe)[0]
        return self.recipe.rows_taken * made.shape[-1] + self.rows.numel() > made.numel()

    def were_taken(self) -> None:
        """Remember that a loss was computed of them."""
        again = self.taken_again()
        self.recipe.rows_taken += self.rows.numel() // self.rows.shape[-1]
        self.recipe.call.was_taken(again=again)

    def for_a_product(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (m, width), weight and bias in the dtype that the linear layer multiplies in."""
        rows, dtype = self.rows.reshape(-1, self.rows.shape[-1]), self.recipe.of_linear
        return rows.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)


def operands_of(logits: Any) -> Operands | None:
    """What unread logits are made of; None where there is more between than casts that keep values, other layouts of the
    rows, slices of them, a number that scales them and a log_softmax of what it all makes. Raises StaleTensorError if that
    has changed."""
    steps, tensor = [], logits
    while (step := tensor.step()) is not None:
        steps.append((step, tensor))
        tensor = step.below
    recipe = tensor.source.recipe
    if recipe.of_linear in (None, torch.float64) or recipe.inference or not recipe.grad:
        return None
    if any(map(is_freed, recipe.operands)) or (has_saved_tensor_hooks() and not recipe.is_checkpointed):
        return None  # a checkpointed loss alone runs again when they may have been read
    between = [t for step, _ in steps for _, t in step.between()]
    if any(t.has_hooks() for t in (tensor, *(made for _, made in steps), *between)):  # they want the gradient of the logits
        return None
    recipe.check()
    (x, lm_head, bias), classes, computed = _linear(recipe), tensor.shape[-1], _Computed()
    for step, made in reversed(steps):
        if not step.grad or made.dim() == 0 or made.shape[-1] != classes or not keeps_values(step.below.dtype, made.dtype):
            return None
        if step.func in _LAYOUTS:
            x = x.reshape(*made.shape[:-1], x.shape[-1])
        elif step.func is torch.Tensor.__getitem__:
            if not _keeps_classes(step.args[0], step.below.dim()):
                return None
            x = x[step.args[0]]
        elif step.func is in_turn:
            if not computed.read(step.below.dtype, step.args):
                return None
        elif step.func not in CASTS:
            return None
    if logits.dtype == torch.float64:
        return None
    if recipe.rows_taken:  # a loss again: there was a backward, perhaps, and a step by hand
        recipe.check_samples()
    return Operands(recipe, x, lm_head, bias, computed.scale, computed.log_probs, computed.negated)


@dataclass
class _Computed:
    """What is computed of logits: they are multiplied by ``scale``, a log_softmax follows, and a minus."""

    scale: float = 1.0
    log_probs: bool = False
    negated: bool = False

    def read(self, dtype: torch.dtype, calls: Sequence[Any]) -> bool:
        """Add what calls do to a tensor of this dtype; False for other calls."""
        for function, args, kwargs in calls:
            before, dtype = dtype, function(torch.empty((1, 1), dtype=dtype, device="meta"), *args, **kwargs).dtype
            if not keeps_values(before, dtype) or (self.log_probs and function is not negated) or self.negated:
                return False
            if function is scaled:
                self.scale *= args[0] / args[1]
            elif function in (log_softmax_of_rows, log_softmax_written_out):
                self.log_probs = True
            elif function is negated and self.log_probs:
                self.negated = True
            elif function not in CASTS:
                return False
        return True


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
