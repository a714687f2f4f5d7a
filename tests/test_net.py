"""Whatever of ours raises, the graph is compiled by Inductor as Dynamo wrote it, with the user's options, and a warning."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend

x, w = torch.randn(4, 8), torch.randn(8, requires_grad=True)


def norm(x, w):
    return F.rms_norm(x, (8,), w).sin()


# Where each function of ours that a compilation goes through is looked up.
FUNCTIONS = [
    "backend.parse", "backend.snapshot", "backend.activation_positions", "backend.read_deferred_examples", "backend.text",
    "backend.why_it_ends", "backend.keep_tensors", "backend.Assumptions", "backend.fuse", "backend.View", "backend.link_bodies",
    "backend.find_matches", "backend.Placement", "backend.near_sites", "backend.defer_outputs", "backend.keep_results_apart",
    "backend.tell_inductor", "backend.remember_accesses", "backend.config_patches", "backend.without_donated_buffers",
    "backend.without_caches", "backend.speculate", "backend.read_deferred_inputs", "backend.publish", "backend.recordings",
    "backend.without_saved_tensor_hooks", "backend.GraphReport", "report.trace.write", "inductor.cache_key.key_of", "pipeline.why_not", "pipeline.rewrite",
    "pipeline.goes_channels_last", "pipeline.module_of", "pipeline.location_of", "pipeline.shapes_of", "cost.select.choose", "rewrite.editor.Editor._describe",
    "rewrite.editor.insertion_point", "graph.view.View.term", "graph.effects.Effects.mutated", "fusion.pattern.Pattern.policy", "fusion.matcher.Attempt.matches",
]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_broken_function_of_ours(name, monkeypatch):
    """A graph in which something would have been fused, in training, through Inductor."""

    def broken(*args, **kwargs):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(f"fx_fusion.{name}", broken)
    fx_fusion.fusion.registry.all_fusions()
    compiled = torch.compile(norm, backend="fx_fusion", options={"select": "always", "max_autotune": False})
    with pytest.warns(UserWarning, match="a bug of ours; the graph goes to Inductor unchanged"):
        y = compiled(x, w)
    torch.testing.assert_close(y, norm(x, w))
    ours, theirs = (torch.autograd.grad(t.sum(), w)[0] for t in (y, norm(x, w)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["backend.tell_inductor", "backend.snapshot", "backend.publish", "backend.parse"])
def test_strict_says_so(name, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(f"fx_fusion.{name}", broken)
    compiled = torch.compile(norm, backend="fx_fusion", options={"select": "always", "strict": True})
    with pytest.raises(Exception, match="a bug of ours"):
        compiled(x, w)


def test_the_fallback_is_in_the_report_and_keeps_the_options(monkeypatch):
    given = []

    def broken():
        raise ZeroDivisionError("a bug of ours")

    def compile_fx(gm, inputs, config_patches):
        given.append((len(gm.graph.nodes), config_patches))
        return gm.forward

    monkeypatch.setattr("fx_fusion.backend.tell_inductor", broken)
    monkeypatch.setattr("fx_fusion.backend.compile_fx", compile_fx)
    with fx_fusion.recording() as report, pytest.warns(UserWarning, match="op failed|backend failed"):
        torch.compile(norm, backend="fx_fusion", options={"select": "always", "max_autotune": True})(x, w)
    (graph,) = report.graphs
    assert "a bug of ours" in graph.fallback
    assert not report.sites
    assert given == [(graph.nodes_before, {"max_autotune": True})]


def test_errors_of_inductor_are_inductors():
    """Where nothing of ours is in the graph, its error is raised as it is."""

    def failing(gm, inputs, options):
        raise ZeroDivisionError("a bug of theirs")

    from fx_fusion.backend import compile_graph
    from fx_fusion.options import parse

    def backend(gm, inputs):
        return compile_graph(gm, inputs, parse(None, {}), failing)

    with pytest.raises(Exception, match="a bug of theirs"):
        torch.compile(lambda x: x + 1, backend=backend)(x)


def test_the_first_call_inside_a_checkpoint():
    """Hooks on saved tensors are active while the backend runs: what it computes for itself is none of theirs."""
    from torch.utils.checkpoint import checkpoint

    layer, given = torch.nn.RMSNorm(8), torch.randn(2, 6, 8, requires_grad=True)
    compiled = torch.compile(lambda x: layer(x) * 2, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        checkpoint(compiled, given, use_reentrant=False).sum().backward()
    report.assert_fused(rms_norm=1)
    found, given.grad = given.grad, None
    (layer(given) * 2).sum().backward()
    torch.testing.assert_close(found, given.grad)


@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["group_norm", "layer_norm"])
def test_weights_of_another_dtype_on_a_cpu(name, wide):
    functions = {
        "group_norm": lambda x, w, b: F.group_norm(x, 2, w.to(x.dtype), b.to(x.dtype)),
        "layer_norm": lambda x, w, b: F.layer_norm(x.transpose(1, 2), (8,), w.to(x.dtype), b.to(x.dtype)),
    }
    given = torch.randn(4, 8, 5).to(wide), torch.randn(8).bfloat16(), torch.randn(8)
    compiled = torch.compile(functions[name], backend="fx_fusion", options={"select": "always"})
    torch.testing.assert_close(compiled(*given), functions[name](*given))
