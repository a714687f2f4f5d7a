"""The tensor that computes itself when it is read.

A ``Recipe`` computes some outputs of a graph that share memory, all at once. Each of them is a ``DeferredTensor``, and so is
what a recorded op (``runtime.recorded_ops``) makes of one. Reading one of this family computes every member that is alive:
eager would have had all of them by now, and what is then written to one shows in its views and not in its copies. Where a
loss is read, numbers and losses of rows are computed without the logits, which wait on (``rewrite.losses_outside``).
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fusion.errors import StaleTensorError
from fx_fusion.runtime.hook import Hook, Hooks
from fx_fusion.runtime.links import DifferentiatedAgain, gradients_of, refuse_gradient_of_function, upstream
from fx_fusion.runtime.recipe import Recipe, refuse_gradient
from fx_fusion.runtime.recorded_ops import LAYOUT, RECORDED, SPLITS, parts_of
from fx_fusion.runtime.sources import NotRecorded, Output, Source, Step, mapped
from fx_fusion.runtime.tensor_methods import ANSWERED
from fx_fusion.torch_internals.containers import tree_leaves, tree_map_only
from fx_fusion.torch_internals.dispatch import (
    history_of,
    is_in_functorch,
    preserved_version,
    throw_on_data_ptr,
    without_saved_tensor_hooks,
    without_torch_function,
    wrapper,
)
from fx_fusion.torch_internals.dynamo import is_asking, is_compiling, never_captured
from fx_fusion.torch_internals.fakes import fake_beside, unset_fake_temporarily
from fx_fusion.torch_internals.fsdp import is_its_hook

_WRITES = re.compile(r"[a-z]\w*[^_]_|__i\w+__")  # the name of a method: ``mul_``, ``__imul__``
# By ``inputs``, their argument at this place.
_DIFFERENTIATES = {torch.autograd.grad: 1, torch.autograd.backward: 5, torch.Tensor.backward: 4}


class _Link(torch.autograd.Function):
    """Makes a deferred tensor part of the autograd graph: code that differentiates it without ever asking for its
    values (a custom autograd.Function in C++) gets the gradients of its operands."""

    @staticmethod
    def forward(ctx: Any, source: Source, meta: Tensor, device: torch.device, *sources: Any) -> Any:
        ctx.source, ctx.is_ours = source, True
        tensor = _unlinked(source, meta, device)
        ctx.hooks, ctx.seen = source.hooks, tensor._seen  # the tensor itself may be gone when the gradient comes
        return tensor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        dy, value = upstream(ctx, dy)
        if value is None:
            ctx.source.recipe.check()
        ctx.source.recipe.call.was_differentiated()
        operands = ctx.source.operands()
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        with torch.enable_grad(), without_torch_function(), without_saved_tensor_hooks():
            values = ctx.source.recipe.values_of([o for o in operands if isinstance(o, Source)])
            plain = [values[o] if isinstance(o, Source) else o for o in operands]
            leaves = [s.detach() if isinstance(s, Tensor) else s for s in plain]
            for n in wanted:
                leaves[n].requires_grad_()
            found = torch.autograd.grad(ctx.source.again(leaves), [leaves[n] for n in wanted], dy, allow_unused=True)
        grads: list[Any] = [None] * len(operands)
        for n, gradient in zip(wanted, found, strict=True):
            grads[n] = gradient
        return (None, None, None, *grads)


class _LinkOfNumbers(torch.autograd.Function):
    """Makes a number, or losses of rows, part of the autograd graph, as ``_Link`` does. Its operands are what all of it is
    made of, because gradients by way of the logits would take logits."""

    @staticmethod
    def forward(ctx: Any, source: Source, *operands: Any) -> Any:
        ctx.source, ctx.is_ours = source, True
        tensor = _unlinked(source, source.meta, source.recipe.device())
        ctx.hooks, ctx.seen = source.hooks, tensor._seen
        return tensor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        dy, _ = upstream(ctx, dy)
        return (None, *gradients_of(ctx.source, ctx.needs_input_grad[1:], dy))


class _LinkOfValue(torch.autograd.Function):
    """Makes a deferred tensor whose value was computed part of the autograd graph of that."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredTensor, value: Tensor) -> DeferredTensor:
        ctx.mark_dirty(tensor)
        ctx.is_ours = True
        ctx.hooks, ctx.seen = (), (value, history_of(value))
        return tensor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, upstream(ctx, dy, create_graph=True)[0]


