"""A report as a page: one file of HTML that needs nothing else."""

from __future__ import annotations

import base64
import gzip
import html
import inspect
import json
import linecache
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from fx_fusion.cost.estimate import sentence
from fx_fusion.fusion import registry
from fx_fusion.fusion.declaration import Fusion
from fx_fusion.report.alignment import Block, align, blocks
from fx_fusion.report.diff import Row
from fx_fusion.report.document import to_document
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.reference import Reference, instead_of, reference
from fx_fusion.report.site import STATUSES, Site
from fx_fusion.report.snippet import snippet
from fx_fusion.report.text_diff import text_diff
from fx_fusion.report.unsaid import Unsaid

_FILES = Path(__file__).parent / "page_files"
_SCRIPTS = ("data.js", "graph.js", "card.js", "navigation.js")  # one after the other
_AROUND = 6  # lines of source around one that is shown


@dataclass(frozen=True)
class Shown:
    """One graph, and what there is to say of it."""

    index: int
    notes: tuple[str, ...]
    before: tuple[Row, ...]
    after: tuple[Row, ...]
    unsaid: tuple[Unsaid, ...]


def page(
    verdict: str,
    graphs: Sequence[Shown],
    sites: Sequence[Site],
    environment: dict[str, str],
    whole: Sequence[GraphReport] = (),
) -> str:
    """The page: self-contained, and whatever a model is called, escaped.

    Args:
        whole: the same graphs with all that is known of them: the page then has their options, and the report as JSON.
    """
    names = _Names()
    references = _Names()
    data = {
        "verdict": verdict,
        "environment": environment,
        "whole": bool(whole),
        "options": {graph.index: graph.options for graph in whole},
        "statuses": STATUSES,
        "sites": [_site(site, names, references) for site in sites],
        "graphs": [_graph(graph, sites, names) for graph in graphs],
        "tree": _tree(graphs, sites),
        "unsaid": [
            {"graph": graph.index, "op": found.op, "module": found.module, "at": found.location, "row": found.row}
            for graph in graphs
            for found in graph.unsaid
        ],
        "fusions": {name: _fusion(name) for name in sorted({site.fusion for site in sites})},
        "sources": _sources(sites),
        "references": references.all,
        "names": names.all,
        "diff": "\n".join(
            text_diff(f"graph {g.index}", g.before, g.after, [s for s in sites if s.graph == g.index]) for g in graphs
        ),
    }
    template = jinja2.Environment(autoescape=True).from_string((_FILES / "page.html").read_text())
    return template.render(
        title=verdict,
        style=markupsafe.Markup((_FILES / "page.css").read_text()),
        script=markupsafe.Markup("\n".join((_FILES / name).read_text() for name in _SCRIPTS)),
        data=_packed(json.dumps(data, separators=(",", ":"))),
        document=_packed(json.dumps(to_document(sites, whole, environment), separators=(",", ":"))) if whole else "",
        groups=_grouped(sites),
        notes=[f"graph {graph.index}: {note}" for graph in graphs for note in graph.notes],
    )


def _packed(text: str) -> str:
    """Compressed, in base64, so that no name of a model can end the element; 20 000 nodes are 14 MB of text, 1.7 MB of this
    (1.4 MB at level 6, in three times the time). It cannot be read in the source of the page; who has no JavaScript gets the
    table of sites, and programs ``to_json()``. Every browser has had what unpacks it (DecompressionStream) since 2023."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=3, mtime=0)).decode()


def _grouped(sites: Sequence[Site]) -> list[tuple[str, str, int, str, str]]:
    """Sites by status, fusion, line and reason, for who has no JavaScript."""
    groups = Counter((s.status, s.fusion, s.location, re.sub(r"(?<=[a-z])_\d+\b", "", s.reason)) for s in sites)
    ordered = sorted(groups.items(), key=lambda item: (STATUSES.index(item[0][0]), item[0]))
    return [(status, fusion, count, at, reason) for (status, fusion, at, reason), count in ordered]


def in_a_frame(page: str) -> str:
    """The page inside of another one, a notebook's."""
    return f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:640px;border:0"></iframe>'


class _Names:
    """Strings that occur often, by number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._known: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        if name not in self._known:
            self._known[name] = len(self.all)
            self.all.append(name)
        return self._known[name]


# -- graphs -------------------------------------------------------------------------------------------------------------
def _graph(graph: Shown, sites: Sequence[Site], names: _Names) -> dict[str, Any]:
    of_rows: dict[str, list[int]] = {}
    for i, site in enumerate(sites):
        for name in dict.fromkeys((*site.nodes, *site.made)) if site.graph == graph.index else ():
            of_rows.setdefault(name, []).append(i)
    shown = blocks(align(graph.before, graph.after))
    place = {id(block): i for i, block in enumerate(shown)}
    numbers: dict[str, int] = {}
    for block in shown:
        for pair in block.pairs:
            numbers.setdefault(pair.row.name, len(numbers))
    return {
        "index": graph.index,
        "notes": graph.notes,
        "blocks": [_block(b, -1 if b.like is None else place[id(b.like)], numbers, of_rows, names) for b in shown],
    }


def _block(block: Block, like: int, numbers: dict[str, int], of_rows: dict[str, list[int]], names: _Names) -> dict[str, Any]:
    """Rows by columns: sign, name, text before, text after (where it is another), module, location, sites, operands. Lists
    of numbers are strings: of a list for each row, Python's garbage collector makes a third of the time."""
    rows = [pair.row for pair in block.pairs]
    texts = [("" if p.before is None else p.before.text, "" if p.after is None else p.after.text) for p in block.pairs]
    operands = [(pair.after or pair.row).operands for pair in block.pairs]
    return {
        "title": block.title,
        "like": like,
        "signs": "".join(pair.sign for pair in block.pairs),
        "rows": [row.name for row in rows],
        "before": [before for before, _ in texts],
        "after": ["" if before == after else after for before, after in texts],
        "modules": [names(row.module) for row in rows],
        "at": [names(row.location) for row in rows],
        "sites": [" ".join(map(str, of_rows.get(row.name, ()))) for row in rows],
        "operands": [" ".join(str(numbers[name]) for name in read if name in numbers) for read in operands],
    }


