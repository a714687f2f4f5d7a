"""Merge new results into old ones: of every cell the last measurement stays.

python -m bench.merge bench/results/grid.jsonl new.jsonl ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.grid_file import read, write


def main() -> None:
    into, *more = (Path(name) for name in sys.argv[1:])
    cells: dict[tuple, dict[tuple, dict]] = {}
    for file in (into, *more):
        for row in read(file):
            cell, what = ((row.get(name) for name in names) for names in (("fusion", "case", "dtype"), ("mode", "provider")))
            rows = cells.pop(key := tuple(cell), {})
            # Timings and failures of a cell replace each other.
            rows = {k: old for k, old in rows.items() if (k[0] is None) == ("mode" not in row)}
            cells[key] = {**rows, tuple(what): row}
    made = [row for rows in cells.values() for row in rows.values()]
    write(into, made)
    print(f"{into}: {len(made)} rows")


if __name__ == "__main__":
    main()
