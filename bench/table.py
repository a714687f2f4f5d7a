"""Results of ``bench.run --grid`` -> the table of a GPU that ``select="auto"`` reads.

python -m bench.table bench/results/grid.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import fx_fusion.cost.table as tables
from bench.grid_file import read
from fx_fusion.fusion.registry import all_fusions

# It is there for the memory; 0.98 to 1.31 of Inductor's speed wherever it applies.
_NOT_BY_CELL = ("linear_cross_entropy", "linear_soft_cross_entropy", "linear_rows")
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


def cells(rows: list[dict]) -> list[dict]:
    """One cell a fusion, layout, sizes, variant, size of an element and mode: of two 16-bit dtypes, or of indices by two
    distributions, the one that says more for Inductor."""
    known = {f.name for f in all_fusions()} - set(_NOT_BY_CELL)
    found: dict[tuple, dict] = {}
    for row in rows:
        if row.get("provider") not in ("inductor", "fx_fusion") or row["fusion"] not in known:
            continue
        key = row["fusion"], row["case"], row["dtype"], row["mode"]
        cell = found.setdefault(key, {
            "fusion": row["fusion"], "itemsize": _WIDTH[row["dtype"]], "forward_only": row["mode"] == "forward",
            "layout": row["layout"], "sizes": row["sizes"], **({"statics": row["statics"]} if row.get("statics") else {}),
        })  # fmt: skip
        cell["ours" if row["provider"] == "fx_fusion" else "inductor"] = row["ms"]
    chosen: dict[tuple, dict] = {}
    for (fusion, _, dtype, mode), cell in found.items():
        if "ours" in cell and "inductor" in cell:
            about = (repr(sorted(cell.get(name, {}).items())) for name in ("sizes", "statics"))
            key = fusion, cell["layout"], *about, _WIDTH[dtype], mode
            chosen[key] = max(chosen.get(key, cell), cell, key=lambda c: c["ours"] / c["inductor"])
    return list(chosen.values())


def main() -> None:
    rows = [row for name in sys.argv[1:] for row in read(Path(name))]
    by_gpu: dict[str, list[dict]] = {}
    for row in rows:
        by_gpu.setdefault(row["environment"]["gpu"], []).append(row)
    for gpu, measured in by_gpu.items():
        file = Path(tables.__file__).parent / "tables" / f"{tables.slug(gpu)}.json"
        file.parent.mkdir(exist_ok=True)
        stamp = {k: v for k, v in measured[-1]["environment"].items() if k in ("gpu", "torch", "triton")}
        stamp["copy_gb_s"] = round(statistics.median(row["copy_gb_s"] for row in measured if row.get("copy_gb_s")))
        lines = ",\n".join(json.dumps(cell) for cell in cells(measured))
        file.write_text(f'{{"environment": {json.dumps(stamp)}, "cells": [\n{lines}\n]}}\n')
        print(f"{file}: {len(cells(measured))} cells")


if __name__ == "__main__":
    main()
