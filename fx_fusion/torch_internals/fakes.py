"""Fake tensors and symbolic numbers: what Dynamo traced a graph with."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

__all__ = [
    "NO_VALUES", "FakeTensor", "FakeTensorMode", "example_of", "fake_beside", "fake_mode_of", "hint_of", "lower_bound",
    "set_example", "storage_of", "unset_fake_temporarily", "without_guards", "without_tracing_context",
]  # fmt: skip

_EXAMPLE = "example_value"

try:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    NO_VALUES: tuple[type[BaseException], ...] = (DataDependentOutputException, DynamicOutputShapeException)
except ImportError:  # what these tell is then raised as it is
    NO_VALUES = ()
"""What is raised where code asks a fake tensor for values."""


def example_of(node: fx.Node) -> Any:
    """The example value that Dynamo traced ``node`` with: a fake tensor, a number, a tuple of them; None for none.
    Gone: AOTAutograd's key ``val`` is read; without that too, no node is a tensor and nothing is fused."""
    meta = node.meta
    return meta[_EXAMPLE] if _EXAMPLE in meta else meta.get("val")


def set_example(node: fx.Node, example: Any) -> None:
    """Give ``node`` an example value, where ``example_of`` looks for it."""
    node.meta[_EXAMPLE] = example


def fake_mode_of(tensor: Any) -> FakeTensorMode | None:
    """The mode of a fake tensor, or of one inside of a DTensor; None for anything else."""
    inside = getattr(tensor, "_local_tensor", tensor)
    return inside.fake_mode if isinstance(inside, FakeTensor) else None


def fake_beside(tensor: Tensor, size: Any, stride: Any) -> Tensor:
    """A tensor without values, of this size and the dtype and device of ``tensor``, for the compiler that made that one.
    Gone: of one that functorch wraps, raises RuntimeError."""
    mode = fake_mode_of(tensor) or getattr(torch._guards, "detect_fake_mode", lambda: None)()
    if mode is None and not tensor.is_meta:
        raise RuntimeError("a deferred tensor was taken apart by code that is no compiler: hand it tensor.clone()")
    with mode or contextlib.nullcontext():
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)


def without_guards(mode: FakeTensorMode | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which comparisons of symbolic sizes add no guard to the compilation.
    Gone: guards are added, and a graph may be compiled again where it need not be."""
    suppress = getattr(getattr(mode, "shape_env", None), "suppress_guards", None)
    return contextlib.nullcontext() if suppress is None else suppress()


def without_tracing_context() -> contextlib.AbstractContextManager[Any]:
    """A context in which fake tensors are of the mode that is entered: while a backend runs, the tracing context may already
    hold another, and FlexAttention's operator asks that one first.
    Gone: a graph with a softcap goes to Inductor unchanged."""
    tracing = getattr(torch._guards, "tracing", None)
    return contextlib.nullcontext() if tracing is None else tracing(None)


def storage_of(tensor: Tensor) -> int | None:
    """An identity of the memory behind a strided tensor, the same for all of its views; None where there is none (a wrapper
    subclass). Gone: raises AttributeError, and the graph goes to Inductor unchanged."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # wrapper subclasses own no storage
        return None


def hint_of(number: Any) -> Any:
    """The value that a symbolic number had when the graph was captured, None where it had none; a plain number is its own.
    Gone: None, and cost rules take the size for infinite."""
    return getattr(number.node, "hint", None) if isinstance(number, (torch.SymInt, torch.SymFloat)) else number


def lower_bound(number: torch.SymInt | torch.SymFloat, symbol: Any) -> Any:
    """The least value that the ShapeEnv of ``number`` allows ``symbol``, a sympy symbol in its expression.
    Gone: minus infinity, and masks that need the sign of a size are not proved."""
    bounds = getattr(number.node.shape_env, "bound_sympy", None)
    return -math.inf if bounds is None else bounds(symbol).lower


def constant(size: Any) -> Any:
    """Return a symbolic size that only one value is left for as that value, any other size as it is. Gone: as it is."""
    expression = getattr(size.node, "expr", None) if isinstance(size, torch.SymInt) else None
    return int(expression) if expression is not None and expression.is_number else size


def expression_of(number: torch.SymInt | torch.SymFloat) -> Any:
    """The sympy expression of a symbolic number. Gone: raises AttributeError, and the mask that reads it is not proved."""
    return number.node.expr
