"""Tuned numbers as rows: the facts of a launch that must hold, and the numbers that are the fastest where they do."""

from collections.abc import Mapping
from typing import Any

Table = tuple[tuple[str, Any], ...]


def first_row(table: Table, facts: Mapping[str, bool]) -> Any:
    """Returns the numbers of the first row of which all facts hold. A row's facts are words in one string; the last row of a
    table has none, so it always holds."""
    return next(numbers for words, numbers in table if all(facts[word] for word in words.split()))
