"""Hooks on the gradient of a tensor that nobody has read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Hooks(list["Hook"]):
    """The hooks on one tensor. A hook refers to them weakly: what is in a cycle is freed late, or never under
    gc.disable()."""

    __slots__ = ("__weakref__",)


class Hook:
    """A hook on the gradient of a tensor that nobody has read: on the value as soon as there is one. FSDP puts one on every
    output of a module, to gather its parameters before the backward. Also its handle."""

    def __init__(self, tensor: Any, hook: Callable[[Tensor], Any]):
        self.function, self.handle = hook, None
        self._hooks = weakref.ref(tensor._hooks)  # which a loss that took the tensor has too, when the tensor itself is gone
        tensor._hooks.append(self)

    def register(self, value: Tensor) -> None:
        self.handle = value.register_hook(self.function)

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        elif (hooks := self._hooks()) is not None and self in hooks:
            hooks.remove(self)

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()
