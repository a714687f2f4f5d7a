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
            # Timings and failures of a cell replace each other.
            for other in [k for k in last if k[:3] == key[:3] and (k[3] is None) != (key[3] is None)]:
                del last[other]
            last.pop(key, None)
            last[key] = row
    into.write_text("".join(json.dumps(row) + "\n" for row in last.values()))
    print(f"{into}: {len(last)} rows")


if __name__ == "__main__":
    main()
