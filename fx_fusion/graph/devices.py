"""Tell what a graph is planned for: the devices of its tensors, or a GPU that is not here.

A build of torch without CUDA has no CUDA tensors that take part in autograd, not even fake ones. So a graph is captured on
the CPU, and whoever asks where its tensors are in order to decide what pays is told of the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_gpu: ContextVar[str] = ContextVar("the GPU that is planned for", default="")  # in this thread


@contextlib.contextmanager
def planning_for(gpu: str) -> Iterator[None]:
    """Plan what this thread rewrites inside as if its CPU tensors were on a GPU of this name. Nothing of that may run. An
    empty name plans for the devices of the tensors."""
    before = _gpu.set(gpu)
    try:
        yield
    finally:
        _gpu.reset(before)


def planned_gpu() -> str:
    """The name of the GPU that this thread plans for, as ``NVIDIA H200``; empty without one."""
    return _gpu.get()


def device_type(tensor: torch.Tensor) -> str:
    """``cuda``, ``cpu`` ...: where ``tensor`` is, or would be."""
    kind = tensor.device.type
    return "cuda" if kind == "cpu" and _gpu.get() else kind


def gpu_name(tensor: torch.Tensor) -> str:
    """The name of the GPU that ``tensor`` is on, or would be; empty without one."""
    if _gpu.get():
        return _gpu.get()
    return torch.cuda.get_device_name(tensor.device) if torch.cuda.is_available() else ""
