"""What the commands print and write of a report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fx_fusion.report.report import Report


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
    print(shown.why(why) if why is not None else shown.diff() if diff else shown)
    try:
        if json is not None:
            Path(json).write_text(shown.to_json())
        if html is not None:
            shown.to_html(html)
            print(f"written: {html}", file=sys.stderr)
    except OSError as error:
        raise ValueError(f"the report can't be written: {error}") from error
    for wanted in require:
        name, _, number = wanted.partition("=")
        found = report.count(name)
        if found < 1 if not number else found != int(number):
            print(f"fx_fusion: {name}: {found} fused, {number or 'at least 1'} required", file=sys.stderr)
            return 1
    return 0
