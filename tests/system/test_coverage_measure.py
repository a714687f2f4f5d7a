"""The coverage suite's own measuring: what it has to see, it sees."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_fusion.report.diff import rows, text
from fx_fusion.report.site import Site
from fx_fusion.tiny_configs import shrunk
from tests.coverage.measure import Captured, _difference, became, compare, counts, said_of, step
from tests.coverage.places import Place, modules_of_a_kind, places

NAN, INF = float("nan"), float("inf")


# -- numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ours", [[NAN, 1.0], [INF, 1.0]])
def test_what_is_no_number_is_infinitely_wrong(ours):
    assert _difference(torch.tensor(ours), torch.tensor([1.0, 1.0])) == INF


@pytest.mark.parametrize("truth", [[NAN, 1.0], [INF, 1.0], [-INF, 1.0]])
def test_a_number_where_there_is_none_is_infinitely_wrong(truth):
    assert _difference(torch.tensor([1.0, 1.0]), torch.tensor(truth)) == INF


def test_infinities_of_other_signs_differ():
    assert _difference(torch.tensor([INF]), torch.tensor([-INF])) == INF


def test_what_is_no_number_in_both_is_fine_and_the_rest_is_compared():
    truth = torch.tensor([NAN, -INF, 2.0])
    assert _difference(truth.clone(), truth) == 0
    assert _difference(torch.tensor([NAN, -INF, 3.0]), truth) == 0.5


def test_another_shape_is_infinitely_wrong():
    assert _difference(torch.ones(1), torch.ones(3)) == INF


class Counting(nn.Module):
    """A linear layer, a batch norm that remembers, and an output of several tensors."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        from transformers.modeling_outputs import ImageClassifierOutput

        y = self.norm(self.linear(x))
        return ImageClassifierOutput(loss=y.square().mean(), logits=y, hidden_states=(x, y * 2))


def test_a_step_compares_buffers_and_hidden_states_and_leaves_buffers_alone():
    model, inputs = Counting(), {"x": torch.randn(8, 4)}
    eager, again = step(model, model, inputs), step(model, model, inputs)
    assert int(model.norm.num_batches_tracked) == 0
    assert int(eager["buffer norm.num_batches_tracked"]) == 1
    assert {"output.hidden_states.0", "output.hidden_states.1", "linear.weight"} <= eager.keys()
    assert compare(model, inputs, eager, again, torch.float32)[0] == 0


@pytest.mark.parametrize("name", ["buffer norm.running_mean", "output.hidden_states.1", "linear.weight"])
@pytest.mark.parametrize("error", [0.1, NAN])
def test_a_difference_anywhere_is_seen(name, error):
    model, inputs = Counting(), {"x": torch.randn(8, 4)}
    eager = step(model, model, inputs)
    worst = compare(model, inputs, eager, eager | {name: eager[name] + error}, torch.float32)
    assert worst[0] > 1
    assert worst[1] == name


def test_what_eager_overflows_to_is_no_license():
    """Where float16 overflows in eager and float64 does not, ours has to overflow too, and only there."""

    class Overflowing(Counting):
        def forward(self, x):
            out = super().forward(x)
            out.hidden_states = (x * 1e5,)
            return out

    model, inputs = Overflowing().half(), {"x": torch.ones(8, 4, dtype=torch.half)}
    eager = step(model, model, inputs)
    assert eager["output.hidden_states.0"].isinf().all()
    assert compare(model, inputs, eager, dict(eager), torch.float16)[0] <= 1
    wrong = eager | {"output.hidden_states.0": torch.ones(8, 4, dtype=torch.half)}
    assert compare(model, inputs, eager, wrong, torch.float16)[0] == INF


# -- small models --------------------------------------------------------------------------------------------------
def captured(function, *args, **kwargs):
    """The graphs that Dynamo makes of a call."""
    graphs = []
    torch.compile(function, backend=lambda gm, _: graphs.append(gm) or gm.forward, dynamic=False)(*args, **kwargs)
    return graphs


