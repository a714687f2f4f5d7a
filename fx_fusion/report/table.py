"""The table of a report: a row for each fusion, status, reason and line, with the modules of its sites."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tabulate import tabulate

from fx_fusion.graph.places import shortened

NO_SITES = "no place that a fusion is about"
_MODULES = 34  # columns; a name that is longer has a line of its own
_SOURCE, _REASON = 30, 60
_LEAST = 2  # a prefix of one name is no longer than what would stand for it


class Group(NamedTuple):
    """Sites that are alike."""

    status: str
    fusion: str
    reason: str
    location: str
    modules: list[str]


def table(groups: Sequence[Group]) -> str:
    """Returns the table, or a sentence where there is no site."""
    if not groups:
        return NO_SITES
    prefix = shared_prefix(module for group in groups for module in group.modules)
    rows = [(g.status, g.fusion, len(g.modules), _cell(g.modules, prefix), g.location, g.reason) for g in groups]
    return tabulate(
        rows,
        headers=("status", "fusion", "sites", f"modules of {prefix}" if prefix else "modules", "source", "reason"),
        tablefmt="plain",
        maxcolwidths=[None, None, None, None, _SOURCE, _REASON],
    )


def shared_prefix(modules: Iterable[str]) -> str:
    """Returns what the paths of all modules begin with (``base_model.model``, as wrappers name it), without numbers and
    without the last name of any; empty where that is not worth a word."""
    paths = {module for module in modules if module}
    if len(paths) < 2:
        return ""
    parts: list[str] = []
    for names in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(names)) > 1 or names[0].isdecimal():
            break
        parts.append(names[0])
    return ".".join(parts) if len(parts) >= _LEAST else ""


def _cell(modules: Iterable[str], prefix: str) -> str:
    return in_lines(shortened(module.removeprefix(f"{prefix}.") if prefix else module for module in modules))


def in_lines(text: str, width: int = _MODULES) -> str:
    """Returns paths in lines that are no longer: broken between them, at a dot where one fits in no line, and never inside a
    name."""
    lines = [""]
    for path in text.split():
        space = " " if lines[-1] else ""
        for part in [path] if len(path) <= width else re.findall(r"\.?[^.]+", path):
            if lines[-1] and len(f"{lines[-1]}{space}{part}") > width:
                lines.append("")
                space = ""
            lines[-1] += f"{space}{part}"
            space = ""
    return "\n".join(lines)
