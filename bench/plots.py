"""The results of ``bench.run --grid`` as plots: speed-up, rate and peak memory of every fusion; and the README's chart.

python -m bench.plots [bench/results/grid.jsonl] [--dtype bfloat16] [--out bench/results]
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import hero
from bench.cells import Cell, by_row, cells_of
from bench.drawing import Scheme, bare, save
from bench.grid_file import read

_INCH = 0.36  # of a cell of the heatmap, in width
_FEWEST = 6  # sizes that make a line


def heatmap(cells: Sequence[Cell], title: str, scheme: Scheme) -> Figure:
    """Inductor's time over ours. Fusions whose sizes are of one kind share a block, and its columns are their sizes."""
    blocks: dict[str, list[Cell]] = {}
    for cell in cells:
        blocks.setdefault(cell.group, []).append(cell)
    sizes = {group: sorted({c.size for c in of}, key=lambda s: (math.prod(s), s)) for group, of in blocks.items()}
    rows = {group: by_row(of) for group, of in blocks.items()}
    order = sorted(blocks, key=lambda group: -len(rows[group]))
    names = {group: 0.04 * max(len(c.label) for c in of) + 0.25 for group, of in blocks.items()}  # inches above a block
    heights = [0.24 * len(rows[group]) + names[group] for group in order]
    width = max(map(len, sizes.values()))
    tall = sum(heights) + 0.3
    figure = plt.figure(figsize=(_INCH * width, tall))
    said = f"{title}, forward + backward: Inductor's time / fx_fusion's (above 1: fx_fusion is faster)"
    figure.suptitle(said, x=-0.38, ha="left", y=1, va="top", fontsize=10)
    left = sum(heights)
    for group, height in zip(order, heights, strict=True):
        left -= height
        box = figure.add_axes((0.0, left / tall, len(sizes[group]) / width, 0.24 * len(rows[group]) / tall))
        _block(box, group, sizes[group], rows[group], scheme)
    return figure


