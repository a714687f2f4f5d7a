"""Run ops on CPU tensors: their references, or their kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fx_fusion.graph.dtypes import keeps_values

_kernels: ContextVar[bool | None] = ContextVar("kernels on CPU", default=None)


def interpreting() -> bool:
    """Return True if kernels run on CPU tensors, in Triton's interpreter: with ``TRITON_INTERPRET=1``, but for what
    ``kernels_on_cpu`` says."""
    chosen = _kernels.get()
    return os.environ.get("TRITON_INTERPRET") == "1" if chosen is None else chosen


@contextlib.contextmanager
def kernels_on_cpu(run: bool) -> Iterator[None]:
    """Make ops inside run their kernels on CPU tensors, or not. Importing the kernels needs ``TRITON_INTERPRET=1`` then."""
    before = _kernels.set(run)
    try:
        yield
    finally:
        _kernels.reset(before)


class Reference:
    """The function that an op computes, by the name of its module and its name there (``"package.module:function"``): it is
    the pattern of a fusion, whose file imports the op."""

    def __init__(self, where: str):
        self.where = where
        self._function: Callable[..., Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The function, imported when it is first asked for."""
        if self._function is None:
            module, _, name = self.where.partition(":")
            self._function = operator.attrgetter(name)(importlib.import_module(module))
        return self._function

    def __call__(self, named: dict[str, Any]) -> tuple[Any, ...]:
        """Its results for arguments by name, of one dtype where that loses nothing: kernels read each tensor in its own,
        PyTorch's norms on CPU refuse a narrower weight."""
        dtype = next(v.dtype for v in named.values() if isinstance(v, Tensor) and v.is_floating_point())
        return as_tuple(self.function(**{n: _widened(v, dtype) for n, v in named.items()}))


def as_tuple(result: Any) -> tuple[Any, ...]:
    """A result, or several, as a tuple."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _widened(item: Any, dtype: torch.dtype) -> Any:
    """A tensor in ``dtype`` if that has all of its values; anything else as it is."""
    narrower = isinstance(item, Tensor) and item.is_floating_point() and keeps_values(item.dtype, dtype)
    return item.to(dtype) if narrower else item
