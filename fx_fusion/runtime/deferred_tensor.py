"""The tensor that computes itself when it is read.

A ``Recipe`` computes some outputs of a graph that share memory, all at once. Each of them is a ``DeferredTensor``, and so is
a cast or view of one (a ``_Step``). Reading one of this family computes every member that is alive: eager would have had
all of them by now, and what is then written to one shows in its views and not in its copies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map, tree_map_only

from fx_fusion.errors import StaleTensorError
from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.runtime.tensor_methods import ANSWERED, KEPT_LAZY


def without_saved_tensor_hooks() -> contextlib.AbstractContextManager[Any]:
    """Keep what is computed inside away from ambient hooks on saved tensors. ``checkpoint`` counts what a function saves;
    what is computed once, or while a graph is compiled, is not saved again when the function runs again."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Recipe:
    """How outputs that share memory are computed, from what, and whether that is still what it was.

    Args:
        module: returns a tuple with one tensor for each of ``names``.
        operands: its arguments.
        names: of the outputs, as the graph calls them.
        autocast: device type, dtype, and whether autocast is on where the graph computes them.
        grad: whether the graph computes them with gradients.
    """

    def __init__(
        self,
        module: Callable[..., tuple[Tensor, ...]],
        operands: Sequence[Any],
        names: Sequence[str],
        autocast: tuple[str, torch.dtype, bool],
        grad: bool,
    ):
        self.module, self.operands, self.names, self.autocast = module, tuple(operands), tuple(names), autocast
        self.grad, self.inference = grad and torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.versions = [_version(o) for o in self.operands]
        self.family: list[weakref.ref[DeferredTensor]] = []  # in the order in which they were made
        self.stepped = False  # whether an optimizer has changed an operand since
        self._values: tuple[Tensor, ...] | None = None
        _WAITING.add(self)

    def device(self) -> torch.device:
        return next(o.device for o in self.operands if isinstance(o, Tensor))

    def is_traced(self) -> bool:
        """Whether the operands are fake: somebody asks for the types of the results and will never read them."""
        return any(isinstance(o, FakeTensor) for o in self.operands)

    def metas(self) -> tuple[Tensor, ...]:
        """Shape, stride and dtype of the results, by running the module on meta tensors."""
        metas = [torch.empty_like(o, device="meta") if isinstance(o, Tensor) else o for o in self.operands]
        with torch.no_grad(), self._autocast():
            return self.module(*metas)

    def check(self) -> None:
        """Raise StaleTensorError if an operand was written to since. (A write that PyTorch is not told of, through
        ``.data``, goes unnoticed.)"""
        for operand, version in zip(self.operands, self.versions, strict=True):
            if _version(operand) != version or self.stepped:
                name = self.names[0]
                raise StaleTensorError(
                    f"{name} is computed when it is first read, from tensors that must not have changed since the "
                    f"model ran; one of shape {tuple(operand.shape)} was changed in place (by an optimizer step?). Read "
                    f'{name} before that, or compile with options={{"defer_outputs": False}}.'
                )

    def values(self) -> tuple[Tensor, ...]:
        """The results, computed once: as the model would have, in its grad mode and autocast, whatever is ambient now."""
        if self._values is None:
            self.check()
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), self._autocast():
                self._values = self.module(*self.operands)
        return self._values

    def again(self, operands: Sequence[Any]) -> tuple[Tensor, ...]:
        """The same computation on other operands (leaves, to differentiate it)."""
        self.check()
        with self._autocast():
            return self.module(*operands)

    def settle(self) -> None:
        """Compute every tensor of the family that is alive."""
        with torch._C.DisableTorchFunctionSubclass(), without_saved_tensor_hooks():
            for member in self._members():
                if member._value is None:
                    member._value = member.source.compute()
                    member._history = member._value.grad_fn
            for member in self._members():  # what they were computed from is theirs no more
                member._source = None
        self._values = None
        _WAITING.discard(self)

    def _members(self) -> list[DeferredTensor]:
        return [tensor for reference in self.family if (tensor := reference()) is not None]

    def _autocast(self) -> Any:
        device, dtype, enabled = self.autocast
        if not enabled and autocast_dtype(device) is None:
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=dtype, enabled=enabled)


_WAITING: weakref.WeakSet[Recipe] = weakref.WeakSet()  # recipes that nobody has read yet


