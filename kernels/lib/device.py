"""Properties of a tensor's device that launch plans depend on: multiprocessors and memory."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def stages_ahead(bytes_a_stage: int, x: Tensor) -> int:
    """Returns the pipeline stages of a loop whose loads go through shared memory: at most three, as many as fit on x's
    device. The stage being computed is in registers."""
    return max(1, min(3, 1 + (shared_memory(x) - (27 << 10)) // bytes_a_stage))


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """Returns the number of SMs of x's device; 2 on a CPU, so that several programs share the rows in tests too."""
    return _multiprocessors(x.device.index or 0) if x.is_cuda else 2


@functools.cache
def _shared_memory(index: int) -> int:
    return getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 48 << 10)


def shared_memory(x: Tensor) -> int:
    """Returns the bytes of shared memory that a program can use on x's device; on a CPU those of an H200."""
    return _shared_memory(x.device.index or 0) if x.is_cuda else 227 << 10


@functools.cache
def _memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory


def memory_of_device(x: Tensor) -> int:
    """Returns the bytes of memory of x's device, free or not; on a CPU those of an H200."""
    return _memory(x.device.index or 0) if x.is_cuda else 139 << 30
