"""Eager in float64: what a program's numbers are measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16}


class _Double(TorchFunctionMode):
    """No floating-point number is rounded to less than float64, whatever the program asks for.

    Of a program in lower precision a cast is a copy, as it mostly is there; in float32 ``x.float()`` is x itself.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.same = {dtype, torch.float64} if dtype == torch.float32 else {torch.float64}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = self._cast_to(func, args, kwargs)
        if target is not None:
            return args[0] if target in self.same else args[0].clone()
        if kwargs.get("dtype") in _LOW:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)

    def _cast_to(self, func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        if func in _CASTS:
            return _CASTS[func]
        if func is torch.Tensor.to:
            asked = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)]
            return asked[0] if asked and asked[0].is_floating_point else None
        return None


class _IntegersToDouble(TorchFunctionMode):
    """``mask.float()`` and ``mask.to(torch.float32)`` of integers are float64 too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = args[0] if args else None
        cast = func in _CASTS or func is torch.Tensor.to
        if (
            cast
            and isinstance(given, Tensor)
            and not given.is_floating_point()
            and isinstance(result, Tensor)
            and result.dtype in _LOW
        ):
            return result.double()
        return result


@contextlib.contextmanager
def in_double(dtype: torch.dtype) -> Iterator[None]:
    """Yield what runs inside runs in float64; ``dtype`` is what the program has without."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _IntegersToDouble(), _Double(dtype):
            yield
    finally:
        torch.set_default_dtype(before)
