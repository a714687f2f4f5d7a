"""The report where tools look for it: ``TORCH_TRACE`` artifacts for tlparse, log messages (``TORCH_LOGS="fx_fusion"``), and
the terminal.

torch takes the name of any package in ``TORCH_LOGS`` and in ``torch._logging.set_logs(modules=...)``, and sets the level and
the handler of its loggers: all that it takes to have one is to log.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path

from fx_fusion.report.graph import GraphReport
from fx_fusion.report.report import Report
from fx_fusion.report.site import Site
from fx_fusion.torch_internals.dynamo import publish_artifact

_log = logging.getLogger(__name__)


def write(graph: GraphReport, sites: list[Site]) -> None:
    """Publish one graph's table and diff as structured-trace artifacts, and log what was done: a line at INFO, the table at
    DEBUG. With ``FX_FUSION_DEBUG=1`` also print the table and write the diff to ``fx_fusion_debug/``, a folder a process."""
    report = Report()
    report.add(graph, sites)
    artifacts = {"report": lambda: str(report), "diff": report.diff, "json": report.to_json}
    for name, payload in artifacts.items():
        publish_artifact(f"fx_fusion_{name}", payload)
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", _in_a_line(graph, sites))
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report)
    if os.environ.get("FX_FUSION_DEBUG") == "1":
        print(report)
        rank = f"rank_{os.environ['RANK']}_" if "RANK" in os.environ else ""  # as torchrun and its like say it
        file = Path("fx_fusion_debug", f"{rank}process_{os.getpid()}", f"graph_{graph.index}.diff").absolute()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(report.diff())
        except OSError as error:  # a disk that is full is no reason to compile the graph anew
            print(f"fx_fusion: the diff of graph {graph.index} is not written: {error}", file=sys.stderr)
        else:
            print(f"fx_fusion: written: {file}", file=sys.stderr)


def log_fallback(error: BaseException, instead: str) -> None:
    """Log what of ours raised, and what happens instead, at INFO; where it was raised at DEBUG."""
    _log.info("%s: %r", instead, error)
    _log.debug("raised here:", exc_info=error)


def _in_a_line(graph: GraphReport, sites: list[Site]) -> str:
    counts = {status: Counter(s.fusion for s in sites if s.status == status) for status in ("fused", "kept", "declined")}
    found = [f"{status}: {', '.join(f'{n} x {name}' for name, n in sorted(c.items()))}" for status, c in counts.items() if c]
    size = f"graph {graph.index}: {graph.nodes_before} -> {graph.nodes_after} nodes in {graph.seconds:.2f} s"
    return "; ".join([size, *(found or ["nothing replaced"]), *graph.notes()])
