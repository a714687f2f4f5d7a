"""Test which line of a fusion's reference stands beside a near miss."""

from pathlib import Path

import pytest
import torch

import fx_fusion
from fx_fusion.fusion import registry
from fx_fusion.report.reference import reference

X = torch.randn(2, 8, 64)


def near(function, *args, fusion="rms_norm"):
    report = fx_fusion.explain(function, *args, options={"select": "always", "fusions": [fusion]})
    (site,) = report.sites
    assert site.status == "near", report
    assert fx_fusion.Report.from_json(report.to_json()).sites == [site]
    return site


def line_beside(site):
    (fusion,) = (f for f in registry.all_fusions() if f.name == site.fusion)
    found = reference(fusion, site)
    return found.source.splitlines()[found.line - 1] if found.line else None


def clamped(x):
    variance = x.pow(2).mean(-1, keepdim=True)
    safe = variance.clamp_min(1e-6)
    return x * torch.rsqrt(safe)


def other_dim(x):
    return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)


def cubed(x):
    return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(("function", "lines"), [(clamped, "+ eps"), (other_dim, ".mean(-1"), (cubed, "pow(2)")])
def test_the_line_of_the_op_that_differs(function, lines):
    assert lines in line_beside(near(function, X))


def test_a_line_of_a_helper_comes_with_the_helper():
    def added(x, y):
        h = x + y
        return h, clamped(h)

    report = fx_fusion.explain(added, X, X, options={"select": "always", "fusions": ["add_rms_norm"]})
    (site,) = report.sites
    assert "+ eps" in line_beside(site)


def test_the_first_op_that_differs_is_known_by_its_node_and_line():
    site = near(clamped, X)
    assert "clamp_min" in site.stopped or site.stopped == "safe"
    path, _, number = site.stopped_at.rpartition(":")
    assert "safe = variance.clamp_min" in Path(path).read_text().splitlines()[int(number) - 1]
    assert 0 < site.matched[0] < site.matched[1]


def test_other_sites_have_the_pattern_and_no_line():
    report = fx_fusion.explain(lambda x: torch.nn.functional.rms_norm(x, (64,)), X, options={"select": "always"})
    (site,) = report.sites
    assert (site.status, site.stopped, site.matched) == ("fused", "", (0, 0))
    (fusion,) = (f for f in registry.all_fusions() if f.name == site.fusion)
    assert "def " in reference(fusion, site).source
    assert reference(fusion, site).line == 0
