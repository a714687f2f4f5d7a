"""Let something else stand for an object of another library while Dynamo captures a function for this backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

_PACKAGE = __package__.partition(".")[0]
_kept: list[Any] = []  # Dynamo knows objects by their ids, so what is registered must stay alive


def substitute(original: Any, stand_in: Callable[[str, Mapping[str, Any]], Any]) -> bool:
    """From now on, Dynamo captures something else where it meets ``original`` for this backend.

    Eager code and other backends see ``original``.

    Args:
        original: a function, or a class.
        stand_in: returns what is captured instead, or None for ``original`` itself. It is called with the name of the
            module whose code is being captured, and with the options that the backend was given.

    Returns False, and nothing is substituted, where Dynamo has no such table. Gone: that.
    """
    try:
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables.builder import VariableBuilder

        table = VariableBuilder._id_dispatch()
    except (ImportError, AttributeError):
        return False
    before = table.get(id(original))

    def captured(self: Any, value: Any) -> Any:
        try:
            options = _options(self.tx)
            instead = None if options is None else stand_in(str(self.tx.f_globals.get("__name__", "")), options)
        except Exception as error:
            warnings.warn(f"fx_fusion: nothing stands for {original!r}: {type(error).__name__}: {error}", stacklevel=2)
            instead = None
        if instead is not None:
            self.install_guards(GuardBuilder.ID_MATCH)
            place = AttrSource(self.tx.import_source(instead.__module__), instead.__name__)
            return VariableBuilder(self.tx, place)(instead)
        if before is not None:
            return before(self, value)
        del table[id(original)]
        try:
            return self._wrap(value)
        finally:
            table[id(original)] = captured

    table[id(original)] = captured
    _kept.append(original)
    return True


def _options(tx: Any) -> Mapping[str, Any] | None:
    """Return the options of the backend that a function is captured for; None where the backend is not of this package."""
    options: Mapping[str, Any] = {}
    backend = getattr(getattr(tx, "output", None), "compiler_fn", None)
    while backend is not None:
        if str(getattr(backend, "__module__", "")).partition(".")[0] == _PACKAGE:
            return options
        arguments = getattr(backend, "kwargs", None) or getattr(backend, "keywords", None) or {}
        given = arguments.get("options")
        if not isinstance(given, Mapping):  # validated, by a backend of this package that others are made of
            given = {"front_ends": getattr(given, "front_ends", True)}
        options = {**options, **given}
        inside = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn", "func", "__wrapped__")
        backend = next((found for name in inside if (found := getattr(backend, name, None)) is not None), None)
    return None
