"""New results into old: of every cell the last measurement stays.

python -m bench.merge bench/results/grid.jsonl new.jsonl ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    into, *more = (Path(name) for name in sys.argv[1:])
    last: dict[tuple, dict] = {}
    for file in (into, *more):
        for row in (json.loads(line) for line in file.read_text().splitlines()):
            key = tuple(row.get(name) for name in ("fusion", "case", "dtype", "mode", "provider"))
            if row.get("mode") is not None:
                last.pop((*key[:3], None, None), None)  # a cell that had failed
            last.pop(key, None)
            last[key] = row
    into.write_text("".join(json.dumps(row) + "\n" for row in last.values()))
    print(f"{into}: {len(last)} rows")


if __name__ == "__main__":
    main()
