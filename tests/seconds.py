"""Choose tests by what they take: the tiers of ``make check`` and ``make test``, from a table of recorded seconds.

``tests/seconds.json`` has the mean processor seconds of a case of each test function, children included. A function that it
does not have is quick. To record it again::

    pytest tests -n 2 --dist loadfile --seconds /tmp/lines -m ""
    python -m tests.seconds /tmp/lines
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("seconds.json")
LEAST = 0.05  # seconds below which a function is not written down
# By tier: up to so many seconds a case, so many cases of a function (None: all), spread over its parameters.
TIERS = {"check": ((0.1, 3),), "test": ((0.3, None), (1.5, 2))}
# Cases of dearer functions that ``make check`` has too: about one of each fusion, one model.
SMOKE = {
    "tests/fusions/test_every_fusion.py::test_fires_once_and_is_no_less_accurate_than_eager": 40,
    "tests/system/test_models.py::test_family": 1,
}


def table() -> dict[str, float]:
    """Return the seconds of a case of each function, by ``file::function``."""
    return json.loads(TABLE.read_text())


def function_of(nodeid: str) -> str:
    """Return the id of a test without its parameters."""
    return nodeid.partition("[")[0]


def chosen(nodeids: list[str], tier: str) -> set[str]:
    """Return those of the tests that are of a tier."""
    known, cases = table(), defaultdict(list)
    for nodeid in nodeids:
        cases[function_of(nodeid)].append(nodeid)
    found: set[str] = set()
    for function, of in cases.items():
        count = _cases(known.get(function, 0.0), tier)
        if tier == "check":
            count = max(count or 0, SMOKE.get(function, 0)) if count is not None else None
        found |= set(of if count is None else spread(of, count))
    return found


def _cases(seconds: float, tier: str) -> int | None:
    return next((count for limit, count in TIERS[tier] if seconds <= limit), 0)


def spread(of: list[Any], count: int) -> list[Any]:
    """Return ``count`` of some cases, spread from the first on; all where there are fewer."""
    return [of[round(i * (len(of) - 1) / max(count - 1, 1))] for i in range(min(count, len(of)))]


def seconds_of_files(nodeids: list[str]) -> dict[str, float]:
    """Return what the tests of each file take together: the longest are begun first."""
    known, found = table(), defaultdict(float)
    for nodeid in nodeids:
        found[nodeid.partition("::")[0]] += known.get(function_of(nodeid), 0.0)
    return found


def main() -> None:
    cases = defaultdict(list)
    for line in Path(sys.argv[1]).read_text().splitlines():
        nodeid, seconds = json.loads(line)
        cases[function_of(nodeid)].append(seconds)
    means = {function: round(sum(of) / len(of), 2) for function, of in sorted(cases.items())}
    TABLE.write_text(json.dumps({f: mean for f, mean in means.items() if mean >= LEAST}, indent=0) + "\n")


if __name__ == "__main__":
    main()
