"""torch's compiler bisector, which finds by trying which part of a backend makes a program fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BACKEND, _SUBSYSTEM = "fx_fusion", "replacements"


def make_known() -> None:
    """Make it try this backend, behind Inductor: our replacements one by one. Gone: it does not know us."""
    bisector = _bisector()
    if hasattr(bisector, "BACKENDS") and hasattr(bisector, "BisectSubsystem"):
        bisector.BACKENDS.setdefault(_BACKEND, [bisector.BisectSubsystem(_SUBSYSTEM)])


def is_switched_off(describe: Callable[[], str]) -> bool:
    """Return True if it wants the next replacement left out; ``describe`` says which one it is. Gone: it never does."""
    known = getattr(_bisector(), "CompilerBisector", None)
    return bool(known is not None and known.disable_subsystem(_BACKEND, _SUBSYSTEM, describe))


def _bisector() -> Any:
    try:
        from torch._inductor import compiler_bisector
    except ImportError:
        return None
    return compiler_bisector
