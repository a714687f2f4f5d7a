"""The report where tools look for it: ``TORCH_TRACE`` artifacts for tlparse, and the terminal."""

from __future__ import annotations

from pathlib import Path

from torch._logging import trace_structured

from fx_fusion.report.report import GraphReport, Report, Site


def write(graph: GraphReport, sites: list[Site], *, to_terminal: bool) -> None:
    """Publish one graph's table and diff as structured-trace artifacts; with ``to_terminal`` (``FX_FUSION_DEBUG=1``)
    also print the table and write the diff to ``fx_fusion_debug/``."""
    report = Report()
    report.add(graph, sites)
    artifacts = {"report": lambda: str(report), "diff": report.diff, "json": report.to_json}
    for name, payload in artifacts.items():
        trace_structured(
            "artifact",
            metadata_fn=lambda name=name: {"name": f"fx_fusion_{name}", "encoding": "string"},
            payload_fn=payload,
        )
    if to_terminal:
        print(report)
        folder = Path("fx_fusion_debug")
        folder.mkdir(exist_ok=True)
        (folder / f"graph_{graph.index}.diff").write_text(report.diff())