def _block(axes: Axes, group: str, sizes: Sequence[Any], rows: dict[str, list[Cell]], scheme: Scheme) -> None:
    column = {size: at for at, size in enumerate(sizes)}
    ratio = np.full((len(rows), len(sizes)), np.nan)
    for at, of_row in enumerate(rows.values()):
        for cell in of_row:
            ratio[at, column[cell.size]] = cell.speedup
    edges = np.arange(len(sizes) + 1) - 0.5, np.arange(len(rows) + 1) - 0.5
    look = {"cmap": scheme.diverging, "vmin": -1.5, "vmax": 1.5, "edgecolors": scheme.page, "linewidth": 1, "clip_on": False}
    axes.pcolormesh(*edges, np.log2(ratio), **look)
    axes.invert_yaxis()
    for (i, j), value in np.ndenumerate(ratio):
        if not np.isnan(value):
            axes.text(j, i, f"{value:.2f}" if value < 10 else f"{value:.1f}", ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.xaxis.tick_top()
    names = [" x ".join(map(str, size)) for size in sizes]
    axes.set_xticks(range(len(sizes)), names, fontsize=7, rotation=40, ha="left", rotation_mode="anchor", color=scheme.muted)
    said = {"ha": "right", "va": "bottom", "transform": axes.transAxes, "fontsize": 8, "color": scheme.muted}
    axes.text(-0.1 / len(sizes), 1.0 + 0.2 / len(rows), textwrap.fill(group, 26), **said)
    bare(axes)


def rates(cells: Sequence[Cell], title: str, ceiling: float | None, scheme: Scheme) -> Figure:
    """Return rates beside the measured copy rate, against the bytes that have to move; TFLOP/s where matrix products take
    the time."""
    fusions: dict[str, dict[str, list[Cell]]] = {}
    for row, of_row in by_row(cells).items():
        if len(of_row) >= _FEWEST:
            fusions.setdefault(of_row[0].ours["fusion"], {})[row] = of_row
    order = sorted(fusions, key=lambda f: next(iter(fusions[f].values()))[0].flops is not None)  # products last
    columns = min(4, len(order))
    lines = -(-len(order) // columns)
    size = (2.5 * columns, 2.0 * lines + 0.6)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    figure.suptitle(f"{title}, forward + backward", x=0.01, ha="left")
    for axes in grid.flat[len(order) :]:
        axes.axis("off")
    for axes, fusion in zip(grid.flat, order, strict=False):
        _lines(axes, fusions[fusion], ceiling, scheme)
        axes.set_title(fusion, fontsize=9)
    keys = (
        ("fx_fusion: a size, and the mean of those within a factor of two", {"color": scheme.ours, "marker": "o"}),
        ("Inductor", {"color": scheme.inductor, "marker": "o"}),
        ("channels last, or ids by Zipf", {"color": scheme.text, "linestyle": "--"}),
        ("heads below 128, images up to 16 x 16, columns that 16 does not divide", _points(scheme.text, scheme.page)),
        ("limit: the copy rate; the fastest product measured", {"color": scheme.muted, "linestyle": ":"}),
    )
    handles = [plt.Line2D([], [], label=label, **{"markersize": 3, **style}) for label, style in keys]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _points(color: str, inside: str) -> dict[str, Any]:
    """Return how sizes are drawn: a ring where the inside is the page's color."""
    look = {"marker": "o", "markersize": 2.5, "markeredgewidth": 0.8, "linestyle": "none"}
    return {"color": color, "markerfacecolor": inside, **look}


def _lines(axes: Axes, rows: dict[str, list[Cell]], ceiling: float | None, scheme: Scheme) -> None:
    """A point a size, and a line a kind of inputs and backend: the first kind drawn through, another one dashed."""
    products = next(iter(rows.values()))[0].flops is not None
    for of_row, dashes in zip(rows.values(), ("-", "--", ":"), strict=False):
        for color, rate in ((scheme.inductor, _inductors), (scheme.ours, _ours)):
            for apart, inside in ((True, scheme.page), (False, color)):
                found = [(_work(c), rate(c)) for c in of_row if c.apart == apart]
                axes.plot(*zip(*found, strict=True) if found else ([], []), **_points(color, inside))
                if not apart:
                    axes.plot(*_means(found), dashes, color=color, linewidth=1.3)
    limit = ceiling if products else 100
    if limit is not None:
        axes.axhline(limit, color=scheme.muted, linestyle=":", linewidth=1)
    axes.set(xscale="log", ylim=(0, None))
    axes.locator_params(axis="y", nbins=3)
    _plain(axes)
    axes.set_xlabel("GFLOP" if products else "MiB that have to move", fontsize=8)
    axes.set_ylabel("TFLOP/s" if products else "% of the copy rate", fontsize=8)
    axes.tick_params(labelsize=8, length=0)
    axes.grid(alpha=0.5)


def _work(cell: Cell) -> float:
    """GFLOP where products take the time, else the MiB that have to move."""
    return cell.bytes / 2**20 if cell.flops is None else cell.flops / 1e9


def _means(found: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The mean work and rate of sizes of about the same work: one point for each power of two."""
    alike: dict[int, list[tuple[float, float]]] = {}
    for work, rate in sorted(found):
        alike.setdefault(round(math.log2(work)), []).append((work, rate))
    means = [tuple(sum(values) / len(values) for values in zip(*of, strict=True)) for of in alike.values()]
    return [work for work, _ in means], [rate for _, rate in means]


def _plain(axes: Axes) -> None:
    """Write 1000 and not a power, and mark nothing in between."""
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _ours(cell: Cell) -> float:
    return _rate(cell, cell.ours)


def _inductors(cell: Cell) -> float:
    return _rate(cell, cell.inductor)


def _rate(cell: Cell, row: dict[str, Any]) -> float:
    return 100 * row["share"] if cell.flops is None else cell.flops / row["ms"] / 1e9


def fastest_product(rows: Sequence[dict[str, Any]]) -> float | None:
    """TFLOP/s of the fastest bfloat16 product that ``bench.float8_products`` measured."""
    found = [2 * r["rows"] * r["n"] * r["k"] / r["bfloat16_us"] / 1e6 for r in rows if "bfloat16_us" in r]
    return max(found, default=None)


def memory(cells: Sequence[Cell], title: str, scheme: Scheme) -> Figure:
    """Peak memory beyond the inputs at the largest size of each fusion."""
    largest = {row: of_row[-1] for row, of_row in by_row(cells).items()}
    order = sorted(largest.items(), key=lambda item: item[1].ours["peak_mib"] / max(item[1].inductor["peak_mib"], 1))
    figure, axes = plt.subplots(figsize=(7.6, 0.25 * len(order) + 1))
    for at, (_, cell) in enumerate(order):
        ours, inductor = (max(row["peak_mib"], 1.0) for row in (cell.ours, cell.inductor))
        axes.plot([ours, inductor], [at, at], color=scheme.grid, linewidth=3, zorder=1)
        axes.plot(inductor, at, "o", color=scheme.inductor, markersize=6, label="Inductor" if at == 0 else None)
        axes.plot(ours, at, "o", color=scheme.ours, markersize=4.5, label="fx_fusion" if at == 0 else None)
        said = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{ours / inductor:.2f}", (max(ours, inductor), at), (8, 0), **said)
    axes.set_yticks(range(len(order)), [f"{row}: {cell.label}" for row, cell in order], fontsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="MiB at the peak beyond the inputs; the number: fx_fusion's over Inductor's")
    axes.set_title(f"{title}, forward + backward, largest size measured", loc="left", fontsize=10)
    _plain(axes)
    axes.legend(loc="upper left", fontsize=8, bbox_to_anchor=(0, 0.97))
    axes.grid(axis="x", alpha=0.5)
    bare(axes)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default="bench/results/grid.jsonl", help="the other results lie beside it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", default="bench/results")
    given = parser.parse_args(arguments)
    file, out = Path(given.file), Path(given.out)
    rows = read(file)
    cells = cells_of(rows, given.dtype)
    title = f"{rows[0]['environment']['gpu']}, {given.dtype}"
    ceiling = fastest_product(read(file.parent / "float8_products.jsonl")) if given.dtype != "float32" else None
    save(lambda scheme: heatmap(cells, title, scheme), out, "speedup")
    save(lambda scheme: rates(cells, title, ceiling, scheme), out, "rates")
    save(lambda scheme: memory(cells, title, scheme), out, "memory")
    models = read(file.parent / "models.jsonl")
    bars = hero.bars(models, read(file.parent / "setups.jsonl"))
    machine = models[0]["environment"]["gpu"]
    save(lambda scheme: hero.chart(bars, f"Training on one {machine}", scheme), out, "hero")


if __name__ == "__main__":
    main()