def config_of(name):
    import transformers

    return shrunk(getattr(transformers, name).config_class, "causal")


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM", "GPTNeoForCausalLM"])
def test_windows_hide_something_of_sixteen_tokens(name):
    config = config_of(name)
    sizes = ("sliding_window", "attention_chunk_size", "window_size")
    assert 1 < next(getattr(config, s) for s in sizes if getattr(config, s, None)) < 16


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Gemma3ForCausalLM"])
def test_a_window_is_in_the_graph(name):
    import transformers

    model = getattr(transformers, name)(config_of(name)).train()
    ids = torch.randint(3, 100, (2, 16))
    graphs = captured(model, input_ids=ids, labels=ids)
    lines = "\n".join(text(rows(graph)) for graph in graphs)
    assert re.search(r"\w+: int64\[[\d, ]*\] = sub\(\w+, 8\)", lines)  # the first key that a query sees
    assert [p for g in graphs for p in places(g) if p.kind == "masked attention"]


@pytest.mark.parametrize("name", ["JambaForCausalLM", "BambaForCausalLM", "RecurrentGemmaForCausalLM", "GraniteMoeHybridForCausalLM"])
def test_hybrids_have_attention_and_another_kind_of_layer(name):
    kinds = config_of(name).layers_block_type
    assert any("attention" in kind and "linear" not in kind for kind in kinds)
    assert len(set(kinds)) == 2


def test_no_class_loses_a_kind_of_layer():
    """Every kind of layer of the default config is in the small one."""
    from tests.coverage.run import classes

    lost = {}
    for name in classes("causal"):
        import transformers

        config_class = getattr(transformers, name).config_class
        try:
            default, small = config_class(), shrunk(config_class, "causal")
        except Exception:  # not a config that can be made without more
            continue
        for field in ("layer_types", "layers_block_type", "mlp_layer_types"):
            kinds = set(getattr(default, field, None) or ()) - set(getattr(small, field, None) or ())
            if kinds:
                lost[name] = kinds
    assert not lost


# -- places --------------------------------------------------------------------------------------------------------
def scores_by_matmul(q, k):
    return q @ k.transpose(-1, -2)


def scores_by_einsum(q, k):
    return torch.einsum("bhqd,bhkd->bhqk", q, k)


def scores_by_baddbmm(q, k):
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    return torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(-1, -2)).view(2, 4, 16, 16)


def kinds(function, *args):
    return sorted(p.kind for g in captured(function, *args) for p in places(g))


@pytest.mark.parametrize("scores", [scores_by_matmul, scores_by_einsum, scores_by_baddbmm])
def test_attention_written_out_is_a_place(scores):
    def attention(q, k, v):
        return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores(q, k) * 0.5 + 1, -1).to(q.dtype), v)

    assert kinds(attention, *torch.randn(3, 2, 4, 16, 8)) == ["attention"]


def test_a_router_is_no_attention():
    router = nn.Parameter(torch.randn(8, 4))

    def route(x):
        return torch.softmax(x @ router, -1).unsqueeze(-2) @ torch.randn(4, 8)

    assert kinds(route, torch.randn(2, 16, 8)) == []
    assert kinds(lambda x: torch.softmax(x, -1) @ x, torch.randn(8, 8)) == []


def test_repeated_keys_are_a_place():
    def grouped(q, k, v):
        k, v = (t[:, :, None].expand(2, 2, 2, 16, 8).reshape(2, 4, 16, 8) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    q, kv = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 2, 16, 8)
    assert kinds(grouped, q, *kv) == ["repeat_kv"]
    assert kinds(lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v), q, kv[0], q) == ["repeat_kv"]
    assert kinds(lambda q, k, v: F.scaled_dot_product_attention(q, k.reshape(2, 4, 8, 8), v), q, kv[0], q[:, :, :8]) == []
    assert kinds(F.scaled_dot_product_attention, q, q, q) == []


