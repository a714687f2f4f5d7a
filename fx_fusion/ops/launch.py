"""Launches of kernels: run them, or make them nodes of the graph that is being traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch


class NotTraceable(Exception):
    """Raised by a launcher that cannot be traced for its inputs: the op stays opaque."""


_traced: ContextVar[bool] = ContextVar("traced", default=False)  # of this thread: another one may launch for real


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Inside, launches become nodes of the graph that is being traced: Inductor then launches the kernels itself."""
    before = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(before)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel[grid](*args, **options)``, or trace it. Kernels cast their float arguments to fp32: Triton's launcher
    passes fp32, Inductor's fp64, which would make the arithmetic fp64."""
    if _traced.get():
        torch.library.wrap_triton(kernel)[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def refuse_tracing() -> None:
    """Raise NotTraceable while tracing, in a launcher whose host does more than launch: the op stays a call."""
    if _traced.get():
        raise NotTraceable
