"""A report as a page: one file of HTML that needs nothing else."""

from __future__ import annotations

import html
import inspect
import json
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from fx_fusion.report.site import STATUSES, Site
from fx_fusion.report.unsaid import Unsaid

_FILES = Path(__file__).parent / "page_files"
_AROUND = 6  # lines of source around one that is shown


@dataclass(frozen=True)
class Shown:
    """One graph, and what there is to say of it."""

    index: int
    notes: tuple[str, ...]
    before: tuple[Row, ...]
    after: tuple[Row, ...]
    unsaid: tuple[Unsaid, ...]


def page(verdict: str, graphs: Sequence[Shown], sites: Sequence[Site], environment: dict[str, str]) -> str:
    """The page: self-contained, and whatever a model is called, escaped."""
    names = _Names()
    data = {
        "verdict": verdict,
        "environment": environment,
        "statuses": STATUSES,
        "sites": [_site(site, names) for site in sites],
        "graphs": [_graph(graph, sites, names) for graph in graphs],
        "tree": _tree(graphs, sites),
        "unsaid": [
            {"graph": graph.index, "op": found.op, "module": found.module, "at": found.location, "row": found.row}
            for graph in graphs
            for found in graph.unsaid
        ],
        "fusions": {name: _fusion(name) for name in sorted({site.fusion for site in sites})},
        "sources": _sources(sites),
        "names": names.all,
    }
    # Inside of a script element: what could end it, or be read as HTML, is written as escapes of JSON.
    encoded = json.dumps(data, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    template = jinja2.Environment(autoescape=True).from_string((_FILES / "page.html").read_text())
    return template.render(
        title=verdict,
        style=markupsafe.Markup((_FILES / "page.css").read_text()),
        script=markupsafe.Markup((_FILES / "page.js").read_text()),
        data=markupsafe.Markup(encoded),
    )


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
    """Rows as lists: sign, name, text before, text after (where it is another), module, location, sites, operands."""
    of_rows: dict[str, list[int]] = {}
    for i, site in enumerate(sites):
        for name in dict.fromkeys((*site.nodes, *site.made)) if site.graph == graph.index else ():
            of_rows.setdefault(name, []).append(i)
    shown = blocks(align(graph.before, graph.after))
    numbers: dict[str, int] = {}
    for block in shown:
        for pair in block.pairs:
            numbers.setdefault(pair.row.name, len(numbers))
    return {
        "index": graph.index,
        "notes": graph.notes,
        "blocks": [_block(block, shown, numbers, of_rows, names) for block in shown],
    }


def _block(
    block: Block, all_blocks: list[Block], numbers: dict[str, int], of_rows: dict[str, list[int]], names: _Names
) -> dict[str, Any]:  # fmt: skip
    rows = []
    for pair in block.pairs:
        row = pair.row
        before, after = ("" if r is None else r.text for r in (pair.before, pair.after))
        operands = [numbers[name] for name in (pair.after or row).operands if name in numbers]
        rows.append([pair.sign, row.name, before, "" if before == after else after, names(row.module), names(row.location),
                     of_rows.get(row.name, []), operands])  # fmt: skip
    like = next((i for i, other in enumerate(all_blocks) if other is block.like), -1)
    return {"title": block.title, "like": like, "rows": rows}


# -- sites --------------------------------------------------------------------------------------------------------------
def _site(site: Site, names: _Names) -> dict[str, Any]:
    return {
        "fusion": site.fusion, "status": site.status, "reason": site.reason, "module": site.module, "at": site.location,
        "graph": site.graph, "shapes": site.shapes, "estimate": sentence(site.estimate),
        "lines": [names(call) for call in _shown_calls(site)],
        "nodes": site.nodes, "made": site.made,
    }  # fmt: skip


def _fusion(name: str) -> dict[str, str]:
    """What a fusion is about, and the function that it stands for."""
    found: dict[str, Fusion] = {fusion.name: fusion for fusion in registry.all_fusions()}
    if name not in found:
        return {"about": "", "reference": "", "instead": ""}
    pattern = found[name].pattern
    about = (inspect.getdoc(inspect.getmodule(pattern)) or "").split("\n\n")[0].replace("``", "")
    return {"about": about, "reference": _source_of(pattern), "instead": found[name].instead}


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # no file: a notebook that is gone, a frozen application
        return ""


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
    """The innermost line of the user's own, and the innermost one."""
    own = [call for call in site.calls if "site-packages" not in call]
    return list(dict.fromkeys((*own[-1:], *site.calls[-1:])))


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
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split(".")]


def _at(root: dict[str, Any], path: str) -> dict[str, Any]:
    node = root
    for part in filter(None, path.split(".")):
        node = node["children"].setdefault(part, {"name": part, "children": {}, "sites": []})
    return node


def _folded(node: dict[str, Any], sites: Sequence[Site]) -> dict[str, Any]:
    children: list[dict[str, Any]] = []
    for child in (_folded(child, sites) for child in node["children"].values()):
        last = children[-1] if children else None
        if last is not None and child["name"].isdigit() and last["name"][:1].isdigit() and last["like"] == child["like"]:
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
