"""Measure where ``select="auto"`` is furthest behind Inductor, over all results; and how the table decides what it was not
made of.

python -m bench.worst [bench/results/grid.jsonl]

A cell that is kept is Inductor's own. The second line decides every cell by those of other sizes, as a site's size is seldom
one that was measured; the third every float16 cell by the bfloat16 cells alone; the others as if this GPU had not been
measured: by the table of another one, where that has such cells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.grid_file import read
from bench.table import cells
from fx_fusion.cost import table as tables
from fx_fusion.cost.table import Cell, nearest_of
from fx_fusion.fusion.registry import all_fusions


def main() -> None:
    file = sys.argv[1] if len(sys.argv) > 1 else "bench/results/grid.jsonl"
    rows = read(Path(file))
    table = [Cell(**cell) for cell in cells(rows)]
    bfloat16 = [Cell(**cell) for cell in cells([r for r in rows if r["dtype"] == "bfloat16"])]
    print("decided by the whole table:   ", worst(decided(rows, table)))
    print("decided by other sizes:       ", worst(decided(rows, table, others=True)))
    print("float16 decided by bfloat16:  ", worst(decided([r for r in rows if r["dtype"] == "float16"], bfloat16)))
    for gpu in tables.rates_of_tables().keys() - {r["environment"]["gpu"] for r in rows}:
        other = tables._table(gpu)
        known = {(c.fusion, c.itemsize, c.forward_only) for c in other}
        there = [r for r in rows if (r["fusion"], _width(r), r["mode"] == "forward") in known]
        print(f"decided by the table of an {gpu}:", worst(decided(there, other, tables.ELSEWHERE)))


def decided(
    rows: list[dict], table: Sequence[Cell], tolerance: float = tables.TOLERANCE, *, others: bool = False
) -> Iterator[tuple[float, str]]:  # fmt: skip
    """For every cell: the speed of what is chosen over Inductor's, and its name. ``others``: by cells of other sizes."""
    base = {_key(r): r["ms"] for r in rows if r.get("provider") == "inductor"}
    row_of = {fusion.name: tables.row_of(fusion) for fusion in all_fusions()}
    for row in rows:
        if row.get("provider") != "fx_fusion" or _key(row) not in base:
            continue
        of_fusion = [c for c in table if c.fusion == row["fusion"] and not (others and c.sizes == row["sizes"])]
        kind = _width(row), row["mode"] == "forward", row["layout"], row["sizes"], row.get("statics", {})
        near = nearest_of(of_fusion, *kind, row_of.get(row["fusion"], ""))
        # Besides the table a fusion has a rule of its own (``pays``); which of both spoke, the sentence says.
        by_rule = row["keeps"] is not None and not row["keeps"].startswith(("Inductor was ", "Inductor moves "))
        kept = by_rule or (near is not None and near.ours > tolerance * near.inductor)
        yield (1.0 if kept else base[_key(row)] / row["ms"]), " ".join(map(str, _key(row)))


def _width(row: dict) -> int:
    return 4 if row["dtype"] == "float32" else 2


def _key(row: dict) -> tuple:
    return row["fusion"], row["case"], row["dtype"], row["mode"]


def worst(found: Iterator[tuple[float, str]]) -> str:
    ranked = sorted(found)
    if not ranked:
        return "none was measured"
    below = sum(ratio < 0.97 for ratio, _ in ranked)
    return f"{len(ranked)} cells, {below} below 0.97; the worst {ranked[0][0]:.3f} of Inductor's speed, {ranked[0][1]}"


if __name__ == "__main__":
    main()
