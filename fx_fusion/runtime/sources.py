"""Say how a deferred tensor is computed: as an output of a graph, or by a call of other deferred tensors.

The calls between a graph's outputs and the tensors that somebody has are a record of what was done to them. A step of it
does not keep the tensors alive that it was called with, only how these are computed.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fx_fusion import errors
from fx_fusion.errors import StaleTensorError
from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.graph.indices import WHOLE, index_of
from fx_fusion.runtime.hook import Hooks
from fx_fusion.runtime.recorded_ops import ARITHMETIC, CHOICE, LAYOUT, LOSS, RECORDED, REDUCTION
from fx_fusion.runtime.tensor_methods import CASTS
from fx_fusion.torch_internals.dispatch import version_of, without_torch_function
from fx_fusion.torch_internals.fakes import FakeTensorMode

_NEVER_CHANGE = {int, float, bool, str, type(None), type(...), torch.dtype, torch.memory_format}
_SMALL = 16  # an operand of at most this part of the logits' elements is copied: it may be written to
_MOST_KNOWN = 4096  # types of results


def mapped(kinds: Any, change: Callable[[Any], Any], item: Any) -> Any:
    """Return containers with ``change`` of what is of these kinds in them. (A recorded op takes tuples, lists and
    dictionaries, and this is called for each: PyTorch's own function takes ten times as long.)"""
    if isinstance(item, kinds):
        return change(item)
    if type(item) in (tuple, list):
        return type(item)([mapped(kinds, change, inner) for inner in item])
    if type(item) is dict:
        return {name: mapped(kinds, change, inner) for name, inner in item.items()}
    return item


class NotRecorded(Exception):
    """A call whose result can't wait."""


class Source:
    """Says how one deferred tensor is computed.

    Attributes:
        recipe: of the graph's outputs that it is made of.
        meta: its shape, strides and dtype.
        grad: whether it is computed with gradients.
        autocast: the dtype of the autocast around the call; None where there is none.
        place: the line of the user's code that calls it, as a stack trace has it.
        classes: how many classes it has, of those of the logits; 0 for a number, or numbers of rows.
        computes: whether it is more than an output, or a cast or view of one.
        hooks: on its gradient.
        is_differentiated: somebody asks for the gradient of the tensor itself.
    """

    recipe: Any
    meta: Tensor
    grad: bool
    classes: int
    computes: bool

    def __init__(self) -> None:
        self.hooks, self.is_differentiated = Hooks(), False
        self._tensor: weakref.ref[Any] | None = None

    @property
    def is_number(self) -> bool:
        """Return True if it is computed of outputs and has no classes: a number, or numbers of rows."""
        return self.computes and not self.classes

    @property
    def tensor(self) -> Any:
        """The deferred tensor; None if nobody has it any more."""
        return None if self._tensor is None else self._tensor()

    def belongs_to(self, tensor: Any) -> None:
        """Remember the deferred tensor that this computes."""
        self._tensor = weakref.ref(tensor)

    def parents(self) -> list[Source]:
        """Return the deferred tensors that it is made of."""
        return []

    def operands(self) -> list[Any]:
        """Return what gradients go to: parents and tensors."""
        raise NotImplementedError

    def again(self, operands: Sequence[Any]) -> Tensor:
        """Compute it of other operands (leaves, to differentiate it)."""
        raise NotImplementedError

    def compute(self, value_of: Callable[[Source], Tensor]) -> Tensor:
        """Compute it of the values of its parents."""
        raise NotImplementedError


class Output(Source):
    """One result of a recipe."""

    def __init__(self, recipe: Any, index: int, meta: Tensor):
        super().__init__()
        self.recipe, self.index, self.grad, self.meta = recipe, index, recipe.grad, meta
        self.classes, self.computes = meta.shape[-1] if meta.dim() else 0, False

    def operands(self) -> list[Any]:
        return list(self.recipe.operands)

    def again(self, operands: Sequence[Any]) -> Tensor:
        return self.recipe.again(operands)[self.index]  # type: ignore[no-any-return]

    def compute(self, value_of: Callable[[Source], Tensor]) -> Tensor:
        return self.recipe.values()[self.index]  # type: ignore[no-any-return]


class Step(Source):
    """A call of a recorded op.

    Args:
        func: the op.
        args, kwargs: as it was called, with sources in place of deferred tensors that nobody has read.

    Raises NotRecorded where its result can't wait.
    """

    def __init__(self, recipe: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.recipe, self.func, self.kind = recipe, func, RECORDED[func]
        self._parents: list[Source] = []
        self._tensors: list[Tensor] = []
        self.numbers: list[float] = []
        self.args, self.kwargs = args, kwargs
        self.spec = (func, self._spec(args), self._spec(kwargs))
        device = recipe.device().type
        self.autocast, self.default = autocast_dtype(device), torch.get_default_dtype()
        self.place = PLACE.get() or _users_line()
        self.inference = torch.is_inference_mode_enabled()
        self.grad = torch.is_grad_enabled() and func is not Tensor.detach
        self.computes = self.kind != LAYOUT or any(p.computes for p in self._parents)
        self._check()
        self.meta = self._type()
        self.classes = self._classes()
        self._copy_small()

    # -- what it is called with ------------------------------------------------------------------------------------------
    def _spec(self, item: Any) -> Any:
        """Describe an argument; note the parents, the tensors and the numbers in it."""
        kind = type(item)
        if isinstance(item, Source):
            self._parents.append(item)
            return "parent"
        if kind in (Tensor, torch.nn.Parameter):
            self._tensors.append(item)
            return "tensor"
        if kind in (tuple, list, torch.Size):
            return (kind.__name__, *map(self._spec, item))
        if kind is dict:
            return ("dict", *((name, self._spec(value)) for name, value in item.items()))
        if kind is slice:
            return ("slice", *map(self._spec, (item.start, item.stop, item.step)))
        if kind is float or (kind is int and self.kind in (ARITHMETIC, LAYOUT)):  # a temperature, a count; a size
            self.numbers.append(item)
            return ("number", kind.__name__)
        if kind not in _NEVER_CHANGE:
            raise NotRecorded
        return (kind.__name__, item)

    def parents(self) -> list[Source]:
        return self._parents

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors with values that it takes."""
        return self._tensors

    def operands(self) -> list[Any]:
        return [*self._parents, *self._tensors]

    def _check(self) -> None:
        """Raise NotRecorded for a call that eager refuses, or whose result is no tensor of its own on the same device."""
        if self.kind == LAYOUT:
            words = [*self.args[1:], *self.kwargs.values()]
            if self._tensors or (self.func is Tensor.to and any(type(word) is int for word in words)):
                raise NotRecorded  # a tensor as an index; a GPU by its number
            if self.func in (Tensor.view, Tensor.type_as) and any(isinstance(word, torch.dtype) for word in words):
                raise NotRecorded
            if self.func is Tensor.detach and any(p.computes and p.classes for p in self._parents):
                raise NotRecorded  # somebody keeps it: it should outlive a step
            return
        if self.kwargs.get("out") is not None or self.kwargs.get("inplace"):
            raise NotRecorded
        if any(t.is_inference() or t.layout is not torch.strided for t in self._tensors):
            raise NotRecorded
        if self.kind == CHOICE and not (self._parents and self._parents[0].classes and _is_of_last_dim(self)):
            raise NotRecorded
        if self.kind in (CHOICE, LOSS) and not _are_in_range(self):
            raise NotRecorded

    def _type(self) -> Tensor:
        """Return the result on the meta device. Raises NotRecorded where there is none without values."""
        types = tuple(map(_type_of, (*(p.meta for p in self._parents), *self._tensors)))
        key = self.spec, types, tuple(map(comparable, self.numbers)), self.recipe.device(), self.autocast, self.default
        if key not in _types:
            if len(_types) == _MOST_KNOWN:
                _types.clear()
            _types[key] = self._traced()
        found = _types[key]
        if found is None:
            raise NotRecorded
        shape, stride, dtype = found
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def _traced(self) -> tuple[torch.Size, tuple[int, ...], torch.dtype] | None:
        device = self.recipe.device()
        tensors = iter(self._tensors)
        with without_torch_function(), FakeTensorMode(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")

            def fake(item: Any) -> Any:
                like, at = (item.meta, device) if isinstance(item, Source) else (next(tensors), item.device)
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=at)

            args, kwargs = mapped((Source, Tensor), fake, (self.args, self.kwargs))
            try:
                with _autocast(device.type, self.autocast):
                    made = self.func(*args, **kwargs)
            except Exception:  # eager raises it, with values
                return None
        if not isinstance(made, Tensor):
            return None
        if made.device != device or made.layout is not torch.strided:
            return None
        return torch.Size(made.shape), tuple(made.stride()), made.dtype

    @property
    def changes_nothing(self) -> bool:
        """Return True if it is a cast that returns its operand."""
        copies = self.kwargs.get("copy") or (self.func is Tensor.to and any(arg is True for arg in self.args[2:]))
        return self.func in _MAY_RETURN_ITSELF and not copies and _type_of(self._parents[0].meta) == _type_of(self.meta)

    def _classes(self) -> int:
        """Return how many classes the result has, as far as the sizes of its dims tell."""
        below = max(self._parents, key=lambda parent: parent.classes)
        before, after, classes = below.meta.shape, self.meta.shape, below.classes
        if not classes or not after:
            return 0
        if self.kind == LAYOUT and classes not in after:
            return after[-1] if before[-1] == classes and self._slices_the_last_dim(len(before)) else 0
        if classes not in after or (self.kind == LOSS and after != before):
            return 0
        if self.kind == REDUCTION and before[-1] == classes:
            dim = self.kwargs.get("dim", self.args[1] if len(self.args) > 1 else None)
            dims = dim if isinstance(dim, (tuple, list)) else (dim,)
            return 0 if any(d is None or d in (-1, len(before) - 1) for d in dims) else classes
        return classes

    def _slices_the_last_dim(self, dims: int) -> bool:
        if self.func is Tensor.narrow:
            return self.kwargs.get("dim", self.args[1] if len(self.args) > 1 else None) in (-1, dims - 1)
        index = index_of(self.args[1], dims) if self.func is Tensor.__getitem__ else None
        return index is not None and isinstance(index.items[-1], slice) and index.items[-1] != WHOLE

    def _copy_small(self) -> None:
        """Replace tensors that may be written to before they are read by copies; remember the version of large ones."""
        copies = {id(t): self.recipe.copy_of(t) for t in self._tensors if t.numel() * _SMALL <= self.recipe.elements}
        self._tensors = [copies.get(id(t), t) for t in self._tensors]
        self._versions = list(map(version_of, self._tensors))
        if copies:
            self.args, self.kwargs = mapped(Tensor, lambda t: copies.get(id(t), t), (self.args, self.kwargs))

    def check(self) -> None:
        """Raise StaleTensorError if a tensor that it takes was written to since."""
        for tensor, then in zip(self._tensors, self._versions, strict=True):
            if version_of(tensor) != then:
                raise StaleTensorError(
                    f"A tensor of shape {tuple(tensor.shape)} was changed in place after it went into what is computed of "
                    f"the deferred output `{self.recipe.names[0]}`, and before that was read. Hand over a copy "
                    "(tensor.clone()), or read the result before the change."
                )

    # -- its value -------------------------------------------------------------------------------------------------------
    def again(self, operands: Sequence[Any]) -> Tensor:
        given = iter(operands[: len(self._parents)])
        tensors = iter(operands[len(self._parents) :])
        args, kwargs = mapped(
            (Source, Tensor), lambda item: next(given if isinstance(item, Source) else tensors), (self.args, self.kwargs)
        )
        with _autocast(self.recipe.device().type, self.autocast), _default(self.default):
            return self.func(*args, **kwargs)  # type: ignore[no-any-return]

    def compute(self, value_of: Callable[[Source], Tensor]) -> Tensor:
        self.check()
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad or self.func is Tensor.detach):
            return self.again([*map(value_of, self._parents), *self._tensors])


PLACE: ContextVar[str] = ContextVar("the stack trace of the call that is made for a graph", default="")
_types: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = {}  # no tensors: they would stay
_OURS = tuple(f"{Path(str(module.__file__)).parent}/" for module in (torch, errors))  # and torch's
_MAY_RETURN_ITSELF = {*CASTS, Tensor.contiguous}


def comparable(number: float) -> Any:
    """Return a number, or a word for one that is not equal to itself."""
    return number if number == number else "nan"


def _users_line() -> str:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def _type_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """The autocast of a call; off where there was none."""
    if dtype is None and autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` the default of floats inside."""
    ambient = torch.get_default_dtype()
    if ambient == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(ambient)


def _is_of_last_dim(step: Step) -> bool:
    dim = step.kwargs.get("dim", next((arg for arg in step.args if type(arg) is int), None))
    return dim in (-1, step.parents()[0].meta.dim() - 1)


def _are_in_range(step: Step) -> bool:
    """Return True unless eager refuses classes or class weights: its error comes when the op is called."""
    classes = max(parent.classes for parent in step.parents())
    ignored = step.kwargs.get("ignore_index", -100) if step.kind == LOSS else None
    for tensor in step.tensors:
        if not tensor.is_floating_point():
            if tensor.dtype != torch.int64:
                return False
            if not tensor.is_cuda and not (((tensor >= 0) & (tensor < classes)) | (tensor == ignored)).all():
                return False
    weight = step.kwargs.get("weight")
    if weight is None or step.kind != LOSS:
        return True
    of_weight = (step.parents()[0].meta.dtype,) if step.autocast is None else (torch.float32, torch.bfloat16, torch.float16)
    return bool(weight.dtype in of_weight and not weight.requires_grad)


def in_order(wanted: Iterable[Source], *, values: bool = True) -> Iterator[Source]:
    """Yield sources and all that they are made of, what comes first in front. What has a value is not taken apart, unless
    ``values`` is False."""
    seen: set[Source] = set()
    stack = [(source, False) for source in reversed(list(wanted))]
    while stack:
        source, done = stack.pop()
        if done:
            yield source
        elif source not in seen:
            seen.add(source)
            stack.append((source, True))
            if not (values and has_value(source)):
                stack += [(parent, False) for parent in reversed(source.parents())]


def has_value(source: Source) -> bool:
    """Return True if the tensor that a source computes was computed."""
    tensor = source.tensor
    return tensor is not None and tensor._value is not None
