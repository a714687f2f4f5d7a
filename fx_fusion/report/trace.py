"""The report where tools look for it: ``TORCH_TRACE`` artifacts for tlparse, and the terminal."""

from __future__ import annotations

from pathlib import Path

from fx_fusion.report.graph import GraphReport
from fx_fusion.report.report import Report
from fx_fusion.report.site import Site
from fx_fusion.torch_internals.dynamo import publish_artifact


def write(graph: GraphReport, sites: list[Site], *, to_terminal: bool) -> None:
    """Publish one graph's table and diff as structured-trace artifacts; with ``to_terminal`` (``FX_FUSION_DEBUG=1``)
    also print the table and write the diff to ``fx_fusion_debug/``."""
    report = Report()
    report.add(graph, sites)
    artifacts = {"report": lambda: str(report), "diff": report.diff, "json": report.to_json}
    for name, payload in artifacts.items():
        publish_artifact(f"fx_fusion_{name}", payload)
    if to_terminal:
        print(report)
        folder = Path("fx_fusion_debug")
        folder.mkdir(exist_ok=True)
        (folder / f"graph_{graph.index}.diff").write_text(report.diff())