def test_swish_is_a_place_in_both_spellings():
    assert kinds(lambda x: F.silu(x) + x * torch.sigmoid(x), torch.randn(8)) == ["swish", "swish"]
    assert kinds(lambda x, y: y * torch.sigmoid(x), torch.randn(8), torch.randn(8)) == []


def test_a_bias_with_strided_rows_is_a_place():
    def attention(q, bias):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias.permute(2, 0, 1)[None])

    q = torch.randn(2, 4, 16, 8)
    assert kinds(attention, q, torch.randn(16, 16, 4)) == ["dense_mask", "masked attention"]
    assert kinds(lambda q, b: F.scaled_dot_product_attention(q, q, q, attn_mask=b), q, torch.randn(16, 16)) == ["masked attention"]


# -- what became of them -------------------------------------------------------------------------------------------
def place(name, module, location="a.py:1", kind="attention"):
    return Place(kind, name, module, location)


def row(module, status="near", fusion="attention", location="a.py:1"):
    return Site(fusion, status, "", module, location)


def graph_of(before, left):
    return Captured(before, left, [], [], runs=1, index=0)


def test_a_place_that_nobody_speaks_for_is_missing():
    a, b = place("a", "layers.0"), place("b", "layers.1")
    graph = graph_of([a, b], [b])
    assert became("attention", ("attention",), graph, [row("layers.0", "fused")]) == {"fused": 1, "missing": 1}
    assert became("attention", ("attention",), graph, [row("layers.0", "fused"), row("layers.1")]) == {"fused": 1, "near": 1}


def test_what_goes_without_a_row_is_missing():
    assert became("attention", ("attention",), graph_of([place("a", "layers.0")], []), []) == {"missing": 1}


def test_two_rows_of_one_line_do_not_hide_another_place():
    places_left = [place("a", "head", "a.py:1"), place("b", "head", "a.py:1")]
    rows = [row("head", fusion="cross_entropy"), row("head", fusion="linear_cross_entropy")]
    assert sorted(said_of(places_left, rows)) == ["missing", "near"]


def test_a_row_of_another_module_does_not_hide_a_place():
    left = [place("a", "layers.0"), place("b", "layers.1")]
    assert said_of(left, [row("layers.0"), row("layers.0", location="a.py:9")]) == ["near", "missing"]


def test_the_line_of_a_row_comes_before_its_module():
    left = [place("a", "layers.0", "a.py:1"), place("b", "layers.0", "a.py:2")]
    rows = [row("layers.0", "declined", location="a.py:2"), row("layers.0", "near", location="a.py:7")]
    assert said_of(left, rows) == ["near", "declined"]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.act_fn = nn.Linear(8, 8), nn.Linear(8, 8), nn.SiLU()

    def forward(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


def test_another_module_does_not_make_up_for_a_silent_one():
    import collections
    import types

    (gm,) = captured(nn.Sequential(Gated(), Gated()), torch.randn(2, 8))
    modules = modules_of_a_kind(gm, {"Gated": "gated"})
    assert [p.module for p in modules] == ["0", "1"]
    graph = Captured([], [], modules, [], runs=1, index=0)
    rows = [row("0", "fused", "swiglu"), row("0", "fused", "swiglu", "a.py:3")]
    report = types.SimpleNamespace(sites=rows)
    assert counts(report, [graph], collections.Counter())["kinds"]["gated"]["missing"] == 1


def test_attention_by_baddbmm_that_the_report_leaves_out_is_missing():
    """From a capture to the count, with a report that says nothing."""
    import collections
    import types

    def attention(q, k, v):
        return torch.softmax(scores_by_baddbmm(q, k), -1) @ v

    (gm,) = captured(attention, *torch.randn(3, 2, 4, 16, 8))
    graph = Captured(places(gm), places(gm), [], [], runs=3, index=0)
    kinds = counts(types.SimpleNamespace(sites=[]), [graph], collections.Counter())["kinds"]
    assert kinds["attention"]["missing"] == kinds["attention"]["in_graphs"] == 3
