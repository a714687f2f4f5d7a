"""Say in one line what a report found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fx_fusion.cost.estimate import short
from fx_fusion.memory.recompute import size_of
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.site import STATUSES, Site

NOTHING_RECORDED = (
    "nothing was compiled while this report was recording. What was compiled before is not compiled again: record the first "
    "call, or call torch._dynamo.reset() before."
)
NOTHING_COMPILED = "nothing was compiled: the script has to call torch.compile, or model.compile()"


def counted(count: int, noun: str) -> str:
    """A number and what it counts: ``1 site``, ``2 sites``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def verdict(graphs: Sequence[GraphReport], sites: Sequence[Site]) -> str:
    """Return how many sites were fused, what they save, graph breaks, how often assumptions held, what is computed again."""
    if not graphs:
        return NOTHING_RECORDED
    others = ", ".join(f"{n} {s}" for s in STATUSES[1:] if (n := sum(site.status == s for site in sites)))
    fused = [site.estimate for site in sites if site.status == "fused"]
    said = [f"{len(fused)} of {counted(len(sites), 'site')} fused" + f" ({others})" * bool(others)]
    time = sum(e["inductor"] - e["ours"] for e in fused if "ours" in e)
    moved = sum(e["inductor_bytes"] - e["bytes"] for e in fused if "bytes" in e)
    saved = [f"{short(time / 1e3, 2)} ms"] * any("ours" in e for e in fused)
    saved += [f"{size_of(moved)} moved"] * any("bytes" in e for e in fused)
    if saved:
        said.append(f"estimated: {' and '.join(saved)} less a step than Inductor's")
    unmade = sum((Counter(site.unmade) for site in sites), Counter[str]())
    said += [f"{size_of(amount)} of {what} never in memory" for what, amount in unmade.items()]
    said.append(f"{counted(len(graphs), 'graph')}, {counted(sum(bool(g.broke) for g in graphs), 'graph break')}")
    checked = [graph.checked for graph in graphs if not graph.version]
    if calls := sum(c.assumed + c.otherwise for c in checked):
        said.append(f"assumptions held in {sum(c.assumed for c in checked)} of {calls} calls")
    if again := sum(value.bytes for g in graphs for value in g.memory.values if value.again):
        said.append(f"{size_of(again)} computed again, not saved")
    return "; ".join(said)