# -- sites --------------------------------------------------------------------------------------------------------------
def _site(site: Site, names: _Names, references: _Names) -> dict[str, Any]:
    fusion = _known().get(site.fusion)
    beside = Reference("") if fusion is None else reference(fusion, site)
    own = _own_call(site)
    return {
        "fusion": site.fusion, "status": site.status, "reason": site.reason, "module": site.module, "at": site.location,
        "own": names("/".join(own.rsplit("/", 2)[-2:])), "graph": site.graph, "shapes": site.shapes,
        "estimate": sentence(site.estimate), "lines": [names(call) for call in _shown_calls(site)],
        "nodes": site.nodes, "made": site.made, "stopped": names(site.stopped_at),
        "reference": references(beside.source), "line": beside.line,
        "instead": "" if fusion is None else instead_of(fusion, site),
        "test": references("" if fusion is None else snippet(fusion, site)),
    }  # fmt: skip


def _known() -> dict[str, Fusion]:
    return {fusion.name: fusion for fusion in registry.all_fusions()}


def _fusion(name: str) -> dict[str, str]:
    """Return what a fusion is about."""
    found = _known().get(name)
    if found is None:
        return {"about": ""}
    about = (inspect.getdoc(inspect.getmodule(found.pattern)) or "").split("\n\n")[0].replace("``", "")
    return {"about": about}


def _sources(sites: Iterable[Site]) -> dict[str, dict[int, str]]:
    """The lines around those that sites come from: by path, by number."""
    found: dict[str, dict[int, str]] = {}
    for call in {call for site in sites for call in _shown_calls(site)}:
        path, _, line = call.rpartition(":")
        for number in range(max(1, int(line) - _AROUND), int(line) + _AROUND + 1):
            if text := linecache.getline(path, number):
                found.setdefault(path, {})[number] = text.rstrip("\n")
    return {path: dict(sorted(lines.items())) for path, lines in found.items()}


def _shown_calls(site: Site) -> list[str]:
    """The innermost line of the user's own, the innermost one, and that where a near miss stopped; each once."""
    shown = [_own_call(site), *site.calls[-1:], site.stopped_at]
    return list(dict.fromkeys(call for call in shown if call))


def _own_call(site: Site) -> str:
    """The innermost line outside of installed packages; empty where there is none."""
    return next((call for call in reversed(site.calls) if "site-packages" not in call), "")


# -- modules ------------------------------------------------------------------------------------------------------------
def _tree(graphs: Sequence[Shown], sites: Sequence[Site]) -> dict[str, Any]:
    """Modules by name, with the sites in each; numbered ones that are alike are one, as ``0-15``."""
    root: dict[str, Any] = {"name": "", "children": {}, "sites": []}
    paths = {row.module for graph in graphs for row in graph.before} | {site.module for site in sites}
    for path in sorted(paths, key=_in_order):
        _at(root, path)
    for i, site in enumerate(sites):
        _at(root, site.module)["sites"].append(i)
    return _folded(root, sites)


def _in_order(path: str) -> list[Any]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")]


def _at(root: dict[str, Any], path: str) -> dict[str, Any]:
    node = root
    for part in filter(None, path.split(".")):
        node = node["children"].setdefault(part, {"name": part, "children": {}, "sites": []})
    return node


def _folded(node: dict[str, Any], sites: Sequence[Site]) -> dict[str, Any]:
    children: list[dict[str, Any]] = []
    for child in (_folded(child, sites) for child in node["children"].values()):
        last = children[-1] if children else None
        if last is not None and child["name"].isdecimal() and last["name"][:1].isdecimal() and last["like"] == child["like"]:
            last["name"] = f"{last['name'].split('-')[0]}-{child['name']}"
            _merge(last, child)
        else:
            children.append(child)
    own = Counter((sites[i].fusion, sites[i].status) for i in node["sites"])
    like = [sorted(map(list, own.items())), [[re.sub(r"^\d+$", "#", c["name"]), c["like"]] for c in children]]
    return {"name": node["name"], "children": children, "sites": node["sites"], "like": json.dumps(like)}


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    into["sites"] = into["sites"] + other["sites"]
    for a, b in zip(into["children"], other["children"], strict=True):
        _merge(a, b)
