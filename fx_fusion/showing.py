"""Print and write reports for the commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fx_fusion.errors import TargetError
from fx_fusion.report.report import Report


def check_files(output: Mapping[str, Any], *, reads: str) -> None:
    """Raise TargetError where ``--html`` or ``--json`` would write over what a command reads: a script, a config in its
    folder, a report; or both over each other."""
    files = {option: Path(output[option]).resolve() for option in ("html", "json") if output[option] not in (None, "-")}
    read = {Path(reads).resolve(), (Path(reads) / "config.json").resolve()}
    for option, file in files.items():
        if file in read:
            raise TargetError(f"--{option} must be another file than the one that is read; {output[option]!r} is that one: "
                              "give it a name of its own")  # fmt: skip
    if len(set(files.values())) < len(files):
        raise TargetError(f"--html and --json must be two files; both are {output['html']!r}: give each a name of its own")


def show(
    report: Report,
    *,
    html: str | None,
    json: str | None,
    diff: bool,
    fusion: str | None,
    why: str | None,
    require: Sequence[str],
) -> int:
    """Print a report, write its files, check what is required; the exit code."""
    shown = report if fusion is None else report.only(fusion)
    try:
        if json not in (None, "-"):
            Path(json).write_text(shown.to_json())
        if html is not None:
            shown.to_html(html)
            print(f"written: {html}", file=sys.stderr)
    except OSError as error:
        raise ValueError(f"the report can't be written: {error}") from error
    said = shown.why(why) if why is not None else shown.diff() if diff else str(shown)
    print(shown.to_json() if json == "-" else said)  # a program reads the one, people the other
    for wanted in require:
        name, _, number = wanted.partition("=")
        found = report.count(name)
        if found < 1 if not number else found != int(number):
            print(f"fx_fusion: {name}: {found} fused, {number or 'at least 1'} required", file=sys.stderr)
            return 1
    return 0
