"""Call a function as soon as another package's module is imported, without importing it now."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], object]


def after_import(name: str, action: Action) -> None:
    """Call ``action(module)`` once, after the module ``name`` is imported; now if it is imported already.

    An exception of the action becomes a warning, because it must not break the import of another package.
    """
    if name in sys.modules:
        _act(action, sys.modules[name])
        return
    _WAITING.actions[name] = action
    if _WAITING not in sys.meta_path:
        sys.meta_path.insert(0, _WAITING)


class _Waiting:
    """A finder that changes how the modules it waits for are executed. It finds every module where the others do.

    It has no base class, because ``importlib.abc`` takes longer to import than all of this package's top.
    """

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:  # fmt: skip
        action = self.actions.pop(name, None)
        if action is None:
            return None
        try:
            spec = importlib.util.find_spec(name)  # asks the other finders, because the name is not waited for here
        finally:
            self.actions[name] = action
        if spec is not None and spec.loader is not None:
            _act_after(spec.loader, lambda: self.actions.pop(name, None))
        return spec


def _act_after(loader: object, waiting: Callable[[], Action | None]) -> None:
    """Replace ``exec_module`` of one loader by itself and the action. Every module has a loader of its own."""
    execute: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if (action := waiting()) is not None:
            _act(action, module)

    loader.exec_module = exec_module  # type: ignore[attr-defined]


def _act(action: Action, module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:
        warnings.warn(
            f"`fx_fusion` could not register its backend with `{module.__name__}`: {type(error).__name__}: {error}. "
            "Call `torch.compile(model, backend=\"fx_fusion\")` yourself, with the package installed.",
            stacklevel=2,
        )  # fmt: skip


_WAITING = _Waiting()
