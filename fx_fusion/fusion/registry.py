"""All fusions: every file of ``fx_fusion/patterns`` that defines ``FUSION``, and those that plug-ins bring. There is no list
to append to."""

from __future__ import annotations

import functools
import graphlib
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fx_fusion.errors import DeclarationError, nearest
from fx_fusion.fusion.declaration import Fusion

GROUP = "fx_fusion.fusions"  # the entry points of installed plug-ins
_registered: list[Fusion] = []


@functools.cache
def all_fusions() -> tuple[Fusion, ...]:
    """Every declared fusion, plug-ins included, in the order in which they are tried."""
    return in_order((*built_in(), *plugins()))


@functools.cache
def built_in() -> tuple[Fusion, ...]:
    """The fusions of this package, by name."""
    folder = Path(__file__).parent.parent / "patterns"
    fusions = []
    for file in sorted(folder.glob("*.py")):
        fusion = getattr(importlib.import_module(f"fx_fusion.patterns.{file.stem}"), "FUSION", None)
        if fusion is None:
            raise DeclarationError(f"{file.name} declares no FUSION; what several patterns share stands in patterns/sites.")
        if fusion.name != file.stem:
            raise DeclarationError(f"{file.name} declares the fusion {fusion.name!r}; both must have one name.")
        fusions.append(fusion)
    return tuple(fusions)


# -- plug-ins ------------------------------------------------------------------------------------------------------
def register(fusion: Fusion) -> None:
    """Add a fusion to those that are tried in every graph that is compiled from now on.

    Raises DeclarationError for a name that is taken and for a ``before`` that can't be honored. Nothing happens when the
    same fusion is registered again."""
    installed()  # they come first: their names are taken
    _add(fusion)


def plugins() -> tuple[Fusion, ...]:
    """The fusions that others brought: installed ones first, then in the order of ``register``."""
    installed()
    return tuple(_registered)


@functools.cache
def installed() -> tuple[str, ...]:
    """Register the fusions that installed packages name as entry points of the group ``fx_fusion.fusions``; returns a
    sentence for each that could not be used. Such a one is left out with a warning, and the others are used."""
    def add(found: Any) -> None:
        for fusion in (found,) if isinstance(found, Fusion) else tuple(found):
            _add(fusion)

    return load_plugins(GROUP, add)


def load_plugins(group: str, add: Callable[[Any], None]) -> tuple[str, ...]:
    """Hand what installed packages name as entry points of a group to ``add``. Return a sentence for each that could not be
    used, and warn of it."""
    troubles = []
    for point in importlib.metadata.entry_points(group=group):
        try:
            add(point.load())
        except Exception as error:
            troubles.append(f"plug-in {point.name} ({point.value}) is not used: {type(error).__name__}: {error}")
            warnings.warn(f"fx_fusion: {troubles[-1]}", stacklevel=3)
    return tuple(troubles)


def _add(fusion: Fusion) -> None:
    if not isinstance(fusion, Fusion):
        raise DeclarationError(f"a plug-in gives a Fusion, or several; got {fusion!r}.")
    if fusion in _registered:
        return
    known = {f.name: f for f in (*built_in(), *_registered)}
    if fusion.name in known:
        where = known[fusion.name].pattern.__module__
        raise DeclarationError(f"fusion {fusion.name!r} of {fusion.pattern.__module__}: {where} has one of this name.")
    in_order((*known.values(), fusion))
    _registered.append(fusion)
    all_fusions.cache_clear()


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
