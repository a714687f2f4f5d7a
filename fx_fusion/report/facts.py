"""A report in numbers, for the logs of a training run."""

from __future__ import annotations

from fx_fusion.report.report import Report

PAGE = "fx_fusion.html"  # how the page is called that is written beside checkpoints


def facts(report: Report) -> dict[str, float]:
    """Numbers by name, for a log.

    - ``fx_fusion/fused``, ``/kept``, ``/declined``, ``/near``: how many sites have this status;
    - ``fx_fusion/graphs``: how many graphs were compiled;
    - ``fx_fusion/assumption_held``: in which share of the calls of graphs that assume something about their inputs it held;
    - ``fx_fusion/logits_read``: in which share of the calls deferred outputs were read.

    Shares are left out where there were no calls.
    """
    found: dict[str, float] = {"graphs": len(report.graphs)}
    for site in report.sites:
        found[site.status] = found.get(site.status, 0) + 1
    checked = [graph.checked for graph in report.graphs if not graph.version]
    if calls := sum(c.assumed + c.otherwise for c in checked):
        found["assumption_held"] = sum(c.assumed for c in checked) / calls
    deferring = [graph.reads for graph in report.graphs if graph.deferred]
    if calls := sum(r.calls for r in deferring):
        found["logits_read"] = sum(r.calls_read for r in deferring) / calls
    return {f"fx_fusion/{name}": value for name, value in found.items()}
