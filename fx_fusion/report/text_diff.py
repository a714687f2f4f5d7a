"""A graph before and after as a unified diff: each hunk with the sites that it is about; hunks that are alike once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fx_fusion.report.alignment import Pair, align, layer_of, signature
from fx_fusion.report.diff import Row
from fx_fusion.report.site import Site

_CONTEXT = 1  # rows around a change


@dataclass
class _Hunk:
    """Neighboring rows with a change, the fused sites there, and later hunks that are the same but for numbers in names."""

    pairs: list[Pair]
    ranges: str
    sites: list[Site]
    alike: list[_Hunk] = field(default_factory=list)

    @property
    def changed(self) -> Row:
        """The first row that changed."""
        return next(pair.row for pair in self.pairs if pair.sign != "=")

    @property
    def layer(self) -> str:
        """The layer that it is about."""
        return layer_of(self.sites[0].module if self.sites else self.changed.module)


def text_diff(title: str, before: Sequence[Row], after: Sequence[Row], sites: Iterable[Site]) -> str:
    """The unified diff of two graphs, whose lines are their rows.

    Behind the ranges of a hunk stand its sites (fusion, module, line of source), or the module where no site is about it.
    Hunks that are the same but for numbers in names are shown once, with the layers of the others: the diff is to be read,
    and no patch. A node that only moved is no change.
    """
    of_rows: dict[str, list[Site]] = {}
    for site in sites:
        for name in dict.fromkeys((*site.nodes, *site.made)) if site.status == "fused" else ():
            of_rows.setdefault(name, []).append(site)
    order = {row.name: i for i, row in enumerate(before)}
    known: dict[object, _Hunk] = {}
    for hunk in _hunks(align(before, after), of_rows):
        first = known.setdefault(signature(hunk.pairs), hunk)
        if first is not hunk:
            first.alike.append(hunk)
    lines = [f"--- {title} before", "+++ after"]
    for hunk in known.values():
        lines.append(f"@@ {hunk.ranges} @@ {_about(hunk)}")
        lines += _changes(hunk.pairs, order)
    return "\n".join(lines)


def _hunks(pairs: Sequence[Pair], of_rows: dict[str, list[Site]]) -> Iterator[_Hunk]:
    """One for each run of rows that changed; a row between two of them is shown with the first."""
    first_before = first_after = 1
    done = 0
    for start, end in _runs(pairs):
        start, end = max(done, start - _CONTEXT), min(end + _CONTEXT, len(pairs))
        for shown in (pairs[done:start], found := list(pairs[start:end])):
            before, after = sum(p.before is not None for p in shown), sum(p.after is not None for p in shown)
            first_before, first_after = first_before + before, first_after + after
        ranges = f"-{_range(first_before - before, before)} +{_range(first_after - after, after)}"
        sites = {id(site): site for p in found if p.sign != "=" for site in of_rows.get(p.row.name, ())}
        yield _Hunk(found, ranges, list(sites.values()))
        done = end


def _runs(pairs: Sequence[Pair]) -> Iterator[tuple[int, int]]:
    start = 0
    for changed, run in itertools.groupby(pairs, lambda pair: pair.sign != "="):
        end = start + len(list(run))
        if changed:
            yield start, end
        start = end


def _range(first: int, count: int) -> str:
    """As unified diffs have it: of none, the line before."""
    return f"{first if count else first - 1},{count}"


def _changes(hunk: Sequence[Pair], order: dict[str, int]) -> Iterator[str]:
    """Its lines; of neighbors that changed, first all that are gone, then all that are new."""
    gone: list[Row] = []
    new: list[Row] = []
    for pair in (*hunk, None):
        if pair is None or pair.sign == "=":
            yield from (f"-{row.text}" for row in sorted(gone, key=lambda row: order[row.name]))
            yield from (f"+{row.text}" for row in new)
            gone, new = [], []
            if pair is not None:
                yield f" {pair.row.text}"
            continue
        gone += [pair.before] if pair.before else []
        new += [pair.after] if pair.after else []


def _about(hunk: _Hunk) -> str:
    """Return what was replaced there, where; and where else."""
    said = list(dict.fromkeys(f"{site.fusion}{_at(site.module, site.location)}" for site in hunk.sites))
    if not said:
        gone = all(pair.sign in "-=" for pair in hunk.pairs)
        said = [f"{'no longer needed' if gone else 'changed'}{_at(hunk.changed.module, hunk.changed.location)}"]
    if hunk.alike:
        layers = list(dict.fromkeys(other.layer for other in hunk.alike))
        said.append(f"the same in {_spans(layers)}" if all(layers) else f"the same {len(hunk.alike)} times more")
    return "; ".join(said)


def _at(module: str, location: str) -> str:
    return f"{' in ' * bool(module)}{module}{f' ({location})' if location else ''}"


def _spans(layers: Sequence[str]) -> str:
    """``model.layers.1 to 15``."""
    spans: list[tuple[str, int, int]] = []
    for layer in layers:
        digits = re.search(r"\d+$", layer)
        assert digits is not None
        prefix, number = layer[: digits.start()], int(digits[0])
        if spans and spans[-1][0] == prefix and spans[-1][2] + 1 == number:
            spans[-1] = (prefix, spans[-1][1], number)
        else:
            spans.append((prefix, number, number))
    return ", ".join(f"{prefix}{first}" + f" to {last}" * (last > first) for prefix, first, last in spans)
