"""For cost rules: sizes as a site will see them, without adding a guard, and whether it is trained."""

from __future__ import annotations

import math
from typing import Any

import torch

from fx_fusion.graph.devices import device_type
from fx_fusion.torch_internals.fakes import hint_of


def expected(size: Any) -> float:
    """A size, or the value that a symbolic one had when the graph was captured; infinity where it had none."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = hint_of(size)
    return math.inf if hint is None else int(hint)


def elements(tensor: torch.Tensor) -> float:
    """Return how many elements a tensor will have."""
    return math.prod(expected(size) for size in tensor.shape)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor will take; 0 where a size had no value."""
    count = elements(tensor)
    return 0 if math.isinf(count) else int(count) * tensor.dtype.itemsize


def trained(*tensors: torch.Tensor | None) -> bool:
    """Return True if a site's backward will run for one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def too_small(tensor: torch.Tensor, *, symbolic: bool = False) -> str | None:
    """Return why an op does not pay on a tensor of unknown and small size, or None. ``symbolic``: of the op's ``fused_op``.

    With static sizes Inductor launches the kernels itself, and with symbolic ones where the launchers take them, of all dims
    but the last. Otherwise it calls the op, which costs the host some 70 us forward and 130 us backward (H200 machine), a
    kernel of Inductor's some 20 us. From 2^24 elements on, the kernels of a step run longer than that and hide it.
    """
    static = all(isinstance(n, int) for n in (tensor.shape[-1:] if symbolic else (*tensor.shape, *tensor.stride())))
    if device_type(tensor) == "cuda" and not static and elements(tensor) < 2**24:
        return f"{elements(tensor):.0f} elements of dynamic size: below 2^24 the host's time for calling an op would show"
    return None
