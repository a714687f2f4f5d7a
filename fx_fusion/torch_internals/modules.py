"""Call a module by its own code, or through another function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def is_called_as_it_is(module: nn.Module) -> bool:
    """Return True where no ``module.compile()`` stands between a call and the module. Gone: True."""
    return getattr(module, "_compiled_call_impl", None) is None


def call_through(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let calls of a module be calls of a function, as ``module.compile()`` does. Gone: nothing changes."""
    if hasattr(module, "_compiled_call_impl"):
        module._compiled_call_impl = function


def called_as_it_is(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks. Gone: without them."""
    return getattr(module, "_call_impl", module.forward)(*args, **kwargs)
