"""A report as JSON, and back: to look at elsewhere, or later."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
import triton

from fx_fusion.float8.linears import FORWARD, OF_INPUT, Linears
from fx_fusion.inductor.layers_once import Body, Layers
from fx_fusion.memory.recompute import Decisions, Value
from fx_fusion.report.diff import Row
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.site import Site
from fx_fusion.rewrite.verify_graph import Verified
from fx_fusion.runtime.reads import Reads
from fx_fusion.runtime.speculate import Calls

SCHEMA = 4  # of the document; another number where a program that reads it would go wrong
# 1: graphs have no options; 1 and 2: products of linears are no gradient of an input, or one; to 3: without seconds.
_READ = (1, 2, 3, SCHEMA)
_INFINITE = "infinite"
_WRITTEN_APART = ("rows_before", "rows_after", "calls", "unmet", "reads", "memory", "linears", "layers", "verified")


def environment() -> dict[str, str]:
    """Versions, and the GPU that is in use: who only asks for a report must not start CUDA before a fork."""
    try:
        own = importlib.metadata.version("fx_fusion")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        own = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "none"
    return {
        "fx_fusion": own, "python": platform.python_version(), "torch": torch.__version__,
        "triton": triton.__version__, "GPU": gpu,
    }  # fmt: skip


def to_document(sites: Sequence[Site], graphs: Sequence[GraphReport], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what there is to know, in lists, dictionaries, numbers and strings."""
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "counts": {f"{s}/{f}": n for (s, f), n in Counter((s.status, s.fusion) for s in sites).items()},
        "sites": [dict(vars(s)) for s in sites],
        "graphs": [_of_graph(g) for g in graphs],
    }


def from_document(document: Mapping[str, Any]) -> tuple[list[Site], list[GraphReport], dict[str, str]]:
    """Sites, graphs and environment of a document. Raises ValueError if it is none, or of another schema."""
    if document.get("schema") not in _READ:
        known = " or ".join(map(str, _READ))
        raise ValueError(f"this is no report of schema {known}: its schema is {document.get('schema')!r}")
    sites = [Site(**{name: _frozen(value) for name, value in given.items()}) for given in document["sites"]]
    return sites, [_to_graph(given) for given in document["graphs"]], dict(document["environment"])


def _of_graph(graph: GraphReport) -> dict[str, Any]:
    facts = {f.name: getattr(graph, f.name) for f in fields(graph) if f.name not in _WRITTEN_APART}
    return {
        **facts,
        "calls": asdict(graph.calls),
        "unmet": asdict(graph.unmet),
        "reads": {
            "calls": graph.reads.calls, "read": graph.reads.calls_read, "taken": graph.reads.calls_taken,
            "at_once": graph.reads.calls_at_once,
        },
        "memory": asdict(graph.memory), "linears": asdict(graph.linears),
        "layers": asdict(graph.layers),
        "verified": {name: _number(value) for name, value in asdict(graph.verified).items()},
        "before": [list(row) for row in graph.rows_before],
        "after": [list(row) for row in graph.rows_after],
    }


def _to_graph(given: Mapping[str, Any]) -> GraphReport:
    known = {f.name for f in fields(GraphReport)} - set(_WRITTEN_APART)
    reads = Reads()
    reads.calls, reads.calls_read = given["reads"]["calls"], given["reads"]["read"]
    reads.calls_taken, reads.calls_at_once = given["reads"].get("taken", 0), given["reads"].get("at_once", 0)
    memory = {name: _frozen(value) for name, value in given["memory"].items()}
    memory["values"] = [Value(**value) for value in given["memory"]["values"]]
    before, after = (tuple(Row(*map(_frozen, row)) for row in given[when]) for when in ("before", "after"))
    graph = GraphReport(**{name: _frozen(value) for name, value in given.items() if name in known})
    graph.rows_before, graph.rows_after = before, after
    graph.calls, graph.unmet = Calls(**given["calls"]), Calls(**given.get("unmet", {}))
    graph.reads, graph.memory = reads, Decisions(**memory)
    verified: Any = given.get("verified", {})  # files of before have none
    verified = {name: float("inf") if value == _INFINITE else value for name, value in verified.items()}
    graph.verified = Verified(**verified)
    linears = dict(given.get("linears", {}))
    kinds = {False: FORWARD, True: OF_INPUT}
    listed = ((*product, 0.0)[:4] for product in linears.get("products", []))
    linears["products"] = [(module, kinds.get(kind, kind), why, seconds) for module, kind, why, seconds in listed]
    graph.linears = Linears(**linears)
    layers = given.get("layers", {"bodies": [], "trouble": ""})  # files of before have none
    graph.layers = Layers([Body(**body) for body in layers["bodies"]], layers["trouble"])
    return graph


def _number(value: Any) -> Any:
    """JSON has no infinity, which is what an error is where NaN was found."""
    return _INFINITE if value == float("inf") else value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
