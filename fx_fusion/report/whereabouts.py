"""Find the place of the model that a report is asked for, and suggest others where it is not there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable

_LINE = re.compile(r"(.+):(\d+)")
_SHOWN = 5  # lines or names that are shown instead of another
_LISTED = "To list the modules with a site, print the report (the command without `--why`)."
EXAMPLE = "a module, as layers.3.norm, or a line, as model.py:12"


def checked(place: object) -> str:
    """The place without ``self.`` in front. Raises TypeError or ValueError where it can be none."""
    if not isinstance(place, str):
        raise TypeError(f"why() takes the name of {EXAMPLE}; got {place!r}")
    place = place.strip()
    if not place:
        raise ValueError(f"why() takes the name of {EXAMPLE}; got an empty string. All there is: print(report)")
    return place.removeprefix("self.")


def is_line(place: str) -> bool:
    """Return True if it is a line of source, not a module."""
    return _LINE.fullmatch(place) is not None


def asks_for(place: str) -> Callable[[str, str], bool]:
    """Return True if a module and a location are at a place; ``self`` is the model itself, without the modules in it."""
    if is_line(place):
        return lambda module, location: location == place or location.endswith(f"/{place}") or place.endswith(f"/{location}")
    if place == "self":
        return lambda module, location: not module
    return lambda module, location: f".{place}." in f".{module}."


def instead_of(place: str, locations: Iterable[str], modules: Iterable[str]) -> str:
    """Return what to ask for instead of a place that is not there: the closest names, and how to list the others."""
    if is_line(place):
        return _other_lines(place, locations)
    known = {*modules} - {""}
    if not known:
        return "All of them come from the model itself, and no module in it: ask for 'self', or a line, as model.py:12."
    return f"{_closest(place, known, 'module')} {_LISTED}"


def nearest_lines(place: str, locations: Iterable[str]) -> list[str]:
    """The lines of the same file whose numbers are nearest, in their order."""
    file, number = _parts(place)
    there = {line for name, line in map(_parts, set(locations) - {""}) if name == file}
    return [f"{file}:{line}" for line in sorted(sorted(there, key=lambda line: (abs(line - number), line))[:_SHOWN])]


def _other_lines(place: str, locations: Iterable[str]) -> str:
    locations = set(locations) - {""}
    if lines := nearest_lines(place, locations):
        return f"The nearest lines of this file: {', '.join(lines)}."
    return _closest(_parts(place)[0], {_parts(location)[0] for location in locations}, "file")


def _closest(name: str, known: Collection[str], what: str) -> str:
    """Return a sentence with the few known names that are most like an unknown one, the closest first."""
    close = difflib.get_close_matches(name, sorted(known), n=_SHOWN, cutoff=0)
    which = f"The closest of {len(known)} {what}s are" if len(known) > 1 else f"The only {what} is"
    return f"{which} {', '.join(f'`{one}`' for one in close)}."


def _parts(location: str) -> tuple[str, int]:
    found = _LINE.fullmatch(location)
    return (found[1].rsplit("/", 1)[-1], int(found[2])) if found is not None else (location, 0)
