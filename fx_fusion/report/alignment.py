"""A graph before and after, row beside row, in blocks of which equal ones are folded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fx_fusion.report.diff import Row

_FEW = 3  # rows
# A class of signs first: re looks for that in a third of the time of a look behind.
_NUMBERS = re.compile(r"[._](?:(?<=\w_)\d+\b|(?<=[a-z_]\.)\d+(?=\.))")


@dataclass(frozen=True)
class Pair:
    """A row before, a row after, or both: the same node, since the rewrite keeps names."""

    before: Row | None
    after: Row | None

    @property
    def row(self) -> Row:
        """The one that there is; the earlier one of two."""
        found = self.before or self.after
        assert found is not None
        return found

    @property
    def sign(self) -> str:
        """``=`` unchanged, ``~`` changed, ``-`` removed, ``+`` inserted."""
        if self.before is None:
            return "+"
        if self.after is None:
            return "-"
        return "=" if self.before.text == self.after.text else "~"


@dataclass
class Block:
    """Neighboring pairs of one layer, or of what is between layers. ``like``: the block before it that is the same but for
    numbers in names."""

    title: str
    pairs: list[Pair]
    like: Block | None = None


def align(before: Sequence[Row], after: Sequence[Row]) -> list[Pair]:
    """Both in their order; a node that is in both is one pair."""
    in_before, in_after = {row.name for row in before}, {row.name for row in after}
    pairs: list[Pair] = []
    behind = list(reversed(after))
    late: set[str] = set()  # of nodes that moved: their pair is where they stand after
    by_name = {row.name: row for row in before}
    for row in before:
        if row.name not in in_after:
            pairs.append(Pair(row, None))
            continue
        if row.name in late:
            continue
        while behind:
            other = behind.pop()
            if other.name == row.name:
                pairs.append(Pair(row, other))
                break
            pairs.append(Pair(by_name.get(other.name), other))
            if other.name in in_before:
                late.add(other.name)
    pairs += [Pair(by_name.get(row.name), row) for row in reversed(behind)]
    return pairs


def blocks(pairs: Sequence[Pair]) -> list[Block]:
    """One a layer (``model.layers.3``) and one for what is between; a free function belongs to the block that it is in."""
    found: list[Block] = []
    for pair, title in zip(pairs, _titles(pairs), strict=True):
        if not found or found[-1].title != title:
            found.append(Block(title, []))
        found[-1].pairs.append(pair)
    known: dict[Any, Block] = {}
    for block in found:
        first = known.setdefault((_unnumbered(f"{block.title}."), signature(block.pairs)), block)
        block.like = None if first is block else first
    return found


def _titles(pairs: Sequence[Pair]) -> list[str]:
    """The layer of each; a few rows of another one in the middle (an add and the norm behind it) are counted to it."""
    titles: list[str] = []
    for pair in pairs:
        titles.append(layer_of(pair.row.module) if pair.row.module or not titles else titles[-1])
    for i in range(1, len(titles)):
        if titles[i] != titles[i - 1] and titles[i - 1] in titles[i + 1 : i + 1 + _FEW]:
            titles[i] = titles[i - 1]
    return titles


def layer_of(module: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp``; empty outside of layers."""
    numbered = re.match(r"(.*?\d+)(\.|$)", module)
    return numbered[1] if numbered else ""


def signature(pairs: Sequence[Pair]) -> tuple[Any, ...]:
    """Equal for rows that do the same: numbers in names count for nothing, but which of these rows an operand is does."""
    place = {pair.row.name: i for i, pair in enumerate(pairs)}
    shown = [row for pair in pairs for row in (pair.before, pair.after) if row is not None]
    operands = [place.get(name, -1) for row in shown for name in (*row.operands, "")]  # "": the end of a row's
    return "".join(pair.sign for pair in pairs), _unnumbered("\n".join(row.text for row in shown)), tuple(operands)


def _unnumbered(text: str) -> str:
    """Without the numbers at the end of names and in paths: ``x1_2`` is ``x1``, ``layers.0.w`` is ``layers.w``."""
    return _NUMBERS.sub("", text)
