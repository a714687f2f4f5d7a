"""Dynamo's way with ``logger.warning_once(...)`` in a model, which ends the graph there: GPT-2's and BERT's loss then stands
in another graph than its logits."""

from __future__ import annotations

import functools
from typing import Any

import torch

_OURS = "fx_fusion"
_WRAPPERS = ("compiler_fn", "_torchdynamo_orig_backend", "func", "backend")


def warn_while_compiling() -> None:
    """From now on, a ``warning_once`` that this backend compiles is given when its line is compiled, and does not end the
    graph: it would be given once anyway. Other methods of loggers, messages that are no constants, and other backends are as
    they were. Gone: the graph ends there, and the report says so."""
    known, constants = _variables()
    original = getattr(known, "call_method", None)
    if original is None or not hasattr(constants, "create") or getattr(original, "warns_once", False):
        return

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "warning_once" and _is_ours(getattr(getattr(tx, "output", None), "compiler_fn", None)):
            method = getattr(getattr(self, "value", None), name, None)
            given = all(arg.is_python_constant() for arg in (*args, *kwargs.values()))
            if callable(method) and given and not _is_ignored(method):
                method(
                    *(arg.as_python_constant() for arg in args),
                    **{key: arg.as_python_constant() for key, arg in kwargs.items()},
                )
                return constants.create(None)
        return original(self, tx, name, args, kwargs)

    call_method.warns_once = True  # type: ignore[attr-defined]
    known.call_method = call_method


def _variables() -> tuple[Any, Any]:
    """Return what stands for a logger and for a constant while Dynamo traces."""
    try:
        from torch._dynamo.variables import ConstantVariable, misc
    except ImportError:
        return None, None
    return getattr(misc, "LoggingLoggerVariable", None), ConstantVariable


def _is_ignored(method: Any) -> bool:
    ignored = getattr(torch._dynamo.config, "ignore_logging_functions", ())
    return method in ignored or getattr(method, "__func__", None) in ignored


def _is_ours(compiler: Any) -> bool:
    """Return True if a backend, through what torch and tests wrap it in, is this one."""
    for _ in range(8):
        if compiler == _OURS or str(getattr(compiler, "__module__", "")).split(".")[0] == _OURS:
            return True
        compiler = next((getattr(compiler, name) for name in _WRAPPERS if hasattr(compiler, name)), None)
    return False
