"""The dtype of what a function of torch makes of tensors, which autocast may widen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fx_fusion.graph.dtypes import autocast_dtype


def result_dtype(function: Callable[..., Tensor], device: str, *dtypes: torch.dtype, **options: Any) -> torch.dtype:
    """The dtype of ``function(*tensors, **options)``, of (1, 1) tensors of these dtypes on this type of device, under the
    autocast that is on."""
    return _under(function, device, dtypes, tuple(options.items()), autocast_dtype(device))


@functools.cache
def _under(
    function: Callable[..., Tensor], device: str, dtypes: tuple[torch.dtype, ...], options: tuple[tuple[str, Any], ...],
    around: torch.dtype | None,
) -> torch.dtype:  # fmt: skip
    tensors = (torch.zeros((1, 1), dtype=dtype, device=device) for dtype in dtypes)
    with torch.autocast(device, dtype=around, enabled=around is not None):
        return function(*tensors, **dict(options)).dtype
