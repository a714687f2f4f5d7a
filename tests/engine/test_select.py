"""Selection by rules: layouts of images, gradients, heads that make logits again."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.cost import select
from fx_fusion.fusion.match import Match
from fx_fusion.fusion.registry import fusion_named
from fx_fusion.fusion.search import Search
from fx_fusion.graph.devices import planning_for
from fx_fusion.graph.view import View
from fx_fusion.inductor.channels_last import goes_channels_last
from fx_fusion.ops.layouts import channels_last
from fx_fusion.options import parse
from fx_fusion.pipeline import Fuel, rewrite
from fx_fusion.rewrite.editor import Editor


def norm(x, w):
    return w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def placed(view, options):
    """The sites of a graph after its fusions were chosen and put in."""
    return rewrite(Search(view), options, Editor(view), Fuel(None), graph=0)


def convolutions(*weights, groups=1, device="cuda"):
    """A graph of convolutions on fake images."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.empty(8, weights[0][1] * groups, 32, 32, device=device)
        for i, shape in enumerate(weights):
            w = graph.placeholder(f"w{i}")
            w.meta["example_value"] = torch.empty(*shape, device=device)
            x = graph.call_function(torch.conv2d, (x, w, None, 1, 1, 1, groups))
            x.meta["example_value"] = torch.empty(8, shape[0], 32, 32, device=device)
    return graph


@pytest.mark.parametrize(
    ("mode", "options", "fused"),
    [(None, {}, False), ("reduce-overhead", {}, True), (None, {"select": "always"}, True)],
    ids=["auto", "cuda_graphs", "always"],
)
def test_norms_between_convolutions_that_go_channels_last(mode, options, fused):
    graph = convolutions((128, 64, 3, 3), (128, 128, 3, 3))
    last = list(graph.nodes)[-1]
    norm = graph.call_function(F.group_norm, (last, 32))
    norm.meta["example_value"] = torch.empty_like(last.meta["example_value"])
    conv = graph.call_function(torch.conv2d, (norm, *last.args[1:]))
    conv.meta["example_value"] = torch.empty_like(norm.meta["example_value"])
    graph.output((conv,))
    view = View(graph)
    sites = placed(view, parse(mode, options))
    assert [site.status for site in sites] == ["fused" if fused else "kept"]
    assert any(node.target is channels_last for node in graph.nodes) == fused
    if not fused:
        assert "reduce-overhead" in sites[0].reason


@pytest.mark.parametrize("trained", [False, True])
def test_rotations_without_a_gradient_are_inductors(trained):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(8, 32, 2048, 64, device="cuda", requires_grad=trained)
        table = torch.empty(8, 1, 2048, 64, device="cuda")
        assert (fusion_named("rope").why_keep(q, table, table, "rotate_half", "input", False) is None) == trained
        with torch.no_grad():
            assert fusion_named("rope").why_keep(q, table, table, "rotate_half", "input", False) is not None


def test_a_statistic_that_is_returned_beside_images():
    """EvoNorm-B0 has a second result, a number a channel: no image that would be copied."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["example_value"] = torch.empty(16, 64, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        norm, var = graph.call_function(F.group_norm, (x, 32)), graph.call_method("mean", (x, (0, 2, 3)))
        norm.meta["example_value"] = F.group_norm(x.meta["example_value"], 32).contiguous()  # channels last from torch 2.15 on
        var.meta["example_value"] = x.meta["example_value"].mean((0, 2, 3))
    fusion = fusion_named("group_norm")
    match = Match("group_norm", (norm, var), frozenset((norm, var)), {"x": x})
    end = graph.output((var,))
    assert not select.returns_contiguous(fusion, match, View(graph))
    end.args = ((var, norm),)
    assert select.returns_contiguous(fusion, match, View(graph))


@pytest.mark.parametrize("returned", [False, True])
def test_norms_of_channels_last_images_that_the_graph_returns(returned):
    """PyTorch's result is contiguous on a GPU: the kernel's would be copied."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    with FakeTensorMode():
        # Where Inductor is slower, if there is a GPU to ask the table of.
        x.meta["example_value"] = torch.empty(64, 256, 56, 56, device="cuda").to(memory_format=torch.channels_last)
        w.meta["example_value"] = torch.empty(8, 256, 1, 1, device="cuda")
        norm = graph.call_function(F.group_norm, (x, 32))
        norm.meta["example_value"] = F.group_norm(x.meta["example_value"], 32).contiguous()  # channels last from torch 2.15 on
        conv = graph.call_function(torch.conv2d, (norm, w))
        conv.meta["example_value"] = torch.conv2d(norm.meta["example_value"], w.meta["example_value"])
    graph.output((norm, conv) if returned else (conv,))
    view = View(graph)
    sites = placed(view, parse("reduce-overhead", {}))
    assert [site.status for site in sites] == ["kept" if returned else "fused"], [s.reason for s in sites]
    if returned:
        assert "copy" in sites[0].reason


