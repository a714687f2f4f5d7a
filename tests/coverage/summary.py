"""Rows of the coverage suite -> COVERAGE.md and its plot.

python -m tests.coverage.summary bench/results/coverage.jsonl
"""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from tabulate import tabulate

from bench.drawing import Scheme, bare, save

STATUSES = ("fused", "kept", "declined", "near", "missing")
COLORS = ("#2a9d4a", "#8ecae6", "#ffb703", "#fb8500", "#d00000")
Row = dict[str, Any]


def totals(rows: list[Row]) -> dict[str, collections.Counter[str]]:
    """Count by kind of site: seen in eager, in a graph, and what became of those."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for kind, numbers in row.get("kinds", {}).items():
            found[kind].update(numbers)
            found[kind]["models"] += 1
    return found


def explained(numbers: collections.Counter[str]) -> float:
    """Share of the sites in graphs that are fused, kept, declined or reported as near, with a reason."""
    return 1 - numbers["missing"] / max(1, numbers["in_graphs"])


def page(rows: list[Row]) -> str:
    dtypes = " and ".join(sorted({row["dtype"] for row in rows}))
    by_status = collections.Counter((row["kind"], row["dtype"], row["status"]) for row in rows)
    kinds = sorted({(row["kind"], row["dtype"]) for row in rows})
    columns = ("ok", "wrong", "crash", "not captured", "not built", "timeout", "died")
    classes = [(*kind, *(by_status[(*kind, status)] for status in columns)) for kind in kinds]
    sites = [
        (kind, n["models"], n["in_graphs"], *(n[status] for status in STATUSES), f"{100 * explained(n):.1f}")
        for kind, n in totals(rows).items()
    ]
    more = sum(row.get("more_graphs", 0) > 0 for row in rows)
    text = [
        "# Coverage",
        "",
        f"Tiny random models of transformers, timm and diffusers, one training step each in {dtypes}, on CPU, in the rewriter",
        'with `options={"select": "always", "strict": True}`, against eager. Made by `make coverage` and',
        "`python -m tests.coverage.summary`; how sites are counted says `tests/coverage/measure.py`.",
        "",
        "*ok*: every tensor of the output, every gradient and every buffer after the step are within twice the error of eager",
        "against float64; where one run of eager is not enough, the largest of nine whose weights differ by less than a",
        "rounding. NaN and infinite numbers have to be where eager's are. *not captured*: Dynamo itself fails on the class. *not built*: no loss by design, or a package or the network is missing.",
        f"Classes with more graphs than without rewriting: {more}.",
        "",
        tabulate(classes, headers=("classes", "dtype", *columns), tablefmt="github"),
        "",
        "## Sites",
        "",
        "Nodes of the captured graphs: *fused* is gone after the rewrite, any other has a row in the report about its line or its",
        "module; *near* is reported with the node that differs. *missing*: still there, and nothing was said about it.",
        "",
        tabulate(
            sites, headers=("sites", "models", "in graphs", *STATUSES, "% explained"), tablefmt="github"
        ),
        "",
        '<picture><source media="(prefers-color-scheme: dark)" srcset="bench/results/coverage_dark.svg">'
        '<img src="bench/results/coverage.svg" alt="what became of the sites"></picture>',
        "",
        "## Why not fused",
        "",
        tabulate(_reasons(rows), headers=("fusion", "status", "reason", "classes"), tablefmt="github"),
        "",
        "## Classes",
        "",
        "A cell that holds two things has bfloat16's first.",
        "",
        *_classes(rows),
    ]  # fmt: skip
    return "\n".join(text)


def _reasons(rows: list[Row]) -> list[tuple[str, str, str, int]]:
    """The most frequent reasons, without the names of nodes and files."""
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for row in rows:
        said = set()
        for reason in row.get("reasons", ()):
            head, _, text = reason.partition(": ")
            fusion, _, status = head.partition("/")
            text = re.sub(r"^\d+ of \d+ ops match at .*?\): |^\d+ of \d+ ops match at \S+: ", "", text)
            text = re.sub(r"\d+", "N", re.sub(r"\b\w+_\d+\b|\bl_\w+", "…", text))
            said.add((fusion, status, text[:90].replace("|", "/")))
        found.update(said)
    return [(*key, n) for key, n in sorted(found.items(), key=lambda item: (-item[1], item[0]))[:40]]


def _classes(rows: list[Row]) -> list[str]:
    """A table a kind and a line a class; the columns are not padded: a page of a third of the size."""
    by_kind: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], {}).setdefault(row["class"], {})[row["dtype"]] = row
    text = []
    for kind, found in by_kind.items():
        text += [f"### {kind}", "", "| class | status | fused sites | note |", "|---|---|--:|---|"]
        text += [f"| {name} | {' | '.join(_both(of) for of in _cells(by_dtype))} |" for name, by_dtype in found.items()]
        text.append("")
    return text


def _cells(by_dtype: dict[str, Row]) -> Iterator[list[str]]:
    of = [by_dtype[dtype] for dtype in sorted(by_dtype)]
    yield [row["status"] for row in of]
    yield [str(sum(n for site, n in row.get("sites", {}).items() if site.endswith("/fused"))) for row in of]
    yield list(map(_note, of))


def _both(said: list[str]) -> str:
    """Once where it is the same of all dtypes."""
    return said[0] if len(set(said)) == 1 else " / ".join(one or "-" for one in said)


def _note(row: Row) -> str:
    kinds = {kind: collections.Counter(n) for kind, n in row.get("kinds", {}).items()}
    missing = {kind: n["missing"] for kind, n in kinds.items() if n["missing"]}
    outside = {kind: n["seen"] - n["in_graphs"] for kind, n in kinds.items() if n["seen"] > n["in_graphs"]}
    notes = [f"missing {missing}"] if missing else []
    notes += [f"left in eager by Dynamo: {outside}"] if outside else []
    notes += [row["error"].splitlines()[0][:100].replace("|", "/")] if "error" in row else []
    return "; ".join(notes)


def plot(rows: list[Row], scheme: Scheme) -> Figure:
    """Return what became of the sites of each kind, in percent, and how many there are."""
    found = {kind: n for kind, n in totals(rows).items() if n["in_graphs"]}
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(found) + 1))
    left = [0.0] * len(found)
    for status, color in zip(STATUSES, COLORS, strict=True):
        whole = [max(1, sum(n[s] for s in STATUSES)) for n in found.values()]
        share = [100 * n[status] / w for n, w in zip(found.values(), whole, strict=True)]
        axes.barh(list(found), share, left=left, color=color, label=status)
        left = [a + b for a, b in zip(left, share, strict=True)]
    for i, n in enumerate(found.values()):
        axes.text(101, i, f"{n['in_graphs']}", va="center", fontsize=8, color=scheme.muted)
    axes.invert_yaxis()
    axes.set_xlabel("% of sites; behind each bar, how many there are in the graphs")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(STATUSES), fontsize=8, frameon=False)
    bare(axes)
    return figure


def ordered(rows: list[Row]) -> list[Row]:
    """Return the last row of each class and dtype, by kind and name."""
    last = {(row["kind"], row["class"], row["dtype"]): row for row in rows}
    return [last[key] for key in sorted(last)]


def main() -> None:
    rows = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    rows = ordered(rows)
    Path("COVERAGE.md").write_text(page(rows))
    save(lambda scheme: plot(rows, scheme), Path("bench/results"), "coverage")
    print(page(rows).split("## Why not fused")[0])


if __name__ == "__main__":
    main()
