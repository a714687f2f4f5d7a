"""The ops of this package in ``torch.ops.fx_fusion``: defining them, and what Inductor makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from fx_fusion.errors import DeclarationError
from fx_fusion.ops.launch import NotTraceable, traced
from fx_fusion.torch_internals import lowerings

NAMESPACE = "fx_fusion"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
DEVICES = ("CPU", "CUDA")
PLAIN_FUNCTIONS: list[str] = []  # qualified names, for the compile cache
CHEAP_OPS: set[Any] = set()  # overloads that the backward may call again (``fused_op``)
_OVERLOADS: list[Any] = []
_LOWERINGS: dict[Any, Callable[..., Any]] = {}


def names() -> list[str]:
    """The names of the ops that were defined so far, backwards included."""
    return [overload.name().removeprefix(f"{NAMESPACE}::") for overload in _OVERLOADS]


def is_op(target: Any) -> bool:
    """Return True for one of these ops, which take tensors of any strides."""
    return any(target is overload for overload in _OVERLOADS)


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of torch's own ops that rewritten graphs call. AOTAutograd's cache takes graphs with it because it
    is named in ``PLAIN_FUNCTIONS``: its code is in our part of the key."""
    PLAIN_FUNCTIONS.append(f"{function.__module__}.{function.__qualname__}")
    return function


def define(name: str, schema: str) -> Any:
    """Define ``fx_fusion::name``; returns its overload. Raises DeclarationError for a schema that can't be read and for a
    name that is taken."""
    if name in names():
        raise DeclarationError(f"the op {name!r} is defined already and can't be replaced in this process: rename it.")
    try:
        LIBRARY.define(name + schema)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeclarationError(f"the schema of the op {name!r} can't be read: {schema}. {reason}") from error
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _OVERLOADS.append(overload)
    return overload


def plain_op(
    name: str,
    schema: str,
    launcher: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    lowering: Callable[..., Any] | None = None,
) -> Any:
    """Define an op without a gradient of its own (``fx_fusion::name``), for launchers that an autograd formula calls;
    returns its overload. ``lowering``: what Inductor makes of it, from its IR, instead of a call."""
    overload = define(name, schema)
    if lowering is not None:
        _LOWERINGS[overload] = lowering
    for device in DEVICES:
        LIBRARY.impl(name, on_its_device(launcher), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return overload


def register_lowerings() -> None:
    """Tell Inductor of every op."""
    lowerings.register(_OVERLOADS, _LOWERINGS)


def trace_launches(overload: Any, launcher: Callable[..., Any], *, cheap: bool = False, symbolic: bool = False) -> None:
    """Let AOTAutograd trace the op's launcher on CUDA tensors, instead of leaving a call of the op: on those of static size,
    and where the launcher takes it, of ``symbolic`` size too."""
    if cheap:
        CHEAP_OPS.add(overload)

    def launch(*args: Any) -> Any:
        with traced(cheap=cheap):
            return launcher(*args)

    def applies(args: tuple[Any, ...]) -> bool:
        return all(_is_traceable(a, symbolic) for a in args if isinstance(a, Tensor))

    lowerings.trace_instead(overload, applies, launch, NotTraceable, LIBRARY)


def _is_traceable(tensor: Tensor, symbolic: bool) -> bool:
    numbers = (*tensor.shape, *tensor.stride())
    sized = not has_free_unbacked_symbols(numbers) if symbolic else all(isinstance(n, int) for n in numbers)
    return tensor.device.type == "cuda" and sized


def register_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any], *, twice: bool = False
) -> None:  # fmt: skip
    """Connect an op with its gradient. ``twice``: the gradient is made of differentiable ops, and has a gradient itself;
    otherwise a backward with ``create_graph=True`` is an error (it would find zeros, or a part of the truth)."""
    once = backward if twice else first_derivatives_only(name, backward)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", once, setup_context=setup_context, lib=LIBRARY)


def first_derivatives_only(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of an op of this name; with ``create_graph=True`` it is an error."""

    def run(ctx: Any, *dys: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"fx_fusion::{name} has first derivatives only, and this backward is to be differentiated "
                "(create_graph=True). Run what needs second derivatives outside of the compiled function."
            )
        return backward(ctx, *dys)

    return run


def on_its_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher, run on the device of its first tensor, not on the current one."""

    def launch(*args: Any) -> Any:
        device = next(a.device for a in args if isinstance(a, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launcher(*args)
        with torch.cuda.device(device):
            return launcher(*args)

    return launch