@pytest.mark.parametrize(
    ("hidden", "dtype", "trained", "reduction", "kept"),
    [
        (4096, torch.bfloat16, True, "none", True), (4096, torch.bfloat16, False, "none", False),
        (768, torch.bfloat16, True, "none", False), (4096, torch.bfloat16, True, "mean", False),
        (768, torch.float32, True, "none", True), (64, torch.float32, True, "none", False),
    ],
)  # fmt: skip
def test_heads_whose_backward_would_make_the_logits_again(hidden, dtype, trained, reduction, kept):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(8192, hidden, device="cuda", dtype=dtype, requires_grad=trained)
        lm_head = torch.empty(128256, hidden, device="cuda", dtype=dtype, requires_grad=trained)
        target = torch.empty(8192, device="cuda", dtype=torch.int64)
        loss = fusion_named("linear_cross_entropy").why_keep(x, lm_head, None, target, None, None, reduction, -100, 0.0, 0.0, 1.0)
        assert (loss is not None) == kept
        if reduction == "none":
            both = fusion_named("token_log_probs").why_keep(x, lm_head, None, target, 0.0, 1.0)
            assert (both is not None) == kept
            with torch.no_grad():
                assert fusion_named("token_log_probs").why_keep(x, lm_head, None, target, 0.0, 1.0) is None


@pytest.fixture
def tf32():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32")
def test_tensor_cores_make_logits_of_float32_again():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, lm_head = (torch.empty(n, 768, device="cuda", requires_grad=True) for n in (8192, 128256))
        target = torch.empty(8192, device="cuda", dtype=torch.int64)
        assert fusion_named("token_log_probs").why_keep(x, lm_head, None, target, 0.0, 1.0) is None


def test_which_graphs_inductor_lays_out_channels_last():
    assert goes_channels_last(convolutions((128, 64, 3, 3), (128, 128, 3, 3)))
    assert not goes_channels_last(convolutions((64, 64, 3, 3))), "small channels"
    assert not goes_channels_last(convolutions((64, 128, 3, 3), (128, 64, 3, 3))), "it narrows"
    assert goes_channels_last(convolutions((64, 128, 1, 1), (128, 64, 3, 3))), "a 1 x 1 may narrow"
    assert not goes_channels_last(convolutions((128, 64, 3, 3), groups=2)), "grouped"
    assert goes_channels_last(convolutions((128, 1, 3, 3), groups=128)), "depthwise"
    assert not goes_channels_last(convolutions((128, 64, 3, 3), device="cpu"))
    assert not goes_channels_last(torch.fx.Graph())


def merged(q, k, v):
    """Batch and heads in one dim for the products, two for the mask: nothing lies as the kernel takes it."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(2, 4, 16, 16)
    probabilities = torch.softmax(scores.masked_fill(hidden(), float("-inf")), -1).view(8, 16, 16)
    return torch.bmm(probabilities, v.flatten(0, 1))


def hidden():
    return torch.ones(16, 16, dtype=torch.bool).tril().logical_not()


def by(scores):
    def attention(q, k, v):
        made = scores(q, k).masked_fill(hidden(), float("-inf"))
        return torch.softmax(made, -1) @ v

    return attention


ANEW = {
    "batch and heads in one dim": merged,
    "queries and keys positions first": by(lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2))),
    "queries positions first": by(lambda q, k: torch.einsum("bqhd,bhkd->bhqk", q.transpose(1, 2), k)),
    "keys positions first": by(lambda q, k: torch.einsum("bhqd,bkhd->bhqk", q, k.transpose(1, 2))),
    "keys of one head": by(lambda q, k: q @ k[:, :1].mT),
}


SHORT = ("keys positions first", "keys of one head")  # queries lie as they come, and the table knows of so few positions


@pytest.mark.parametrize("select", ["auto", "measure", "always", "never"])
@pytest.mark.parametrize("name", ANEW)
def test_attention_whose_operands_are_grouped_anew(name, select):
    """All of them, or some: nothing falls back."""
    q, k, v = (torch.randn(2, 16, 4, 32).transpose(1, 2).contiguous().requires_grad_() for _ in range(3))
    planned = [planning_for("NVIDIA H200")] if select != "measure" else []
    for plan in (contextlib.nullcontext(), *planned):
        with plan:
            report = fx_fusion.explain(ANEW[name], q, k, v, options={"select": select})
        assert [graph.fallback for graph in report.graphs] == [""]
        short = plan in planned and select == "auto" and name in SHORT
        assert report.count("attention") == (select != "never" and not short)
        assert not short or any("the nearest sizes that were measured" in site.reason for site in report.sites)


def test_ranks_go_by_rules_and_not_by_times_of_their_own(monkeypatch):
    """A rank that measures another result than the rest would wait for them in its collectives for ever."""
    monkeypatch.setattr(select.measure, "ask", None)
    monkeypatch.setattr(select, "_by_rules", lambda *given: "by rules")
    match = SimpleNamespace(sharded={"lm_head": 0}, parts={})
    keep, note = select._by_cost(None, match, None, SimpleNamespace(select="measure"))
    assert keep == "by rules"
    assert "not measured" in note
