"""Sizes for cost rules: what a site will see, without adding a guard."""

from __future__ import annotations

import math
from typing import Any

import torch


def expected(size: Any) -> float:
    """A size, or the value that a symbolic one had when the graph was captured; infinity where it had none."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = getattr(size.node, "hint", None)
    return math.inf if hint is None else int(hint)


def elements(tensor: torch.Tensor) -> float:
    """How many elements a tensor will have."""
    return math.prod(expected(size) for size in tensor.shape)


def too_small(tensor: torch.Tensor) -> str | None:
    """Why an op does not pay on so small a tensor, or None.

    Calling an op costs the host some 100 us forward and 300 us backward (torch 2.11, H200 machine), a kernel that Inductor
    launches some 20 us. From 2^24 elements on, the kernels of a step run longer than that and hide it; below, a step
    that waits for the host would get slower (rms_norm alone, 16384 x 2048, forward + backward: 0.76 ms against 0.23 ms,
    all of it the host's). In whole Llama steps at 2^24 and 2^25 elements the ops are faster.
    """
    if tensor.device.type == "cuda" and elements(tensor) < 2**24:
        return f"{elements(tensor):.0f} elements: below 2^24 the host's time for calling an op would show"
    return None
