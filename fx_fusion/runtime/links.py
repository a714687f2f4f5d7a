"""Gradients of deferred tensors: by computing them once more, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fusion.runtime.sources import Source
from fx_fusion.torch_internals.dispatch import (
    has_backward_hooks,
    history_of,
    without_saved_tensor_hooks,
    without_torch_function,
)


class DifferentiatedAgain(torch.autograd.Function):
    """Gives a number or losses of rows, which were computed without gradients, those of what they are made of."""

    @staticmethod
    def forward(ctx: Any, source: Source, told: Callable[[], object], value: Tensor, *operands: Any) -> Tensor:
        ctx.source, ctx.told = source, told
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"what was computed of {ctx.source.recipe.names[0]} beside a loss of it has first derivatives only, and "
                'this is create_graph=True: compile with options={"defer_outputs": False}.'
            )
        ctx.told()
        return (None, None, None, *gradients_of(ctx.source, ctx.needs_input_grad[3:], dy))


def gradients_of(source: Source, needed: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
    """Return the gradients of the operands of a number, or of losses of rows, by computing it once more."""
    source.recipe.call.was_differentiated()
    wanted = [n for n, is_needed in enumerate(needed) if is_needed]
    with torch.enable_grad(), without_torch_function(), without_saved_tensor_hooks():
        leaves, value = source.recipe.losses.again(source, wanted)
        found = torch.autograd.grad(value, [leaves[n] for n in wanted], dy, allow_unused=True)
    gradients: list[Tensor | None] = [None] * len(leaves)
    for n, gradient in zip(wanted, found, strict=True):
        gradients[n] = gradient
    return gradients


def upstream(ctx: Any, dy: Tensor, *, create_graph: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return a gradient of a deferred tensor behind the hooks that wait for it, and the tensor's value, if it was computed.
    Raises RuntimeError where the value has another gradient by now. ``create_graph``: there may be second derivatives."""
    if torch.is_grad_enabled() and not create_graph:
        raise RuntimeError(
            "a deferred tensor has first derivatives only where code differentiates it that never reads it (a custom "
            "autograd.Function, another compiled function), and this is create_graph=True: hand it tensor.clone()."
        )
    value, history = ctx.seen or (None, None)
    for hook in ctx.hooks if value is None else ():
        found = hook.function(dy)
        dy = dy if found is None else found
    if value is not None and (history_of(value) is not history or has_backward_hooks(value) or value.retains_grad):
        raise RuntimeError(
            "a deferred tensor was changed in place, or given a hook, and then differentiated by code that never reads "
            "it (a custom autograd.Function, a function compiled by itself): its gradient would be that of the "
            'unchanged tensor. Hand that code a copy (tensor.clone()), or compile with options={"defer_outputs": False}.'
        )
    return dy, value


def refuse_gradient_of_function() -> None:
    """Raise RuntimeError because gradients reach a deferred tensor by way of code that took it before it was read."""
    raise RuntimeError(
        "a custom autograd.Function took a deferred tensor, or what is made of it, before that was read; gradients of the "
        "tensor by way of the Function are not computed. Hand the Function a copy (tensor.clone()), or compile with "
        'options={"defer_outputs": False}.'
    )
