"""Capture graphs with Dynamo and leave its caches as they were.

Dynamo keeps what it compiles on the code objects of the functions it ran, counts it, and remembers sizes to tell which of
them change. A capture that is only looked at must not count: after eight of them a function would run in eager for good.

Gone: importing fails, and ``fx_fusion.explain`` raises; the backend does not need this module.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame, pgo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import DeletedGuardManagerWrapper

_UNLIMITED = 2**31
# Since torch 2.12 a compilation may have versions and limits of its own beside those of the user.
APART = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


@contextlib.contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Yield what is compiled inside is forgotten afterwards, and no limit of recompilations holds inside. A function that
    was compiled before keeps its versions; only where forgotten ones fill the cache are they dropped too, and compiled again
    at the next call."""
    known: dict[CodeType, set[int]] = {}  # the versions that a function had before

    def note(code: CodeType, _: CodeType) -> None:
        known.setdefault(code, {id(entry.guard_manager) for entry in _debug_get_cache_entry_list(code)})

    hook = convert_frame.register_bytecode_hook(note)
    sizes, compiles = copy.deepcopy(dict(pgo.get_code_state())), convert_frame.FRAME_COMPILE_COUNTER.copy()
    unlimited = {"recompile_limit": _UNLIMITED, "accumulated_recompile_limit": _UNLIMITED}
    try:
        with torch._dynamo.config.patch(unlimited):
            yield
    finally:
        hook.remove()
        for code, before in known.items():
            _forget(code, before)
        _restore(pgo.get_code_state(), sizes)
        _restore(convert_frame.FRAME_COMPILE_COUNTER, compiles)


def _forget(code: CodeType, before: set[int]) -> None:
    entries = _debug_get_cache_entry_list(code)
    config = torch._dynamo.config
    if not before or len(entries) >= (config.accumulated_recompile_limit // 2 if APART else config.recompile_limit):
        reset_code(code)
        return
    for entry in entries:
        owner = getattr(entry.guard_manager, "extra_state", None)  # None where another thread has dropped it meanwhile
        if id(entry.guard_manager) not in before and owner is not None:
            owner.invalidate(entry, DeletedGuardManagerWrapper("captured to be explained"))


def _restore(current: dict[Any, Any], saved: dict[Any, Any]) -> None:
    current.clear()
    current.update(saved)
