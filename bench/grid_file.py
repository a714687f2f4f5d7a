"""Read and write a file of results of ``bench.run``: a line a cell, with what its rows have in common said once.

``bench.run`` appends rows that stand alone, with four times the bytes; ``read`` takes those lines too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_MEASURED = ("mode", "provider", "ms", "share", "host_us", "peak_mib")  # of a row; the rest is of its cell
_ENVIRONMENTS = "environments"  # the first line; cells give theirs by number


def read(file: Path) -> list[Row]:
    """The rows of a file; none where it is not there."""
    return list(_rows(file.read_text().splitlines())) if file.exists() else []


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    environments: list[dict[str, str]] = []
    for line in map(json.loads, lines):
        if _ENVIRONMENTS in line:
            environments = line[_ENVIRONMENTS]
        elif "measured" in line:
            measured, kept = line.pop("measured"), line.pop("keeps")
            line["environment"] = environments[line["environment"]]
            for numbers in measured:
                row = {**line, **dict(zip(_MEASURED, numbers, strict=True))}
                yield {**row, "keeps": kept.get(row["mode"])}
        else:
            yield line


def write(file: Path, rows: Iterable[Row]) -> None:
    """Write rows so that ``read`` gives the same ones, in the same order."""
    environments: list[dict[str, str]] = []
    lines = []
    for about, of_cell in groupby(rows, key=_about):
        group = list(of_cell)
        if about is None:
            lines += group
            continue
        cell = json.loads(about)
        if cell["environment"] not in environments:
            environments.append(cell["environment"])
        cell["environment"] = environments.index(cell["environment"])
        cell["keeps"] = {row["mode"]: row["keeps"] for row in group if row["keeps"] is not None}
        cell["measured"] = [[row[name] for name in _MEASURED] for row in group]
        lines.append(cell)
    file.write_text("".join(json.dumps(line) + "\n" for line in ({_ENVIRONMENTS: environments}, *lines)))


def _about(row: Row) -> str | None:
    """Return what a cell's rows have in common; None for a row that is no measurement (of an error), which is written as it
    is."""
    if not {*_MEASURED, "keeps", "environment"} <= row.keys():
        return None
    return json.dumps({name: value for name, value in row.items() if name not in (*_MEASURED, "keeps")})
