"""All fusions: every file of ``fx_fusion/patterns`` that defines ``FUSION``. There is no list to append to."""

from __future__ import annotations

import functools
import graphlib
import importlib
from collections.abc import Iterable
from pathlib import Path

from fx_fusion.errors import DeclarationError, nearest
from fx_fusion.fusion.declaration import Fusion


@functools.cache
def all_fusions() -> tuple[Fusion, ...]:
    """Every declared fusion, in the order in which they are tried."""
    folder = Path(__file__).parent.parent / "patterns"
    fusions = []
    for file in sorted(folder.glob("*.py")):
        fusion = getattr(importlib.import_module(f"fx_fusion.patterns.{file.stem}"), "FUSION", None)
        if fusion is None:
            raise DeclarationError(f"{file.name} declares no FUSION; what several patterns share stands in patterns/sites.")
        if fusion.name != file.stem:
            raise DeclarationError(f"{file.name} declares the fusion {fusion.name!r}; both must have one name.")
        fusions.append(fusion)
    return in_order(fusions)


def in_order(fusions: Iterable[Fusion]) -> tuple[Fusion, ...]:
    """The fusions such that each comes before those that it names in ``before``, by name where that leaves a choice. Raises
    DeclarationError for a name that does not exist, and for fusions that are each before the other."""
    by_name = {fusion.name: fusion for fusion in sorted(fusions, key=lambda f: f.name)}
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter(dict.fromkeys(by_name, ()))
    for fusion in by_name.values():
        for name in fusion.before:
            if name not in by_name:
                raise DeclarationError(
                    f"fusion {fusion.name!r} is before {name!r}, which does not exist. {nearest(name, [*by_name])}"
                )
            sorter.add(name, fusion.name)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise DeclarationError(f"fusions can't each be before the next: {' before '.join(error.args[1])}.") from error
    order: list[Fusion] = []
    while sorter.is_active():
        for name in sorted(sorter.get_ready()):
            order.append(by_name[name])
            sorter.done(name)
    return tuple(order)


def fusion_named(name: str) -> Fusion:
    """The fusion of this name."""
    return next(f for f in all_fusions() if f.name == name)
