"""Deferred outputs that a graph computes beside the loss, because somebody reads them in call after call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fx_fusion.torch_internals.dispatch import without_saved_tensor_hooks, without_torch_function


class Computed(torch.autograd.Function):
    """Gives values that a graph computed without gradients the gradients of the module that makes them."""

    @staticmethod
    def forward(ctx: Any, recipe: Any, *operands: Any) -> Any:
        ctx.recipe, ctx.operands = recipe, operands
        ctx.set_materialize_grads(False)
        assert recipe._computed is not None
        return tuple(value.data for value in recipe._computed)  # no views: autograd refuses to write to a view made here

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.recipe.names[0]} was computed beside the loss, as it is read in call after call; such logits have "
                'first derivatives only, and this is create_graph=True: compile with options={"defer_outputs": False}.'
            )
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        with torch.enable_grad(), without_torch_function(), without_saved_tensor_hooks():
            leaves = [o.detach() if isinstance(o, Tensor) else o for o in ctx.operands]
            for n in wanted:
                leaves[n].requires_grad_()
            values = ctx.recipe.again(leaves)
            pairs = [(y, dy) for y, dy in zip(values, dys, strict=True) if dy is not None]
            found = torch.autograd.grad(
                [y for y, _ in pairs], [leaves[n] for n in wanted], [dy for _, dy in pairs], allow_unused=True
            )
        grads: list[Any] = [None] * len(ctx.operands)
        for n, gradient in zip(wanted, found, strict=True):
            grads[n] = gradient
        return (None, *grads)
