"""Results -> PNGs for the README: speed-up heatmap, bandwidth against size, peak memory.

python -m bench.plots bench/results/grid.jsonl [--out bench/results]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

MODE = "forward+backward"


def load(files: list[str]) -> list[dict]:
    rows = [json.loads(line) for name in files for line in Path(name).read_text().splitlines()]
    return [r for r in rows if r.get("mode") == MODE]


def pairs(rows: list[dict], dtype: str) -> dict[str, list[tuple[float, dict, dict]]]:
    """For each fusion: (elements, our row, Inductor's row), by size."""
    by_cell: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["dtype"] == dtype:
            by_cell.setdefault((row["fusion"], row["case"]), {})[row["provider"]] = row
    found: dict[str, list[tuple[float, dict, dict]]] = {}
    for (fusion, _), cell in by_cell.items():
        if "fx_fusion" in cell and "inductor" in cell:
            size = math.prod(n for d, n in cell["fx_fusion"]["sizes"].items())
            found.setdefault(fusion, []).append((size, cell["fx_fusion"], cell["inductor"]))
    return {f: sorted(cells, key=lambda c: c[0]) for f, cells in sorted(found.items())}


def heatmap(rows: list[dict], dtype: str, out: Path) -> None:
    """Inductor's time over ours: fusions down, sizes (small to large) across."""
    cells = pairs(rows, dtype)
    width = max(len(c) for c in cells.values())
    ratio = np.full((len(cells), width), np.nan)
    for i, found in enumerate(cells.values()):
        for j, (_, ours, base) in enumerate(found):
            ratio[i, j] = base["ms"] / ours["ms"]
    figure, axes = plt.subplots(figsize=(1.1 * width + 3, 0.55 * len(cells) + 1.5))
    image = axes.imshow(np.log2(ratio), cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
    for (i, j), value in np.ndenumerate(ratio):
        if not np.isnan(value):
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(cells)), list(cells))
    axes.set_xticks([])
    axes.set_xlabel("sizes of the grid, small to large")
    axes.set_title(f"Time of Inductor / time of fx_fusion, {MODE}, {dtype}, {rows[0]['environment']['gpu']}")
    figure.colorbar(image, ax=axes, label="log2")
    figure.savefig(out / f"speedup_{dtype}.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


def bandwidth(rows: list[dict], dtype: str, out: Path) -> None:
    """Share of the copy rate against size, ours and Inductor's."""
    cells = {f: c for f, c in pairs(rows, dtype).items() if len(c) >= 4}
    columns = 4
    lines = -(-len(cells) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(4 * columns, 2.8 * lines), squeeze=False, sharey=True)
    for axes in grid.flat[len(cells) :]:
        axes.axis("off")
    for axes, (fusion, found) in zip(grid.flat, cells.items(), strict=False):
        sizes = [size for size, _, _ in found]
        for label, at in (("fx_fusion", 1), ("Inductor", 2)):
            axes.plot(sizes, [cell[at]["share"] * 100 for cell in found], "o-", label=label, markersize=3)
        axes.set_xscale("log")
        axes.set_title(fusion, fontsize=10)
        axes.grid(alpha=0.3)
    grid[0, 0].legend(fontsize=8)
    figure.supylabel("% of the measured copy bandwidth")
    figure.supxlabel("elements")
    figure.tight_layout()
    figure.savefig(out / f"bandwidth_{dtype}.png", dpi=130)
    plt.close(figure)


def memory(rows: list[dict], dtype: str, out: Path) -> None:
    """Peak memory beyond the inputs at each fusion's largest size."""
    cells = {f: c[-1] for f, c in pairs(rows, dtype).items()}
    at = np.arange(len(cells))
    figure, axes = plt.subplots(figsize=(10, 0.45 * len(cells) + 1.5))
    for shift, label, index in ((0.2, "fx_fusion", 1), (-0.2, "Inductor", 2)):
        axes.barh(at + shift, [max(c[index]["peak_mib"], 1) for c in cells.values()], height=0.38, label=label)
    axes.set_yticks(at, [f"{f} {c[1]['case']}" for f, c in cells.items()], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel(f"peak MiB beyond the inputs, {MODE}, {dtype}")
    axes.legend()
    figure.savefig(out / f"memory_{dtype}.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", default="bench/results")
    given = parser.parse_args()
    rows = load(given.files)
    for dtype in sorted({r["dtype"] for r in rows}):
        for draw in (heatmap, bandwidth, memory):
            draw(rows, dtype, Path(given.out))


if __name__ == "__main__":
    main()
