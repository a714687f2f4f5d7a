"""The line at the head of the page."""

from fx_fusion.memory.recompute import Decisions, Value
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.site import Site
from fx_fusion.report.verdict import verdict
from fx_fusion.runtime.speculate import Calls


def site(status, **estimate):
    return Site("rms_norm", status, "", "m", "f.py:1", estimate=estimate)


def test_all_that_is_known_is_in_it():
    sites = [
        site("fused", ours=1000.0, inductor=3500.0, bytes=2.0**20, inductor_bytes=3 * 2.0**20),
        site("fused", bytes=2.0**20, inductor_bytes=2 * 2.0**20),
        site("kept", ours=1.0, inductor=1e9),
        site("near"),
    ]
    memory = Decisions(values=[Value("swiglu", "m", 2.0**31, 1e-3, True), Value("swiglu", "m", 2.0**40, 1e-3, False)])
    graphs = [GraphReport(0, broke="graph break at f.py:1", calls=Calls(9, 1), memory=memory, assumes=("mask is all ones",))]
    graphs.append(GraphReport(1))
    assert verdict(graphs, sites) == (
        "2 of 4 sites fused (1 kept, 1 near); estimated: 2.5 ms and 3.0 MiB moved less a step than Inductor's; "
        "2 graphs, 1 graph break; assumptions held in 9 of 10 calls; 2.0 GiB computed again, not saved"
    )


def test_what_is_not_known_is_left_out():
    assert verdict([GraphReport(0)], [site("fused")]) == "1 of 1 site fused; 1 graph, 0 graph breaks"


def test_much_is_written_out():
    """As of a large model: no 2.8e+02 ms."""
    assert "estimated: 284 ms less a step" in verdict([GraphReport(0)], [site("fused", ours=0.0, inductor=284_400.0)])
