"""The tensor that computes itself when it is read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from fx_fusion.errors import StaleTensorError


class Recipe:
    """How a deferred value is computed, from what, and whether that is still what it was."""

    def __init__(
        self,
        module: Callable[..., Any],
        operands: Sequence[Any],
        name: str,
        autocast: tuple[str, torch.dtype, bool],
        grad: bool,
    ):
        self.module, self.operands, self.name, self.autocast = module, tuple(operands), name, autocast
        self.grad, self.inference = grad and torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.versions = [_version(o) for o in self.operands]

    def sources(self) -> tuple[Any, ...]:
        return self.operands

    def device(self) -> torch.device:
        return next(o.device for o in self.operands if isinstance(o, Tensor))

    def meta(self) -> Tensor:
        """Shape, stride and dtype of the result, by running the module on meta tensors."""
        metas = [torch.empty_like(o, device="meta") if isinstance(o, Tensor) else o for o in self.operands]
        with torch.no_grad(), self._autocast():
            return self.module(*metas)

    def check(self) -> None:
        """Raise StaleTensorError if an operand was written to since. (A write that PyTorch is not told of, through
        ``.data``, goes unnoticed.)"""
        for operand, version in zip(self.operands, self.versions, strict=True):
            if _version(operand) != version:
                raise StaleTensorError(
                    f"{self.name} is computed when it is first read, from tensors that must not have changed since the "
                    f"model ran; one of shape {tuple(operand.shape)} was changed in place (by an optimizer step?). Read "
                    f'{self.name} before that, or compile with options={{"defer_outputs": False}}.'
                )

    def compute(self) -> Tensor:
        self.check()
        # As the model would have computed it: in its grad mode and autocast, whatever is ambient now.
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), self._autocast():
            return self.module(*self.operands)

    def _autocast(self) -> Any:
        device, dtype, enabled = self.autocast
        if not enabled and not torch.is_autocast_enabled(device):
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=dtype, enabled=enabled)

    def again(self, sources: Sequence[Any]) -> Tensor:
        """The same computation on other operands (leaves, to differentiate it)."""
        self.check()
        with self._autocast():
            return self.module(*sources)


def _version(operand: Any) -> tuple[int, int] | None:
    if not isinstance(operand, Tensor) or operand.is_inference():
        return None
    return operand._version, operand.data_ptr()  # another pointer: ``.data`` was replaced


class _Link(torch.autograd.Function):
    """Makes a deferred tensor part of the autograd graph: code that differentiates it without ever asking for its
    values (a custom autograd.Function in C++) gets the gradients of its operands."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe | _Step, meta: Tensor, device: torch.device, *sources: Any) -> Any:
        ctx.recipe = recipe
        return _unlinked(recipe, meta, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        sources = ctx.recipe.sources()
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            leaves = [_plain(s).detach() if isinstance(s, Tensor) else s for s in sources]
            for n in wanted:
                leaves[n].requires_grad_()
            found = torch.autograd.grad(ctx.recipe.again(leaves), [leaves[n] for n in wanted], dy, allow_unused=True)
        grads: list[Any] = [None] * len(sources)
        for n, gradient in zip(wanted, found, strict=True):
            grads[n] = gradient
        return (None, None, None, *grads)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.materialize() if isinstance(tensor, DeferredTensor) else tensor


def _unlinked(recipe: Recipe | _Step, meta: Tensor, device: torch.device) -> DeferredTensor:
    tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        DeferredTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=False
    )
    tensor._recipe, tensor._value, tensor._steps = recipe, None, []
    return tensor


_ANSWERED = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_mkldnn",
        "is_sparse_csr",
        "itemsize",
        "nbytes",
    )
} | {
    getattr(torch.Tensor, name)
    for name in (
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "ndimension",
        "is_floating_point",
        "is_complex",
        "element_size",
        "is_contiguous",
        "get_device",
        "__len__",
        "storage_offset",
        "is_signed",
        "is_inference",
    )
}
# What only renames, casts or slices: the result is deferred too.
_KEPT_LAZY = {
    getattr(torch.Tensor, name)
    for name in (
        "detach",
        "float",
        "half",
        "bfloat16",
        "double",
        "to",
        "type_as",
        "view",
        "reshape",
        "flatten",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "contiguous",
        "narrow",
        "select",
        "__getitem__",
        "expand",
    )
}


class DeferredTensor(torch.Tensor):
    """A tensor whose values are computed at first use. Anything but a question about its type computes them."""

    _recipe: Recipe | _Step
    _value: Tensor | None
    _steps: list[weakref.ref[DeferredTensor]]

    @staticmethod
    def make(recipe: Recipe | _Step, meta: Tensor, device: torch.device) -> DeferredTensor:
        with torch._C.DisableTorchFunctionSubclass():
            if not recipe.grad or not any(isinstance(s, Tensor) and s.requires_grad for s in recipe.sources()):
                return _unlinked(recipe, meta, device)
            return _Link.apply(recipe, meta, device, *recipe.sources())

    def settle(self) -> None:
        """Compute every cast and view of the output that this tensor is (a view of): its values are about to change."""
        base = self
        while isinstance(base._recipe, _Step):
            base = base._recipe.below
        waiting = [base]
        while waiting:
            tensor = waiting.pop()
            tensor.materialize()
            waiting.extend(step for reference in tensor._steps if (step := reference()) is not None)

    def materialize(self) -> Tensor:
        """The tensor as the model would have returned it. Computed once."""
        if self._value is None:
            with torch._C.DisableTorchFunctionSubclass():
                self._value = self._recipe.compute()
        return self._value

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        try:
            return repr(self.materialize())
        except StaleTensorError as stale:
            return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}: {stale})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED and args[0]._value is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _KEPT_LAZY and isinstance(args[0], DeferredTensor) and args[0]._value is None:
            step = _Step(args[0], func, *tree_map(lambda item: item, (args[1:], kwargs)))
            if step.is_lazy():
                made = DeferredTensor.make(step, step.meta(), args[0].device)
                args[0]._steps.append(weakref.ref(made))
                return made
        if _writes(func):
            for written in args[:1]:
                if isinstance(written, DeferredTensor):
                    written.settle()
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs or {}))
        return func(*args, **kwargs)


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


class _Step:
    """A cast or view of a deferred tensor."""

    def __init__(self, below: DeferredTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.below, self.func, self.args, self.kwargs = below, func, args, kwargs
        self.grad = torch.is_grad_enabled() and func is not torch.Tensor.detach

    def is_lazy(self) -> bool:
        """No operand is another tensor, and it stays on its device."""
        flat = [*self.args, *self.kwargs.values()]
        flat += [i for item in flat if isinstance(item, (tuple, list)) for i in item]
        if self.func in (torch.Tensor.view, torch.Tensor.type_as) and any(isinstance(item, torch.dtype) for item in flat):
            return False
        return not any(isinstance(item, (Tensor, torch.device, str)) for item in flat)

    def sources(self) -> tuple[Any, ...]:
        return (self.below,)

    def again(self, sources: Sequence[Any]) -> Tensor:
        return self.func(sources[0], *self.args, **self.kwargs)

    def meta(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            below = torch.empty_strided(self.below.shape, self.below.stride(), dtype=self.below.dtype, device="meta")
            return self.func(below, *self.args, **self.kwargs)

    def compute(self) -> Tensor:
        with torch.set_grad_enabled(self.grad or self.func is torch.Tensor.detach):
            return self.func(self.below.materialize(), *self.args, **self.kwargs)
