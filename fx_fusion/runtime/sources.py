"""How a deferred tensor is computed: as an output of a graph, or of another deferred tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fusion.runtime.recipe import Recipe
from fx_fusion.runtime.tensor_methods import CASTS
from fx_fusion.torch_internals.dispatch import without_torch_function


def in_turn(tensor: Tensor, *calls: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Tensor:
    """What functions with their other arguments make of a tensor, one behind the other."""
    for function, args, kwargs in calls:
        tensor = function(tensor, *args, **kwargs)
    return tensor


_NEVER_CHANGE = {int, float, bool, type(None), type(...), torch.dtype, torch.memory_format}


def _leaves(item: Any) -> Iterator[Any]:
    """Yield what containers hold, at any depth. The bounds of a slice are held by it."""
    if isinstance(item, slice):
        item = item.start, item.stop, item.step
    if isinstance(item, dict):
        item = tuple(item.values())
    if not isinstance(item, (tuple, list)):
        yield item
        return
    for inner in item:
        yield from _leaves(inner)


class Output:
    """One result of a recipe."""

    def __init__(self, recipe: Recipe, index: int):
        self.recipe, self.index, self.grad = recipe, index, recipe.grad

    def sources(self) -> tuple[Any, ...]:
        return self.recipe.operands

    def again(self, sources: Sequence[Any]) -> Tensor:
        return self.recipe.again(sources)[self.index]

    def compute(self) -> Tensor:
        return self.recipe.values()[self.index]


class Step:
    """A cast or view of a deferred tensor."""

    def __init__(self, below: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.below, self.func, self.args, self.kwargs = below, func, args, kwargs
        self.recipe: Recipe = below.source.recipe
        self.grad = torch.is_grad_enabled() and func is not torch.Tensor.detach
        self.inference = torch.is_inference_mode_enabled()
        last = below.step()
        self._between: list[weakref.ref[Any]] = []  # what ``below`` is after one call, two calls ... of ``in_turn``
        self.computes = func is in_turn or (last is not None and last.computes)  # not only a cast or view of an output

    def is_lazy(self) -> bool:
        """Return True if no operand can change, as tensors and arrays do, and the result stays on its device."""
        flat = list(_leaves((self.args, self.kwargs)))
        if self.func is torch.Tensor.to and any(type(item) is int for item in flat):  # a GPU by its number
            return False
        if self.func in (torch.Tensor.view, torch.Tensor.type_as) and any(isinstance(item, torch.dtype) for item in flat):
            return False
        if self.func is torch.Tensor.detach and self.computes:  # somebody keeps it: it should outlive a step
            return False
        return all(type(item) in _NEVER_CHANGE for item in flat)

    def begin_with(self, last: Step) -> None:
        """Be computed of what is below the step that made ``below``, if that is a cast or computes something: of ``below``
        itself only while somebody has it (and perhaps sets a hook)."""
        if last.func is in_turn or last.func in CASTS:
            calls = last.args if last.func is in_turn else ((last.func, last.args, last.kwargs),)
            self._between = [*last._between, weakref.ref(self.below)]
            self.below, self.args = last.below, (*calls, *self.args)

    def between(self) -> list[tuple[int, Any]]:
        """The tensors between that somebody has, and after how many calls they come."""
        return [(n + 1, tensor) for n, reference in enumerate(self._between) if (tensor := reference()) is not None]

    def sources(self) -> tuple[Any, ...]:
        return (self.below,)

    def again(self, sources: Sequence[Any]) -> Tensor:
        return self.func(sources[0], *self.args, **self.kwargs)

    def meta(self) -> Tensor | None:
        """Its type, without values; None where it is the tensor below itself (a cast that changes nothing)."""
        with without_torch_function(), torch.no_grad():
            below = torch.empty_strided(self.below.shape, self.below.stride(), dtype=self.below.dtype, device="meta")
            made = self.func(below, *self.args, **self.kwargs)
            return None if made is below else made

    def compute(self) -> Tensor:
        below, args = self.below, self.args
        for n, tensor in self.between():
            if tensor._value is not None:
                below, args = tensor, self.args[n:]
        below = below._value if below._value is not None else below.source.compute()
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad or self.func is torch.Tensor.detach):
            return self.func(below, *args, **self.kwargs)


Source = Output | Step
