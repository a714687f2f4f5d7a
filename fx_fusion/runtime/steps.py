"""Handle a step of an optimizer for deferred outputs: they are computed from parameters, which it changes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fx_fusion.runtime.capture import is_capturing
from fx_fusion.torch_internals.dynamo import is_compiling

_SAMPLED = 4096  # elements of an operand


class _Recipe(Protocol):
    operands: tuple[Any, ...]
    owners: list[Any]
    stepped: bool
    grad: bool
    graph: Any

    def keep(self, changing: Spans, copies: dict[int, Tensor]) -> None: ...
    def read_numbers(self) -> None: ...
    def forget_copies(self, called_with: Sequence[Any]) -> None: ...


_WAITING: weakref.WeakSet[_Recipe] = weakref.WeakSet()  # those that nobody has read yet
_CHANGING: weakref.WeakKeyDictionary[torch.optim.Optimizer, Spans] = weakref.WeakKeyDictionary()  # of steps that run
_LOCK = threading.Lock()  # of the set, which can't be walked while another thread adds to it


def wait(recipe: _Recipe) -> None:
    """Steps of optimizers matter to a recipe from now on."""
    with _LOCK:
        _WAITING.add(recipe)


def wait_no_more(recipe: _Recipe) -> None:
    with _LOCK:
        _WAITING.discard(recipe)


def waiting() -> list[_Recipe]:
    if not _WAITING:
        return []
    with _LOCK:
        return list(_WAITING)


class Spans:
    """The memory of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._spans = [_span(tensor) for tensor in tensors]

    def overlap(self, tensor: Tensor) -> bool:
        """Return True if a tensor has memory in common with them; of subclasses, whether it is one of them."""
        start, end = _span(tensor)
        return any(first < end and start < last for first, last in self._spans)


def _changed_by(optimizer: torch.optim.Optimizer) -> Spans:
    """The memory of the parameters that a step changes: of those that have a gradient."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return Spans(p for p in parameters if p.grad is not None)


def any_is_among(parameters: Sequence[weakref.ref[Tensor]], tensors: Sequence[Any]) -> bool:
    """Return True if one of the tensors has memory of a parameter, or a parameter is gone."""
    spans = Spans(t for t in tensors if parameters and isinstance(t, Tensor))
    return any((p := reference()) is None or spans.overlap(p) for reference in parameters)


def _is_plain(tensor: Any) -> bool:
    """Return True if it is a tensor with memory of its own, all in one piece."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Its first byte and the one behind its last; of others than plain tensors, and of those without bytes, a number."""
    if not _is_plain(tensor) or tensor.numel() == 0:
        return -id(tensor), -id(tensor) + 1
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + elements * tensor.itemsize


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Before a step, and whenever its closure has run the model (Lightning trains in one): copies for who reads later."""
    if is_compiling():
        return None
    _keep(optimizer)
    if _is_closure(kwargs.get("closure")):
        return args, {**kwargs, "closure": _Keeping(kwargs["closure"], optimizer)}
    place = _place_of_closure(type(optimizer).step)
    if 0 < place < len(args) and _is_closure(args[place]):
        return (*args[:place], _Keeping(args[place], optimizer), *args[place + 1 :]), kwargs
    return None


def _is_closure(item: Any) -> bool:
    return callable(item) and not isinstance(item, torch.nn.Module)


@functools.lru_cache(64)
def _place_of_closure(step: Callable[..., Any]) -> int:
    """Return which of its arguments a step calls ``closure``; -1 if none."""
    names = list(inspect.signature(step).parameters)
    return names.index("closure") if "closure" in names else -1


class _Keeping:
    """A closure of a step that trains the model, in front of what the step changes then."""

    def __init__(self, closure: Callable[..., Any], optimizer: torch.optim.Optimizer):
        self._closure, self._optimizer = closure, optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._closure(*args, **kwargs)
        _keep(self._optimizer)
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._closure, name)


def _keep(optimizer: torch.optim.Optimizer) -> None:
    """Copy what an optimizer is about to change, for who reads later."""
    if recipes := waiting():
        _CHANGING[optimizer] = changing = _changed_by(optimizer)
        _copy(recipes, changing)


def before_writes(
    positions: Sequence[int], held: Sequence[Tensor]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A layer around a compiled graph that writes to its arguments at these positions, and to tensors that it holds: an
    optimizer's step, compiled."""

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if recipes := waiting():
                _copy(recipes, Spans([*held, *(args[i] for i in positions if isinstance(args[i], Tensor))]))
            return compiled(*args)

        return run if positions or held else compiled

    return wrap


def _copy(recipes: list[_Recipe], changing: Spans) -> None:
    """Copy what is about to change and recipes are made of. What is captured as a CUDA graph keeps nothing, nor does a step
    without memory for it, or one that another backend compiled: a read says so then."""
    copies = dict[int, Tensor]()
    for recipe in recipes:
        recipe.stepped = recipe.stepped or _has_lost_memory(recipe)
    if not is_capturing():
        with contextlib.suppress(torch.OutOfMemoryError):
            for recipe in recipes:
                recipe.keep(changing, copies)
    _mark(recipes, changing)


def _has_lost_memory(recipe: _Recipe) -> bool:
    """Return True if an operand is a result of a CUDA graph that ran again. Torch raises where one asks for its address."""
    try:
        for operand in recipe.operands:
            if isinstance(operand, Tensor) and _is_plain(operand):
                operand.data_ptr()
    except RuntimeError:
        return True
    return False


def _notice(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After a step."""
    if is_compiling():
        return
    changed = _CHANGING.pop(optimizer) if optimizer in _CHANGING else None
    if recipes := waiting():
        _mark(recipes, changed or _changed_by(optimizer))


def _mark(recipes: list[_Recipe], changed: Spans) -> None:
    """Fused optimizers write to parameters without telling their version counters."""
    for recipe in recipes:
        parts = (owner.sharded for owner in recipe.owners if owner is not None)
        tensors = (o for o in (*recipe.operands, *parts) if isinstance(o, Tensor))
        recipe.stepped = recipe.stepped or any(map(changed.overlap, tensors))


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_notice)


class Kept(torch.autograd.Function):
    """A copy of a parameter that is about to change. It has no gradient: the parameter's would be that of other values."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.detach().clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "the outputs of a model were differentiated after an optimizer step had changed the parameters that they are "
            "made of: call backward() before step(), or detach() them."
        )


def sample(operand: Any) -> Tensor | None:
    """Some elements of an operand, of all its columns: an optimizer that writes through ``.data`` changes one of them."""
    if not _is_plain(operand) or not operand.is_contiguous():
        return None
    flat = operand.detach().view(-1)
    return flat[:: flat.numel() // _SAMPLED | 1].clone()


def same_bits(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
