"""Share what guards of several fusions say about dtypes and shapes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.devices import device_type
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.terms import same_shape

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def wrong_dtype(**tensors: Any) -> str | None:
    """Return why a kernel can't take one of these tensors (None: absent), or None."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in KERNEL_DTYPES:
            return f"{name} is {tensor.dtype}; the kernel takes float32, bfloat16 and float16"
    return None


def mixed_on_cpu(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> str | None:
    """Return why PyTorch's norms on CPU, which are the reference there, can't take these dtypes together, or None."""
    given = {t.dtype for t in (weight, bias) if t is not None and not keeps_values(t.dtype, x.dtype)}
    exact = {t.dtype for t in (weight, bias) if t is not None and keeps_values(t.dtype, x.dtype)}
    if device_type(x) != "cpu" or not given or (given == {torch.float32} and not exact):
        return None
    return f"x is {x.dtype} and its weight and bias are of several dtypes, which no norm on CPU takes"


def too_many_positions(images: torch.Tensor) -> str | None:
    """Return why a kernel can't count the positions of a channel in 32 bits (the last tile of it may end behind them), or
    None."""
    positions = math.prod(images.shape[2:])
    if statically_known_true(positions >= 2**30):
        return f"a channel of {positions} positions; the kernel takes fewer than 2^30"
    return None


def unlike_shapes(**pair: torch.Tensor) -> str | None:
    """Return why two tensors that a kernel walks together differ in shape, or None."""
    (a, one), (b, other) = pair.items()
    if same_shape(one, other):
        return None
    return f"{a} {tuple(one.shape)} and {b} {tuple(other.shape)} differ in shape; the kernel does not broadcast"


def unlike(**pair: torch.Tensor) -> str | None:
    """Return why two tensors that a kernel walks together differ in shape or dtype, or None."""
    (a, one), (b, other) = pair.items()
    if (why := unlike_shapes(**pair)) is not None:
        return why
    if one.dtype != other.dtype:
        return f"{a} is {one.dtype}, {b} is {other.dtype}; the kernel takes one dtype"
    return wrong_dtype(**{a: one})


def unlike_sum(x: torch.Tensor, residual: torch.Tensor) -> str | None:
    """Return why a kernel can't add these two, or None."""
    if (why := unlike_shapes(x=x, residual=residual)) is not None:
        return why
    if torch.promote_types(x.dtype, residual.dtype) not in (x.dtype, residual.dtype):
        return f"x is {x.dtype} and residual {residual.dtype}; their sum has neither dtype"
    return wrong_dtype(x=x, residual=residual)
