"""Test what a site takes and saves, as the report says it."""

import dataclasses
import functools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fx_fusion.cost import estimate as estimates
from fx_fusion.cost import measure, table
from fx_fusion.fusion.match import Match
from fx_fusion.fusion.registry import fusion_named
from fx_fusion.options import parse
from fx_fusion.report.report import Report
from fx_fusion.report.site import Site
from fx_fusion.torch_internals.fakes import set_example

BF16 = torch.bfloat16


def matched(fusion, device="cuda", grad=True, **shapes):
    """A match of a fusion whose inputs have these shapes."""
    graph = fx.Graph()
    inputs = {}
    with FakeTensorMode():
        for name, shape in shapes.items():
            inputs[name] = graph.placeholder(name)
            set_example(inputs[name], torch.empty(shape, dtype=BF16, device=device, requires_grad=grad))
    return Match(fusion, tuple(inputs.values())[:1], frozenset(), inputs)


def of(fusion, match, **options):
    return estimates.estimate(fusion_named(fusion), match, parse(None, options))


def cell(fusion, sizes, ours, inductor):
    return table.Cell(fusion, 2, False, fusion_named(fusion).specs[fusion_named(fusion).tensors[0]].layout([sizes["n"], 1]),
                      sizes, ours, inductor)  # fmt: skip


@pytest.fixture
def cells(monkeypatch):
    known = [
        cell("rms_norm", {"m": 8192, "n": 2048}, 0.050, 0.080),
        cell("swiglu", {"m": 8192, "n": 2048}, 0.2, 0.3),
    ]
    monkeypatch.setattr(table, "cells_of", lambda gpu, fusion: tuple(c for c in known if c.fusion == fusion))
    monkeypatch.setattr(table, "tables_for", lambda gpu, device: ("",))


def test_by_the_table_scaled_by_the_bytes_that_move(cells):
    found = of("rms_norm", matched("rms_norm", x=(16384, 2048), weight=(2048,)))
    assert found.source == "table"
    assert found.speed == pytest.approx(1.6)
    assert (found.ours, found.inductor) == pytest.approx((100.0, 160.0)), "microseconds, twice the cell's"
    assert found.bytes == 5 * 16384 * 2048 * 2


def test_by_the_table_of_another_gpu_in_the_time_that_this_one_takes(monkeypatch, cells):
    measured_there = functools.partial(dataclasses.replace, gpu="NVIDIA H200")
    known = tuple(map(measured_there, table.cells_of("", "rms_norm")))
    monkeypatch.setattr(table, "cells_of", lambda gpu, fusion: known)
    monkeypatch.setattr(table, "rates_of_tables", lambda: {"NVIDIA H200": 4e12})
    monkeypatch.setattr(estimates, "bytes_per_second", lambda device: 2e12)
    found = of("rms_norm", matched("rms_norm", x=(8192, 2048), weight=(2048,)))
    assert found.source == "table of an NVIDIA H200"
    assert (found.ours, found.inductor) == pytest.approx((100.0, 160.0)), "twice as long for the same bytes"


def test_a_table_without_a_formula_speaks_for_its_own_sizes_only(cells):
    same, other = (of("swiglu", matched("swiglu", gate=(m, 2048), up=(m, 2048))) for m in (8192, 16384))
    assert (same.ours, same.inductor) == pytest.approx((200.0, 300.0))
    assert (other.ours, other.speed) == (None, pytest.approx(1.5))


def test_by_formula_where_there_is_no_table(monkeypatch):
    monkeypatch.setattr(table, "cells_of", lambda gpu, fusion: ())
    monkeypatch.setattr(estimates, "bytes_per_second", lambda device: 4e12)
    found = of("add_rms_norm", matched("add_rms_norm", x=(16384, 2048), residual=(16384, 2048), weight=(2048,)))
    assert found.source == "formula"
    assert found.speed == pytest.approx(10 / 8)
    assert found.ours == pytest.approx(8 * 16384 * 2048 * 2 / 4e12 * 1e6)
    assert of("swiglu", matched("swiglu", gate=(8192, 2048), up=(8192, 2048))) is None, "it has no formula"


def test_measured_here(monkeypatch, cells):
    monkeypatch.setattr(measure, "known", lambda fusion, match: {"ours": 0.02, "inductor": 0.05})
    found = of("rms_norm", matched("rms_norm", x=(16384, 2048), weight=(2048,)), select="measure")
    assert (found.source, found.ours, found.inductor) == ("measured", pytest.approx(20), pytest.approx(50))


def test_an_estimate_measures_nothing(monkeypatch, cells):
    """A site that options switch off is never timed, for its report either."""
    monkeypatch.setattr(measure, "_measure_in_a_process", lambda site: pytest.fail("it was measured"))
    match = matched("rms_norm", x=(16384, 2048), weight=(2048,))
    assert of("rms_norm", match, select="measure").source == "table"
    site = measure.describe(fusion_named("rms_norm"), match)
    monkeypatch.setitem(measure._SEEN, measure._key(site), {"ours": 0.02, "inductor": 0.05})
    assert of("rms_norm", match, select="measure").source == "measured"


def test_a_forward_alone_moves_other_bytes_than_the_formulas_say(cells):
    found = of("rms_norm", matched("rms_norm", grad=False, x=(16384, 2048), weight=(2048,)))
    assert found.bytes is None
    assert found.inductor_bytes is None


def test_nothing_is_said_of_a_cpu(cells):
    assert of("rms_norm", matched("rms_norm", "cpu", x=(16384, 2048), weight=(2048,))) is None


def test_what_the_report_says():
    facts = {"source": "table", "speed": 1.6, "ours": 1000.0, "inductor": 1600.0, "bytes": 3.4e8, "inductor_bytes": 4.7e8}
    report = Report()
    report.sites = [
        Site("rms_norm", "fused", "", f"layers.{i}.norm", "model.py:3", estimate=facts if i else {"source": "table", "speed": 2.0})
        for i in range(3)
    ]
    assert estimates.total(s.estimate for s in report.sites) == (
        "about 1.2 ms a step less than Inductor's kernels, by table for 2 of 3 sites"
    )
    said = estimates.sentence(facts)
    assert said == "1.6 times Inductor's speed (table): 1000 us instead of 1600, 340 MB moved instead of 470"
    assert estimates.sentence({}) == ""
    again = Report.from_json(report.to_json())
    assert again.sites == report.sites


def test_much_is_written_out():
    facts = {"speed": 213.0, "source": "formula", "ours": 2.0, "inductor": 284_400.0}
    assert estimates.total([facts]).startswith("about 284 ms a step less")
    assert estimates.sentence(facts).startswith("213 times Inductor's speed")
    assert [estimates.short(number, 2) for number in (0.0, 0.056, 9.96, 12.3, 99.7)] == ["0", "0.056", "10", "12", "100"]
