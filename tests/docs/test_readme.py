"""The README: every figure of its table is a row of the benchmarks' results, and of docs/benchmarks.md or docs/memory.md."""

import json
import re
from pathlib import Path

import pytest

from bench import hero

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
NUMBER = r"\**([\d.]+)\**"
ROWS = re.findall(rf"^\| (.+?) \| (`\"\w+\"`[^|]*) \| {NUMBER} \| {NUMBER} \| {NUMBER} \| {NUMBER} -> {NUMBER} \|$", README, re.M)


def results(name):
    return [json.loads(line) for line in (ROOT / "bench" / "results" / name).read_text().splitlines()]


def measured():
    """Milliseconds and GiB of Inductor and of fx_fusion, of one run each."""
    for row in results("setups.jsonl"):
        yield tuple(row[backend][what] for what in ("ms", "gib") for backend in ("inductor", "fx_fusion"))
    models = results("models.jsonl")
    for ours in (row for row in models if row["variant"] == "fx_fusion"):
        for theirs in (row for row in models if row["variant"] == "inductor"):
            if all(ours[what] == theirs[what] for what in ("model", "mask", "batch", "length")) and (
                ours["environment"] == theirs["environment"]
            ):
                yield theirs["ms"], ours["ms"], theirs["peak_gib"], ours["peak_gib"]


def test_there_are_eight_rows_and_the_first_has_the_defaults():
    assert len(ROWS) == 8
    assert "default" in ROWS[0][1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_figures_were_measured(row):
    inductor, ours, x, before, after = map(float, row[2:])
    shown = inductor, ours, before, after
    found = [run for run in measured() if all(abs(a - b) <= 0.0501 for a, b in zip(run, shown, strict=True))]
    assert found
    assert any(abs(run[0] / run[1] - x) <= 0.00501 for run in found)


def test_the_chart_shows_the_table():
    """Each row as a bar, the same speed and memory; and one model more, whose figures stand below the table."""
    bars = hero.bars(results("models.jsonl"), results("setups.jsonl"))
    shown = {(f"{bar.speed['fx_fusion']:.2f}", *(f"{bar.gib[v]:.1f}" for v in ("inductor", "fx_fusion"))) for bar in bars}
    assert shown >= {(x, before, after) for *_, x, before, after in ROWS}
    assert len(bars) == len(ROWS) + 1


def test_the_range_at_the_top_is_that_of_the_table():
    low, high, least, most = re.search(r"at ([\d.]+) to ([\d.]+) times Inductor's speed, in ([\d.]+) to ([\d.]+) of its", README).groups()
    speeds = [float(row[4]) for row in ROWS]
    shares = [float(row[6]) / float(row[5]) for row in ROWS]
    assert (float(low), float(high)) == (min(speeds), max(speeds))
    assert (f"{min(shares):.2f}", f"{max(shares):.2f}") == (least, most)