class _Given(torch.autograd.Function):
    """The values of a deferred tensor, with the gradient that the tensor itself was given."""

    @staticmethod
    def forward(ctx: Any, tensor: DeferredTensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy, None


def _unlinked(source: Source, meta: Tensor, device: torch.device) -> DeferredTensor:
    tensor = wrapper(DeferredTensor, meta, device)
    # Code in C++ that asks for the memory of a tensor that has none gets an error, not a null pointer.
    throw_on_data_ptr(tensor)
    tensor._source, tensor._value, tensor._inner, tensor._traced, tensor._given = source, None, None, False, None
    tensor._hooks, tensor._seen, tensor._taken, tensor._relatives = source.hooks, [], None, []
    tensor._is_given = tensor._is_connected = False
    tensor._link = None
    return tensor


def _around(value: Tensor, token: Tensor | None = None) -> DeferredTensor:
    """Return what a compiler sees of a deferred tensor: ``value`` and ``token`` are fake ones."""
    tensor = wrapper(DeferredTensor, value, value.device)
    tensor._source, tensor._value, tensor._inner, tensor._traced, tensor._given = None, value, None, True, token
    tensor._hooks, tensor._taken = Hooks(), None
    return tensor


class DeferredTensor(torch.Tensor):
    """A tensor whose values are computed at first use. Anything but a question about its type computes them."""

    _source: Source | None  # None once it is read
    _value: Tensor | None
    _inner: Tensor | None  # the value without history
    _given: Tensor | None  # the token: one object, as Dynamo's guards tell inputs apart by identity
    _traced: bool  # stands around a fake tensor, for a compiler
    _hooks: Hooks
    _taken: str | None  # the name of the output, if a loss took what it would be computed of before it was read
    _is_given: bool  # the value has the gradient that a custom Function gave the tensor
    _is_connected: bool  # the tensor has the gradient of its value
    _link: weakref.ref[Any] | None  # its node of the autograd graph before that; alive if somebody took the tensor then
    _relatives: list[weakref.ref[DeferredTensor]]  # all tensors of the recipe
    _seen: list[Any]  # the value, and history_of it when it was computed: for the autograd graph, which may live longer

    @staticmethod
    def all_of(recipe: Recipe, metas: Sequence[Tensor]) -> tuple[DeferredTensor, ...]:
        """The outputs of a recipe, which waits from now on."""
        recipe.wait()
        recipe.classes, recipe.elements = metas[0].shape[-1] if metas[0].dim() else 0, metas[0].numel()
        return tuple(DeferredTensor._make(Output(recipe, i, meta)) for i, meta in enumerate(metas))

    @staticmethod
    def _make(source: Source) -> DeferredTensor:
        recipe = source.recipe
        device = recipe.device()
        with without_torch_function():
            operands = [o.tensor if isinstance(o, Source) else o for o in source.operands()]
            grad = source.grad and (source.meta.is_floating_point() or source.meta.is_complex())
            if not grad or not any(isinstance(o, Tensor) and o.requires_grad for o in operands):
                tensor = _unlinked(source, source.meta, device)
            elif source.is_number:
                tensor = _LinkOfNumbers.apply(source, *recipe.losses.operands(source))
            else:
                tensor = _Link.apply(source, source.meta, device, *operands)
        source.belongs_to(tensor)
        recipe.family.append(weakref.ref(tensor))
        tensor._relatives = recipe.family
        return tensor

    @property
    def source(self) -> Source:
        """Return how it is computed, until it is."""
        assert self._source is not None, "it was computed already"
        return self._source

    def _check_gradient(self, hook: Any = None) -> None:
        """Raise RuntimeError if a loss took what this tensor would be computed of: its gradient would lack that loss.

        FSDP's own hook may be set: it is on the loss, too, and hands gradients on as they are."""
        source = self._source  # another thread may compute it in between
        taken = self._taken if source is None else source.recipe.names[0] if source.recipe.rows_taken else None
        if taken is not None and not is_its_hook(hook):
            refuse_gradient(taken)

    def _will_be_differentiated(self) -> None:
        """Let the gradients of what is computed of this tensor come through its value."""
        source = self._source
        if source is not None:
            source.is_differentiated = True

    def has_hooks(self) -> bool:
        """Return True if somebody waits for its gradient."""
        return bool(self._hooks)

    @never_captured
    def materialize(self) -> Tensor:
        """The tensor as the model would have returned it. Computed once."""
        source = self._source  # another thread may compute it in between
        if self._value is None and source is not None:
            source.recipe.read(source)
        assert self._value is not None
        if self._traced:
            return self._value
        if not self._value.requires_grad and torch.is_grad_enabled():
            with without_torch_function():
                if self._was_returned():  # as a reentrant checkpoint does
                    self._value, self._is_given = _Given.apply(self, self._value), True
        elif any(member._was_returned() and not member._is_given for member in self._family()):
            raise RuntimeError(
                "a custom autograd.Function changed a deferred tensor in place (`mark_dirty`). Its views would have another "
                'gradient than it has: hand the function tensor.clone(), or compile with options={"defer_outputs": False}.'
            )
        return self._value

    def give(self, value: Tensor) -> None:
        """Remember the value."""
        self._value, self._seen[:] = value, [value, history_of(value)]

    def differentiated_again(self, value: Tensor, told: Callable[[], object]) -> Tensor:
        """Return the value of a number, or of losses of rows, such that its gradient is computed by computing it once more.
        ``told`` is called when a gradient comes. Who asks for that of the tensor itself, later, would miss the loss."""
        source = self.source
        self._taken = source.recipe.names[0]
        with torch.enable_grad(), without_torch_function():
            return DifferentiatedAgain.apply(source, told, value, *source.recipe.losses.operands(source))

    def give_apart(self, value: Tensor) -> None:
        """Remember the value of a number or of losses of rows, which were computed apart from the rest of the family."""
        self.give(value)
        self._source = None
        with without_torch_function():
            if self.requires_grad and value.requires_grad:
                self._connect()

    def _connect(self) -> None:
        """Let gradients go to the value: what the tensor was made of may be freed."""
        if self._link is None:
            with without_torch_function():
                self._link = weakref.ref(self.grad_fn)
        self._is_connected = True
        with torch.enable_grad(), preserved_version(self), without_torch_function():
            self.detach_()
            _LinkOfValue.apply(self, self._value)

    def _disconnect(self) -> None:
        """Let no gradients go to the value, which was detached."""
        self._is_connected = False
        with preserved_version(self), without_torch_function():
            self.detach_()

    def _was_returned(self) -> bool:
        """Return True if a custom Function has returned this tensor: its history is no link of ours any more."""
        with without_torch_function():
            return self.grad_fn is not None and not getattr(self.grad_fn, "is_ours", False)

    def _family(self) -> list[DeferredTensor]:
        """Return the tensors of one recipe that were computed and are alive."""
        members = [tensor for reference in self._relatives if (tensor := reference()) is not None]
        return [tensor for tensor in members if tensor._value is not None and tensor._value.requires_grad]

    def as_subclass(self, cls: Any) -> Any:
        return self.materialize().as_subclass(cls)

    # -- as an input of another compiled function -------------------------------------------------------------------
    # Dynamo looks inside of a subclass whenever it checks its guards, and finds an empty token: nobody may want the values
    # (``rewrite.loss_behind_a_break``). Compiled code that does gets them by ``_read``. While it is traced, this class
    # stands around a fake tensor, and does nothing of its own.
    @property
    @never_captured
    def _token(self) -> Tensor:
        if self._given is None:
            with without_torch_function(), unset_fake_temporarily(), torch.inference_mode(False):
                self._given = torch.empty(0, dtype=self.dtype, device=self.device)
        return self._given

    @property
    @never_captured
    def _read(self) -> Tensor:
        if self._traced:
            return self.materialize()
        with without_torch_function(), unset_fake_temporarily():
            value = self.materialize()
            if self._inner is None or not self._inner.is_set_to(value):
                self._inner = value.detach()
            return self._inner

    def as_traced(self) -> Tensor:
        """The fake tensor inside, with the gradient of this one: a plain input for a graph that is called with values."""
        assert self._value is not None
        return self._value.detach().requires_grad_(self.requires_grad)

    @never_captured
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_read" if self._traced and not is_asking() else "_token"], None

    def _stable_hash_for_caching(self) -> str:
        """Return the type, which is what the compile cache knows of this input. Symbolic sizes are in the cache's guards."""
        value = self._value
        assert value is not None
        return str((value.dtype, value.device, tuple(value.shape), value.stride(), self.requires_grad))

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, outer_size: Any, outer_stride: Any) -> DeferredTensor:
        with without_torch_function():
            if "_read" in inner:
                return _around(inner["_read"])
            return _around(fake_beside(inner["_token"], outer_size, outer_stride), inner["_token"])

    @never_captured
    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        try:
            return repr(self.materialize())
        except StaleTensorError as stale:
            return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}: {stale})"

    @classmethod
    @never_captured
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            with without_torch_function():
                return func(*args, **kwargs)
        if func in ANSWERED and args[0]._value is None:
            with without_torch_function():
                return func(*args, **kwargs)
        if is_in_functorch():
            return cls._of_values(func, args, kwargs)
        if func is torch.Tensor.register_hook and args[0].requires_grad:
            args[0]._check_gradient(*args[1:], **kwargs)
            if (source := args[0]._source) is not None:
                with source.recipe.reading:
                    if args[0]._value is None:
                        return Hook(args[0], *args[1:], **kwargs)
        if func is torch.Tensor.retain_grad:
            args[0]._check_gradient()
            args[0]._will_be_differentiated()
        if func in _DIFFERENTIATES:
            return cls._differentiate(func, args, kwargs)
        if func is torch.Tensor.grad.__get__:  # type: ignore[attr-defined]
            with without_torch_function():
                if args[0].retains_grad:  # set by ``backward(inputs=[z])``, which does not reach the values of z
                    raise RuntimeError(
                        "`backward(inputs=[...])` computes no gradient of a deferred output. Call retain_grad() on it "
                        'before the loss, or compile with options={"defer_outputs": False}.'
                    )
        if func in SPLITS and args and isinstance(args[0], DeferredTensor) and args[0]._source is not None:
            sizes = tree_leaves((args[1:], kwargs))
            if not any(isinstance(item, torch.Tensor) for item in sizes):
                return tuple(args[0][index] for index in parts_of(args[0].shape, func, args[1:], kwargs))
        if func in RECORDED:
            found = cls._recorded(func, args, kwargs)
            if found is not None:
                return found
        return cls._of_values(func, args, kwargs)

    @classmethod
    def _differentiate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that starts a backward, also under ``no_grad``."""
        place = _DIFFERENTIATES[func]
        inputs = tree_leaves(kwargs.get("inputs", args[place] if len(args) > place else ()))
        waiting = [tensor for tensor in inputs if isinstance(tensor, DeferredTensor)]
        for tensor in waiting:
            tensor._check_gradient()
            if tensor._link is not None and tensor._link() is not None:
                refuse_gradient_of_function()
            tensor._will_be_differentiated()
        roots = [root for root in tree_leaves(args[:1]) if isinstance(root, DeferredTensor)]
        if waiting and all(t._value is None for t in waiting) and not any(root._value is None for root in roots):
            with without_torch_function():  # nobody has read them: only code that never does leads to them
                return func(*args, **kwargs)
        if waiting and any(root._was_returned() for root in roots):
            refuse_gradient_of_function()
        for tensor in waiting:
            tensor.materialize()  # before a loss that waits, whose gradient has to come through it
        with torch.enable_grad():
            args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _recorded(cls, func: Any, args: Any, kwargs: Any) -> DeferredTensor | None:
        """The result of a recorded op, deferred; None where it can't wait."""
        found: list[DeferredTensor] = []
        mapped(DeferredTensor, found.append, (args, kwargs))
        waiting = [tensor for tensor in found if tensor._source is not None]
        waiting.sort(key=lambda tensor: tensor._source is None or not tensor._source.recipe.grad)  # a teacher's last
        source = waiting[0]._source if waiting else None  # another thread may compute it in between
        if source is None or not source.recipe.records(RECORDED[func] == LAYOUT):
            return None
        recipe = source.recipe
        if any(tensor._was_returned() for tensor in waiting):
            return None  # its gradient is that of a custom Function
        others = (t._source for t in waiting if t._source is not None and t._source.recipe is not recipe)
        if any(other.classes and other.recipe.grad for other in others):
            return None  # who compares the logits of two calls needs both

        def read(tensor: DeferredTensor) -> Any:
            own = tensor._source is not None and tensor._source.recipe is recipe and tensor._value is None
            return tensor._source if own else tensor.materialize()

        with recipe.reading:
            args, kwargs = mapped(DeferredTensor, read, (args, kwargs))
            if waiting[0]._value is not None:
                return None
            try:
                step = Step(recipe, func, args, kwargs)
            except NotRecorded:
                return None
            if step.changes_nothing:
                return waiting[0]
            made = DeferredTensor._make(step)
        if step.is_number and not recipe.may_wait_for_a_number():
            recipe.read(step)
        return made

    @classmethod
    def _of_values(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function on the values. A method that writes to its tensor returns that tensor."""
        first = args[0] if args else None
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs))
        result = func(*args, **kwargs)
        if not (isinstance(first, DeferredTensor) and result is first._value and _WRITES.fullmatch(func.__name__)):
            return result
        if first._is_connected and isinstance(result, torch.Tensor):
            with without_torch_function():
                same = first.shape == result.shape
            if same and result.requires_grad:
                first._connect()  # to what it is now
            elif same:
                first._disconnect()
        return first

    @classmethod
    @never_captured
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default and args[0]._traced:
            return _around(func(args[0]._value))
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialize, (args, kwargs or {}))
        return func(*args, **kwargs)
