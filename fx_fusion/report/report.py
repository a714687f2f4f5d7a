"""Say what was done, and why the rest was not: sites, the table, the diff, JSON.

Statuses: **fused** (replaced) · **kept** (legal, but Inductor is as good here) · **declined** (the structure fits, a
legality check or the dtype policy says no) · **near** (the structure differs) · **left** (ops that no pattern is about).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from fx_fusion.cost.estimate import saved, sentence, total
from fx_fusion.errors import nearest
from fx_fusion.fusion import registry
from fx_fusion.graph.places import shortened, users_frame
from fx_fusion.memory.recompute import size_of
from fx_fusion.report import reference
from fx_fusion.report.document import environment, from_document, to_document
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.page import Shown, in_a_frame, page
from fx_fusion.report.site import STATUSES, Site
from fx_fusion.report.table import Group, table
from fx_fusion.report.text_diff import text_diff
from fx_fusion.report.unsaid import Unsaid, unsaid
from fx_fusion.report.verdict import NOTHING_RECORDED, counted, verdict
from fx_fusion.report.whereabouts import asks_for, checked, instead_of, is_line, nearest_lines


class Report:
    """Everything that was compiled while it was recording."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.graphs: list[GraphReport] = []
        self._environment: dict[str, str] = {}  # of another machine
        self._left_out: list[Site] = []  # sites of other fusions, where only one is shown
        self._only = ""
        self._numbers: dict[int, int] = {}  # of graphs in this report, by those in this process

    def add(self, graph: GraphReport, sites: list[Site]) -> None:
        """Add one graph as it is numbered. Those of an earlier attempt of Dynamo at the same code (it had to start again)
        are dropped; one attempt may make several, as for the buckets of DDP."""
        self._drop_earlier_attempts(graph)
        self.graphs.append(graph)
        self.sites.extend(sites)

    def record(self, graph: GraphReport, sites: list[Site]) -> None:
        """Add one graph under a number of this report, which begins at 0; a process numbers its graphs over all reports.
        What is counted while the graph runs is shared with the others."""
        self._drop_earlier_attempts(graph)
        number = max((g.index for g in self.graphs), default=-1) + 1
        self._numbers[graph.index] = number
        instead_of = None if graph.instead_of is None else self._numbers.get(graph.instead_of)
        self.add(replace(graph, index=number, instead_of=instead_of), [replace(site, graph=number) for site in sites])

    def _drop_earlier_attempts(self, graph: GraphReport) -> None:
        known = [g for g in self.graphs if g.compile_id and g.compile_id == graph.compile_id]
        dropped = {g.index for g in known if g.attempt < graph.attempt}
        self.graphs = [g for g in self.graphs if g.index not in dropped]
        self.sites = [s for s in self.sites if s.graph not in dropped]

    @property
    def environment(self) -> dict[str, str]:
        """Versions, and the GPU: those of the machine that it was made on."""
        return self._environment or environment()

    # -- questions -----------------------------------------------------------------------------------------------
    def count(self, fusion: str, status: str = "fused") -> int:
        """Return how many sites of a fusion have a status. Raises ValueError for a fusion or status that does not exist."""
        if fusion not in (names := [f.name for f in registry.all_fusions()]):
            raise ValueError(f"no fusion is called {fusion!r}. {nearest(fusion, names)}")
        if status not in STATUSES:
            raise ValueError(f"no status is called {status!r}. {nearest(status, STATUSES)}")
        return sum(s.fusion == fusion and s.status == status for s in self.sites)

    def assert_fused(self, **counts: int) -> None:
        """Raise AssertionError unless exactly so many sites of each named fusion were fused, in at least one graph, and
        TypeError where a number is none."""
        for fusion, wanted in counts.items():
            if not isinstance(wanted, int):
                raise TypeError(f"assert_fused() takes how many sites, as {fusion}=1; got {fusion}={wanted!r}")
        if not self.graphs:
            raise AssertionError(NOTHING_RECORDED)
        wrong = {f: (self.count(f), n) for f, n in counts.items() if self.count(f) != n}
        if wrong:
            lines = [f"{f}: {found} fused, {wanted} expected" for f, (found, wanted) in wrong.items()]
            raise AssertionError("\n".join([*lines, str(self)]))

    def only(self, fusion: str) -> Report:
        """This report with the sites of one fusion. Raises ValueError for a fusion that does not exist."""
        self.count(fusion)
        report = Report()
        report.sites = [site for site in self.sites if site.fusion == fusion]
        report.graphs, report._environment, report._only = self.graphs, self._environment, fusion
        report._left_out = [site for site in self.sites if site.fusion != fusion]
        return report

    def why(self, place: str) -> str:
        """Return what became of a place of the model, and why: a line a site.

        Args:
            place: a module's path, or a part of one, as ``layers.3.norm`` or ``self.layers.3.norm``, with all that is inside
                of it; ``self``, the model itself without them; or a line, as ``model.py:12``.

        Raises ValueError where nothing was recorded, or the place is in none of the graphs; TypeError where it is no string.
        """
        place = checked(place)
        if not self.graphs:
            raise ValueError(f"nothing is known of {place!r}: {NOTHING_RECORDED}")
        rows = [row for graph in self.graphs for row in graph.rows_before]
        line, there = is_line(place), asks_for(place)
        rows_there = {(g.index, row.name) for g in self.graphs for row in g.rows_before if there(row.module, row.location)}
        sites = [
            s
            for s in self.sites
            if there(s.module, s.location)
            or (line and any(there("", call) for call in s.calls))
            or any((s.graph, name) in rows_there for name in s.nodes)
        ]
        if not sites and not rows_there:
            instead = instead_of(place, (row.location for row in rows), (row.module for row in rows))
            raise ValueError(f"No node comes from `{place}`. {instead}")
        said = [_because(site) for site in sites]
        said += [
            f"not recognized{' in ' * bool(found.module)}{found.module}: {found}"
            for graph in self.graphs
            for found in self._unsaid(graph)
            if there(found.module, found.location)
        ]
        if said:
            return "\n".join(dict.fromkeys(said))
        lines = nearest_lines(place, (s.location for s in self.sites)) if line else []
        others = f"; the nearest lines with a site: {', '.join(lines)}" if lines else ""
        return f"{place}: nothing there that a fusion is about; Inductor compiles it{others}"

    # -- output --------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        if not self.graphs:
            return f"fx_fusion  {NOTHING_RECORDED}"
        fused = sum(s.status == "fused" for s in self.sites)
        nodes = sum(g.nodes_before for g in self.graphs), sum(g.nodes_after for g in self.graphs)
        made = f"{counted(len(self.graphs), 'graph')}, {nodes[0]} -> {nodes[1]} nodes"
        head = f"fx_fusion  {made}, {counted(fused, 'site')} fused"
        notes = list(_said_once((note, g.index) for g in self.graphs for note in g.notes()))
        notes += _said_once((f"not recognized: {what}", g.index) for g in self.graphs for what in self._grouped_unsaid(g))
        step = sum(g.memory.step for g in self.graphs if not g.version)
        gain = total((s.estimate for s in self.sites if s.status == "fused"), 1e3 * step)
        notes += [f"estimated: {gain}"] if gain else []
        unmade = sum((Counter(s.unmade) for s in self.sites), Counter[str]())
        notes += [f"never in memory: {size_of(amount)} of {what}" for what, amount in unmade.items()]
        left = nodes[1] - sum(s.status == "fused" for s in self.sites)
        seconds = sum(g.seconds for g in self.graphs)
        notes.append(f"left to Inductor: {max(left, 0)} nodes; rewriting took {seconds:.1f} s")
        return "\n".join([head, table(self._grouped()), *notes])

    __repr__ = __str__

    def _unsaid(self, graph: GraphReport) -> list[Unsaid]:
        inside = [row for row in graph.rows_before if row.name not in graph.outside]
        found = unsaid(inside, (s for s in (*self.sites, *self._left_out) if s.graph == graph.index))
        return [what for what in found if self._only in ("", what.nearest)]

    def _grouped_unsaid(self, graph: GraphReport) -> list[str]:
        groups: dict[str, list[str]] = {}
        for found in self._unsaid(graph):
            groups.setdefault(str(found), []).append(found.module)
        return [
            f"{len(modules)} x {what}{' in ' * any(modules)}{shortened([m for m in modules if m])}"
            for what, modules in groups.items()
        ]

    def _grouped(self) -> list[Group]:
        alike: dict[tuple[str, str, str, str], list[Site]] = {}
        for site in self.sites:
            alike.setdefault((site.status, site.fusion, _generic(site.reason), site.location), []).append(site)
        groups = [Group(*key, [s.module for s in sites], saved(s.estimate for s in sites)) for key, sites in alike.items()]

        def order(group: Group) -> Any:
            return STATUSES.index(group.status), -(group.gain or 0.0), group.fusion, group.location

        return sorted(groups, key=order)

    def diff(self) -> str:
        """Unified text diff of every graph before and after, to be read: each hunk with its fusions, modules and lines of
        source, hunks that are alike once."""
        if not self.graphs:
            return NOTHING_RECORDED
        return "\n".join(
            text_diff(f"graph {g.index}", g.rows_before, g.rows_after, [s for s in self.sites if s.graph == g.index])
            for g in self.graphs
        )

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str]) -> Path: ...
    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """The page: the graphs before and after, and a card for every site, in one file that needs nothing else. With a
        ``path`` it is written there, and the path is returned."""
        shown = [Shown(g.index, tuple(g.notes()), g.rows_before, g.rows_after, tuple(self._unsaid(g))) for g in self.graphs]
        made = page(verdict(self.graphs, self.sites), shown, self.sites, self.environment, self.graphs)
        if path is None:
            return made
        Path(path).write_text(made, encoding="utf-8", errors="backslashreplace")  # names of files may be no UTF-8
        return Path(path)

    def _repr_html_(self) -> str:
        return in_a_frame(self.to_html())

    def to_json(self) -> str:
        """Everything as a JSON document, which ``from_json`` reads back; its ``schema`` is a number."""
        return json.dumps(to_document(self.sites, self.graphs, self.environment), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Report:
        """The report that ``to_json`` wrote, here or on another machine. Raises ValueError if it is none."""
        document = json.loads(text)
        report = Report()
        try:
            report.sites, report.graphs, report._environment = from_document(document if isinstance(document, dict) else {})
        except (LookupError, TypeError, AttributeError) as error:  # something is missing in it, or of another kind
            raise ValueError(f"the document is damaged ({type(error).__name__}: {error}): write it anew") from error
        return report


def _because(site: Site) -> str:
    """A site in a sentence, with what to write for another fate."""
    where = f" in {site.module}" if site.module else ""
    fusion = next((fusion for fusion in registry.all_fusions() if fusion.name == site.fusion), None)
    instead = "" if fusion is None else reference.instead_of(fusion, site)
    pays = f"; {estimated}" if (estimated := sentence(site.estimate)) else ""
    advice = f"; write {instead}" if instead and "write " not in site.reason else ""
    reason = f": {_generic(site.reason)}" if site.reason else ""
    called = f", called at {frame}" if (frame := users_frame(site.calls)) else ""
    return f"{site.status}: {site.fusion}{where} ({site.location}{called}){reason}{pays}{advice}"


def _generic(reason: str) -> str:
    """A reason without node numbers, so that equal sites of many layers share a line."""
    return re.sub(r"(?<=[a-z])_\d+\b", "", reason)


def _said_once(notes: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Sentences with the graphs that they are said of."""
    graphs: dict[str, list[int]] = {}
    for note, graph in notes:
        graphs.setdefault(note, []).append(graph)
    for note, of in graphs.items():
        yield f"graph{'s' * (len(of) > 1)} {', '.join(map(str, of))}: {note}"
