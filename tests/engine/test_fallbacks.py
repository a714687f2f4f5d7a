"""Errors of ours and of the compiler behind us: the graph is compiled as it was."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.options import parse
from fx_fusion.testing import rewriting_backend


def silu_mlp(x, w):
    return F.silu(x @ w) * (x @ w.t())


x, w = torch.randn(4, 8), torch.randn(8, 8)


def test_an_error_of_ours_falls_back_with_a_warning(monkeypatch):
    def broken(self, node):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("fx_fusion.graph.view.View.term", broken)
    compiled = torch.compile(silu_mlp, backend=rewriting_backend(strict=False))
    with (
        fx_fusion.recording() as report,
        pytest.warns(UserWarning, match="ZeroDivisionError: a bug of ours; the graph goes to Inductor unchanged"),
    ):
        torch.testing.assert_close(compiled(x, w), silu_mlp(x, w))
    assert "a bug of ours" in report.graphs[0].fallback
    assert report.graphs[0].before == report.graphs[0].after
    torch._dynamo.reset()
    with pytest.raises(Exception, match="ZeroDivisionError: a bug of ours"):
        torch.compile(silu_mlp, backend=rewriting_backend())(x, w)


def test_a_failing_compiler_gets_the_graph_as_it_was():
    from fx_fusion.backend import compile_graph

    def chokes_on_ours(gm, inputs, options):
        if any("fx_fusion" in str(n.target) for n in gm.graph.nodes):
            raise RuntimeError("no such op")
        return gm.forward

    parsed = parse(None, {"select": "always"})
    run = torch.compile(silu_mlp, backend=lambda gm, inputs: compile_graph(gm, inputs, parsed, chokes_on_ours))
    with fx_fusion.recording() as report, pytest.warns(UserWarning, match="no such op; the graph goes to Inductor"):
        torch.testing.assert_close(run(x, w), silu_mlp(x, w))
    assert report.sites == []
    assert "no such op" in report.graphs[0].fallback
