"""What a step of an optimizer means for outputs that nobody has read: they are made of parameters, which it changes."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fx_fusion.torch_internals.dynamo import is_compiling

_SAMPLED = 4096  # elements of an operand
_PLAIN = (Tensor, torch.nn.Parameter)


class _Recipe(Protocol):
    operands: tuple[Any, ...]
    owners: list[Any]
    stepped: bool
    graph: Any

    def keep(self, changing: set[int], copies: dict[int, Tensor]) -> None: ...
    def forget_copies(self) -> None: ...


_WAITING: weakref.WeakSet[_Recipe] = weakref.WeakSet()  # those that nobody has read yet
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


def memory_of(tensor: Tensor) -> int:
    """The same for a parameter and a view of it; of subclasses, for the same tensor."""
    plain = type(tensor) in _PLAIN and not tensor.is_meta
    return (tensor.untyped_storage().data_ptr() if plain else 0) or id(tensor)


def _changed_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {memory_of(p) for group in optimizer.param_groups for p in group["params"]}


def _keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step: copies for who reads later. A step that is compiled, or captured as a CUDA graph, keeps nothing, nor
    does one without memory for it: a read says so then."""
    if is_compiling() or not (recipes := waiting()):
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    changing, copies = _changed_by(optimizer), dict[int, Tensor]()
    try:
        for recipe in recipes:
            recipe.keep(changing, copies)
    except torch.OutOfMemoryError:
        return


def _notice(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After a step: fused optimizers write to parameters without telling their version counters."""
    if is_compiling() or not (recipes := waiting()):
        return
    changed = _changed_by(optimizer)
    for recipe in recipes:
        parts = (owner.sharded for owner in recipe.owners if owner is not None)
        tensors = (o for o in (*recipe.operands, *parts) if isinstance(o, Tensor))
        recipe.stepped = recipe.stepped or any(memory_of(t) in changed for t in tensors)


register_optimizer_step_pre_hook(_keep)
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
    if type(operand) not in _PLAIN or operand.is_meta or not operand.is_contiguous():
        return None
    flat = operand.detach().view(-1)
    return flat[:: flat.numel() // _SAMPLED | 1].clone()


def same_bits(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
