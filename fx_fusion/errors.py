"""The ways in which fx_fusion fails. A guard's "no" is not an error: it is a sentence in the report."""

import difflib
from collections.abc import Iterable, Sequence


class DeclarationError(TypeError):
    """A fusion, pattern or op was declared in a way that can't work. Raised when its file is imported."""


class FusionError(RuntimeError):
    """One of our passes failed while compiling a graph. Raised only under ``options={"strict": True}``;
    otherwise the graph goes to Inductor unchanged and a warning names the pass and the reason."""


class OptionError(ValueError):
    """``options=`` holds a name or a value that neither fx_fusion nor Inductor knows."""


class StaleTensorError(RuntimeError):
    """A deferred tensor was read after a tensor that it is computed from had been changed in place."""


class TargetError(ValueError):
    """``python -m fx_fusion explain TARGET`` names nothing that can be explained."""


class VerificationError(RuntimeError):
    """``fx_fusion.verify`` can't compare this model, or ``options={"verify": ...}`` found a replaced site wrong."""


def nearest(name: str, valid: Sequence[str], also: Iterable[str] = ()) -> str:
    """The end of an error about an unknown name: the valid one that is most like it, and all of them but those in ``also``,
    which are valid too and too many."""
    valid = list(dict.fromkeys(valid))
    close = difflib.get_close_matches(name, [*valid, *sorted(also)], n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}."


def where_raised(error: BaseException) -> str:
    """The module of ours that raised, and what it said."""
    modules = []
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.startswith("fx_fusion.") and module != "fx_fusion.backend":
            modules.append(module.removeprefix("fx_fusion."))
        traceback = traceback.tb_next
    return f"{modules[-1] if modules else 'backend'} failed: {type(error).__name__}: {error}"
