"""All fusions: every file of ``fx_fusion/patterns`` that defines ``FUSION``. There is no list to append to."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from fx_fusion.errors import DeclarationError
from fx_fusion.fusion.declaration import Fusion


@functools.cache
def all_fusions() -> tuple[Fusion, ...]:
    """Every declared fusion, those that cover most first."""
    folder = Path(__file__).parent.parent / "patterns"
    found = []
    for file in sorted(folder.glob("*.py")):
        fusion = getattr(importlib.import_module(f"fx_fusion.patterns.{file.stem}"), "FUSION", None)
        if fusion is None:
            continue
        if fusion.name != file.stem:
            raise DeclarationError(f"{file.name} declares the fusion {fusion.name!r}; both must have one name.")
        found.append(fusion)
    return tuple(sorted(found, key=lambda f: -f.priority))


def fusion_named(name: str) -> Fusion:
    return next(f for f in all_fusions() if f.name == name)
