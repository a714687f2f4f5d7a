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
_cheap: ContextVar[bool] = ContextVar("cheap", default=False)
CHEAP_KERNELS: set[str] = set()  # by name, those that cheap ops launched in a trace


@contextlib.contextmanager
def traced(*, cheap: bool = False) -> Iterator[None]:
    """Make launches inside nodes of the graph that is being traced: Inductor then launches the kernels itself.

    cheap: whether they may be made once more, for the backward (``fused_op``)."""
    before = _traced.set(True), _cheap.set(cheap)
    try:
        yield
    finally:
        _traced.reset(before[0])
        _cheap.reset(before[1])


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel[grid](*args, **options)``, or trace it. Kernels cast their float arguments to fp32: Triton's launcher
    passes fp32, Inductor's fp64, which would make the arithmetic fp64.

    What stands for a tensor that is not there is memory that the launcher allocated, no input: what Inductor computes and
    hands over as a view, as dropout(x) in rows, it stores once for each argument that it is."""
    if _traced.get():
        if _cheap.get():
            CHEAP_KERNELS.add(qualified_name(kernel))
        torch.library.wrap_triton(kernel)[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def qualified_name(kernel: Any) -> str:
    """The module and name of a kernel; empty where it has none."""
    function = getattr(kernel, "fn", None)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"


def is_traced() -> bool:
    """Return True if launches are traced."""
    return _traced.get()


def refuse_symbols(*numbers: Any) -> None:
    """Raise NotTraceable while tracing if one of the numbers by which a launcher chooses is symbolic."""
    if not all(isinstance(n, int) for n in numbers):
        refuse_tracing()


def refuse_tracing() -> None:
    """Raise NotTraceable while tracing, in a launcher whose host does more than launch: the op stays a call."""
    if is_traced():
        raise NotTraceable