def _notice_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers write to parameters without telling their version counters."""
    if not _WAITING:
        return
    changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for recipe in list(_WAITING):
        recipe.stepped = recipe.stepped or any(id(operand) in changed for operand in recipe.operands)


register_optimizer_step_post_hook(_notice_step)


def _version(operand: Any) -> tuple[int, int] | None:
    if not isinstance(operand, Tensor) or operand.is_inference() or isinstance(operand, FakeTensor):
        return None
    return operand._version, operand.data_ptr()  # another pointer: ``.data`` was replaced


class _Output:
    """One result of a recipe."""

    def __init__(self, recipe: Recipe, index: int):
        self.recipe, self.index, self.grad = recipe, index, recipe.grad

    def sources(self) -> tuple[Any, ...]:
        return self.recipe.operands

    def again(self, sources: Sequence[Any]) -> Tensor:
        return self.recipe.again(sources)[self.index]

    def compute(self) -> Tensor:
        return self.recipe.values()[self.index]


class _Step:
    """A cast or view of a deferred tensor."""

    def __init__(self, below: DeferredTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.below, self.func, self.args, self.kwargs = below, func, args, kwargs
        self.recipe: Recipe = below.source.recipe
        self.grad = torch.is_grad_enabled() and func is not torch.Tensor.detach
        self.inference = torch.is_inference_mode_enabled()

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
        below = self.below._value if self.below._value is not None else self.below.source.compute()
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad or self.func is torch.Tensor.detach):
            return self.func(below, *self.args, **self.kwargs)


_Source = _Output | _Step


class _Link(torch.autograd.Function):
    """Makes a deferred tensor part of the autograd graph: code that differentiates it without ever asking for its
    values (a custom autograd.Function in C++) gets the gradients of its operands."""

    @staticmethod
    def forward(ctx: Any, source: _Source, meta: Tensor, device: torch.device, *sources: Any) -> Any:
        ctx.source = source
        tensor = _unlinked(source, meta, device)
        ctx.tensor = weakref.ref(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        tensor = ctx.tensor()
        value = None if tensor is None else tensor._value
        if value is not None and (value.grad_fn is not tensor._history or value._backward_hooks):
            raise RuntimeError(
                "a deferred tensor was changed in place, or given a hook, and then differentiated by code that never reads "
                "it (a custom autograd.Function): its gradient would be that of the unchanged tensor. Hand that code a "
                'copy (tensor.clone()), or compile with options={"defer_outputs": False}.'
            )
        sources = ctx.source.sources()
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass(), without_saved_tensor_hooks():
            leaves = [_plain(s).detach() if isinstance(s, Tensor) else s for s in sources]
            for n in wanted:
                leaves[n].requires_grad_()
            found = torch.autograd.grad(ctx.source.again(leaves), [leaves[n] for n in wanted], dy, allow_unused=True)
        grads: list[Any] = [None] * len(sources)
        for n, gradient in zip(wanted, found, strict=True):
            grads[n] = gradient
        return (None, None, None, *grads)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.materialize() if isinstance(tensor, DeferredTensor) else tensor


def _unlinked(source: _Source, meta: Tensor, device: torch.device) -> DeferredTensor:
    tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        DeferredTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=False
    )
    # Code in C++ that asks for the memory of a tensor that has none gets an error, not a null pointer.
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor._source, tensor._value, tensor._history, tensor._traced = source, None, None, False
    return tensor


def _around(value: Tensor) -> DeferredTensor:
    """What a compiler sees of a deferred tensor: ``value`` is a fake one."""
    tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        DeferredTensor, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device, requires_grad=False
    )
    tensor._source, tensor._value, tensor._history, tensor._traced = None, value, None, True
    return tensor


class DeferredTensor(torch.Tensor):
    """A tensor whose values are computed at first use. Anything but a question about its type computes them."""

    _source: _Source | None  # None once it is read
    _value: Tensor | None
    _history: Any  # the grad_fn of the value when it was computed
    _traced: bool  # stands around a fake tensor, for a compiler

    @staticmethod
    def all_of(recipe: Recipe, metas: Sequence[Tensor]) -> tuple[DeferredTensor, ...]:
        """The outputs of a recipe."""
        device = recipe.device()
        return tuple(DeferredTensor._make(_Output(recipe, i), meta, device) for i, meta in enumerate(metas))

    @staticmethod
    def _make(source: _Source, meta: Tensor, device: torch.device) -> DeferredTensor:
        with torch._C.DisableTorchFunctionSubclass():
            if not source.grad or not any(isinstance(s, Tensor) and s.requires_grad for s in source.sources()):
                tensor = _unlinked(source, meta, device)
            else:
                tensor = _Link.apply(source, meta, device, *source.sources())
        source.recipe.family.append(weakref.ref(tensor))
        return tensor

    @property
    def source(self) -> _Source:
        """How it is computed, until it is."""
        assert self._source is not None, "it was computed already"
        return self._source

    def materialize(self) -> Tensor:
        """The tensor as the model would have returned it. Computed once."""
        if self._value is None:
            self.source.recipe.settle()
        assert self._value is not None
        return self._value

    # -- as an input of another compiled function -------------------------------------------------------------------
    # torch.compile takes apart a subclass that says how: when the other function runs, ``_read`` gives it the values. While
    # it is traced, this class stands around a fake tensor, and does nothing of its own.
    @property
    def _read(self) -> Tensor:
        if self._traced:
            assert self._value is not None
            return self._value
        with torch._C.DisableTorchFunctionSubclass(), unset_fake_temporarily():
            return self.materialize().detach()

    def as_traced(self) -> Tensor:
        """The fake tensor inside, with the gradient of this one: a plain input for a graph that is called with values."""
        assert self._value is not None
        return self._value.detach().requires_grad_(self.requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_read"], None

    def _stable_hash_for_caching(self) -> str:
        """What the compile cache knows of this input of a graph: its type. Symbolic sizes are in the cache's guards."""
        value = self._value
        assert value is not None
        return str((value.dtype, value.device, tuple(value.shape), value.stride(), self.requires_grad))

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, outer_size: Any, outer_stride: Any) -> DeferredTensor:
        with torch._C.DisableTorchFunctionSubclass():
            return _around(inner["_read"])

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        try:
            return repr(self.materialize())
        except StaleTensorError as stale:
            return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}: {stale})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or torch._guards.CompileContext.current_compile_id() is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in ANSWERED and args[0]._value is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in KEPT_LAZY and isinstance(args[0], DeferredTensor) and args[0]._value is None:
            step = _Step(args[0], func, *tree_map(lambda item: item, (args[1:], kwargs)))
            if step.is_lazy():
                return DeferredTensor._make(step, step.meta(), args[0].device)
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default and args[0]._traced:
            return _around(func(args[0]._value))
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs or {}))
        return func(*args, **kwargs)
