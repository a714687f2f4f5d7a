"""The table of a report: a row for each fusion, status, reason and line, with the modules of its sites."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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
    gain: float | None = None  # ms a step that they save together, or would


def table(groups: Sequence[Group]) -> str:
    """Returns the table, or a sentence where there is no site."""
    if not groups:
        return NO_SITES
    prefix = shared_prefix(module for group in groups for module in group.modules)
    gains = [_gain(group) for group in groups]
    columns: list[tuple[str, Sequence[Any], int | None]] = [
        ("status", [g.status for g in groups], None),
        ("fusion", [g.fusion for g in groups], None),
        ("sites", [len(g.modules) for g in groups], None),
        ("ms saved", gains, None),
        (f"modules of {prefix}" if prefix else "modules", [_cell(g.modules, prefix) for g in groups], None),
        ("source", [g.location for g in groups], _SOURCE),
        ("reason", [g.reason for g in groups], _REASON),
    ]
    if not any(gains):  # nothing is known of a CPU
        del columns[3]
    headers, values, widths = zip(*columns, strict=True)
    return tabulate(list(zip(*values, strict=True)), headers=headers, tablefmt="plain", maxcolwidths=list(widths))


def _gain(group: Group) -> str:
    """Return what a group saves; in brackets what it would save if it was fused."""
    if group.gain is None or (group.status != "fused" and group.gain <= 0):
        return ""
    said = f"{group.gain:.2g}" if group.gain < 10 else f"{group.gain:.0f}"
    return said if group.status == "fused" else f"({said})"


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
