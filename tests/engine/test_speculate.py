"""A padding mask assumed to be all ones: never a wrong result, whatever comes."""

import contextlib
import copy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.graph.masks.assumed import ONES
from fx_fusion.graph.snapshot import snapshot
from fx_fusion.options import parse
from fx_fusion.report.facts import facts
from fx_fusion.report.verdict import verdict
from fx_fusion.runtime import mask_values
from fx_fusion.runtime.mask_values import Padding, is_of_kind
from fx_fusion.runtime.speculate import compiled_apart
from fx_fusion.testing import eager_rest, rewriting_backend
from fx_fusion.torch_internals.dynamo import parameter_path
from fx_fusion.torch_internals.nodes import region_change
from tests.helpers import tiny_llama, tokens

ids = tokens()
ones = torch.ones(2, 16, dtype=torch.long)
padded = torch.tensor([[1] * 16, [1] * 10 + [0] * 6])
left_padded = padded.flip(1)


def models(**options):
    eager = tiny_llama()
    ours = copy.deepcopy(eager)
    return eager, ours, torch.compile(ours, backend=rewriting_backend(**options))


def same_step(eager, ours, compiled, mask):
    labels = ids.masked_fill(mask == 0, -100)
    expected = eager(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss = compiled(input_ids=ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_padded_batches_in_the_middle_of_training_and_accumulation():
    eager, ours, compiled = models()
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (eager, ours)]
    with fx_fusion.recording() as report:
        for mask in (ones, ones.clone(), padded, left_padded, ones, padded.bool().long()):
            same_step(eager, ours, compiled, mask)  # gradients accumulate over the calls
    assert report.count("causal_mask") == 2
    assert any("all ones" in a for g in report.graphs for a in g.assumes)
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    same_step(eager, ours, compiled, ones)


def test_the_padded_batch_first():
    same_step(*models(), padded)


def test_a_boolean_mask():
    eager, ours, compiled = models()
    same_step(eager, ours, compiled, ones.bool())
    same_step(eager, ours, compiled, padded.bool())


def test_a_mask_changed_in_place_is_read_again():
    eager, ours, compiled = models()
    mask = ones.clone()
    same_step(eager, ours, compiled, mask)
    mask[1, 10:] = 0
    same_step(eager, ours, compiled, mask)
    mask.fill_(1)
    same_step(eager, ours, compiled, mask)


def test_a_mask_of_twos_is_not_ones():
    assert not is_of_kind(ones * 2, ONES)
    assert is_of_kind(ones, ONES)
    assert is_of_kind(ones.bool(), ONES)
    assert not is_of_kind(ones.float() * 0.5, ONES)


@pytest.fixture
def looks(monkeypatch):
    """The masks that were read."""
    read, holds = [], mask_values._holds
    monkeypatch.setattr(mask_values, "_holds", lambda mask, kind: (read.append(mask), holds(mask, kind))[1])
    return read


def test_the_same_tensor_is_read_once_on_a_gpu_and_always_on_a_cpu(device, looks):
    mask, other = ones.clone().to(device), padded.to(device)
    for _ in range(5):
        assert is_of_kind(mask, ONES)
    assert len(looks) == (1 if device == "cuda" else 5)
    assert not is_of_kind(other, ONES)
    mask[0, 0] = 0
    assert not is_of_kind(mask, ONES)


def test_memory_shared_with_numpy():
    array = ones.numpy().copy()
    mask = torch.from_numpy(array)
    assert is_of_kind(mask, ONES)
    array[0, 0] = 0
    assert not is_of_kind(mask, ONES)


@pytest.fixture
def reading_waits(monkeypatch):
    monkeypatch.setattr(mask_values, "reading_waits", lambda mask: True)


def test_after_two_padded_batches_nobody_waits_until_one_is_full(reading_waits, monkeypatch):
    later = []
    monkeypatch.setattr(mask_values, "read_later", lambda answer: (later.append(answer), lambda: bool(answer))[1])
    padding = Padding()
    masks = [ones, padded, padded, padded, ones, ones, padded, padded, padded]
    found = [padding.is_absent(mask.clone()) for mask in masks]
    # The full batch behind three padded ones runs as a padded one; the next call is told.
    assert found == [True, False, False, False, False, True, False, False, False]
    assert len(later) == 3


def test_a_batch_that_comes_again_gets_the_same_answer(reading_waits):
    """Activation checkpointing runs a graph again in the backward: the version of the forward."""
    padding, batches = Padding(), [padded.clone(), padded.clone(), ones.clone(), ones.clone()]
    found = []
    for mask in batches:
        forward = padding.is_absent(mask)
        found.append(forward)
        assert padding.is_absent(mask) == forward
    assert found == [False, False, False, True]


def test_padded_batches_one_after_another_and_a_full_one(reading_waits):
    """As on a GPU, where masks are not waited for: whatever runs is right."""
    eager, ours, compiled = models()
    with fx_fusion.recording() as report:
        for mask in (ones, padded, left_padded, padded, ones, ones, padded):
            same_step(eager, ours, compiled, mask.clone())
    assert [(g.calls.assumed, g.calls.otherwise) for g in report.graphs if g.assumes] == [(2, 5)]


def test_switched_off():
    eager, ours, compiled = models(speculate=False)
    with fx_fusion.recording() as report:
        same_step(eager, ours, compiled, ones)
    report.assert_fused(causal_mask=0)
    assert not report.graphs[0].assumes


def test_evaluation_under_inference_mode():
    eager, ours, compiled = models()
    with torch.inference_mode():
        for mask in (ones, padded, ones):
            expected, out = (m(input_ids=ids, attention_mask=mask) for m in (eager, compiled))
            torch.testing.assert_close(out.logits + 0, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_symbolic_lengths():
    eager, ours, _ = models()
    compiled = torch.compile(ours, backend=rewriting_backend(), dynamic=True)
    for length, mask in ((16, ones), (12, padded), (9, ones), (16, padded)):
        cut = {"input_ids": ids[:, :length], "attention_mask": mask[:, :length], "labels": ids[:, :length]}
        torch.testing.assert_close(compiled(**cut).loss, eager(**cut).loss)


@pytest.mark.parametrize("masks", [(ones, padded, ones, left_padded), pytest.param((padded, ones), marks=pytest.mark.slow)], ids=["ones_first", "padded_first"])
def test_through_inductor(masks):
    """Both versions are compiled, fused and in the report, which counts how often each was called."""
    eager = tiny_llama(num_hidden_layers=1, vocab_size=5000)
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="fx_fusion", options={"strict": True, "select": "always"})
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with fx_fusion.recording() as report:
        for mask in masks:
            same_step(eager, ours, compiled, mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2
    first, second = report.graphs
    assert (first.instead_of, second.instead_of) == (None, first.index)
    fast, exact = (first, second) if masks[0] is ones else (second, first)
    assert fast.assumes == ("attention_mask is all ones",)
    assert not exact.assumes
    assert exact.nodes_after < exact.nodes_before
    assert {s.graph for s in report.sites if s.fusion == "linear_cross_entropy"} == {fast.index, exact.index}
    assert report.count("causal_mask") == 1
    assert report.count("linear_cross_entropy") == 2
    held = sum(mask is ones for mask in masks)
    calls = first.calls if first is fast else first.unmet
    assert (calls.assumed, calls.otherwise) == (held, len(masks) - held)
    assert f"held in {held} of {len(masks)} calls" in str(report)
    assert f"graph {first.index} {'without its assumption' if first is fast else 'for other inputs'}" in str(report)


def test_a_padded_batch_long_after_the_recording():
    """The first step is recorded, padding comes later: the report still gets the second version."""
    eager, ours, compiled = models()
    with fx_fusion.recording() as report:
        same_step(eager, ours, compiled, ones)
    assert len(report.graphs) == 1
    same_step(eager, ours, compiled, padded)
    assert [g.instead_of for g in report.graphs] == [None, report.graphs[0].index]
    with fx_fusion.recording() as later:
        same_step(eager, ours, compiled, padded)
    assert not later.graphs, "compiled once"


def test_more_padded_graphs_than_dynamo_recompiles_a_function():
    """Every graph has a version of its own: none counts as another's recompilation, or takes its sizes for changing ones."""

    def attention(q, mask):
        visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril() & mask[:, None, None, :].bool()
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=visible)

    import types

    with fx_fusion.recording() as report:
        for n in range(4, 16):
            own = types.FunctionType(attention.__code__.replace(co_name=f"attention_{n}"), attention.__globals__)
            q, mask = torch.randn(2, 1, n, 8), torch.ones(2, n, dtype=torch.long)
            compiled = torch.compile(own, backend=rewriting_backend())
            for shown in (n, 2):
                mask[0, shown:] = 0
                torch.testing.assert_close(compiled(q, mask), attention(q, mask))
    exact = [g for g in report.graphs if g.instead_of is not None]
    assert len(exact) == 12
    assert not any("s" in line.split("[")[1].split("]")[0] for g in exact for line in g.before.splitlines() if ": float32[" in line)


def test_a_stance_that_refuses_recompilations():
    """Serving: warmed up without padding. The padded version is compiled late, and is no recompilation of the user's."""
    eager, ours, compiled = models()
    same_step(eager, ours, compiled, ones)
    with torch.compiler.set_stance("fail_on_recompile"):
        same_step(eager, ours, compiled, padded)
        with pytest.raises(RuntimeError, match="recompile"):
            compiled(input_ids=ids[:, :7], attention_mask=ones[:, :7], labels=ids[:, :7])


def test_marked_dims_and_the_first_batch_padded():
    """The sizes come in as numbers beside tensors that are marked: they are symbolic in both versions."""

    def attention(x, mask):
        q = x.view(x.shape[0], x.shape[1], 2, 8).transpose(1, 2)
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & mask[:, None, None, :].bool()
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=visible)

    compiled = torch.compile(attention, backend=rewriting_backend())
    for length in (8, 11, 9):
        x, mask = torch.randn(3, length, 16), torch.ones(3, length, dtype=torch.long)
        mask[0, 5:] = 0
        for tensor in (x, mask):
            torch._dynamo.mark_dynamic(tensor, 1)
        torch.testing.assert_close(compiled(x, mask), attention(x, mask))


def test_padded_batches_of_many_lengths():
    """Compiled for the first length, and for any length from the second on: never once a length, never in eager, and nothing
    for batches without padding, of which none comes."""
    eager, ours, compiled = models()
    with fx_fusion.recording() as report:
        for length in (16, 12, 9, 14, 7, 11, 13, 8, 10, 15, 6):
            cut = {"input_ids": ids[:, :length], "attention_mask": padded.flip(1)[:, :length], "labels": ids[:, :length]}
            torch.testing.assert_close(compiled(**cut).loss, eager(**cut).loss)
    assert not any(g.instead_of for g in report.graphs)
    assert len(report.graphs) <= 3
    assert sum(g.unmet.otherwise for g in report.graphs) == 11


class Autocast(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **given):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**given)


SETUPS = {
    "autocast_inside": lambda model: contextlib.nullcontext(),
    "plain": lambda model: contextlib.nullcontext(),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "checkpoint": lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    or contextlib.nullcontext(),
    "no_grad": lambda model: torch.no_grad(),
    "inference": lambda model: torch.inference_mode(),
}


@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "automatic"])
@pytest.mark.parametrize("name", SETUPS)
def test_a_padded_batch_is_rewritten_as_a_full_one_is(name, dynamic):
    """Its graph is captured a second time: what the first one says of autocast, checkpoints and grad mode is still there."""
    eager, ours = tiny_llama(), tiny_llama()
    ours.load_state_dict(eager.state_dict())
    eager.train(), ours.train()
    wrapped = [Autocast(m) if name == "autocast_inside" else m for m in (ours, eager)]
    given = {"input_ids": ids, "labels": ids}
    with fx_fusion.recording() as report, SETUPS[name](eager), SETUPS[name](ours):
        compiled = torch.compile(wrapped[0], backend=rewriting_backend(), dynamic=dynamic)
        for mask in (ones, padded, ones, padded):
            found, expected = (m(**given, attention_mask=mask) for m in (compiled, wrapped[1]))
            torch.testing.assert_close(found.loss, expected.loss, rtol=2e-2 if "autocast" in name else 1e-4, atol=1e-4)
            if found.loss.requires_grad:
                found.loss.backward()
                expected.loss.backward()
    full, other = report.graphs
    assert (full.calls.assumed, full.calls.otherwise) == (2, 2)
    assert not any(g.fallback or g.broke for g in report.graphs), str(report)
    by_graph = [Counter(s.fusion for s in report.sites if s.graph == g.index and s.status == "fused") for g in (full, other)]
    left_out = by_graph[0] - by_graph[1]
    assert set(left_out) <= {"causal_mask", "repeat_kv"}, left_out  # FlexAttention has no backward on a CPU
    assert by_graph[1]["linear_cross_entropy"] == 1


def test_a_graph_that_is_captured_again_has_the_same_regions():
    """Dynamo takes the private calls apart that it wrote itself, unless they are written as blocks."""

    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.nn.functional.linear(x, w)
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                z = torch.nn.functional.linear(x, w)
        return y, z

    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm if len(graphs) > 1 else compiled_apart(snapshot(gm), backend, contextlib.nullcontext, print)

    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)
    found = torch.compile(function, backend=backend)(x, w)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32]
    assert [t.requires_grad for t in found] == [True, False]
    changes = [[c for n in gm.graph.nodes if (c := region_change(n)) is not None] for gm in graphs]
    assert changes[0] == changes[1]
    assert changes[0].count("enter autocast") == 2


def test_a_version_that_cannot_be_compiled_runs_as_it_is():
    """In the middle of a run, whatever Dynamo makes of it."""
    told = []

    def broken(gm, inputs):
        raise ValueError("this backend fails")

    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    graph = torch.fx.symbolic_trace(Double())
    call = compiled_apart(graph, broken, contextlib.nullcontext, told.append)
    for _ in range(2):
        torch.testing.assert_close(call(torch.ones(3)), torch.full((3,), 2.0))
    assert len(told) == 1
    assert "this backend fails" in str(told[0])


def test_a_mask_that_hides_nothing_at_first():
    """Two assumptions: that it is causal, which the first one is not, and what is known of that one instead."""
    function = lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)  # noqa: E731
    q = torch.randn(2, 2, 8, 8)
    nothing = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    padding, causal = nothing.clone(), nothing.tril()
    padding[0, :, :, 6:] = False
    compiled = torch.compile(function, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        for mask in (nothing, padding, padding.clone(), nothing.clone(), padding.clone(), causal):
            torch.testing.assert_close(compiled(q, mask), function(q, mask))
    first = report.graphs[0]
    assert first.assumes == ("mask hides nothing",)
    assert (first.calls.assumed, first.calls.otherwise) == (2, 4)
    assert (first.unmet.assumed, first.unmet.otherwise) == (1, 5)
    assert facts(report)["fx_fusion/assumption_held"] == 2 / 6
    assert "assumptions held in 2 of 6 calls" in verdict(report.graphs, report.sites)


def test_inputs_have_the_models_names_in_other_versions():
    eager, ours, compiled = models()
    with fx_fusion.recording() as report:
        for mask in (ones, padded):
            same_step(eager, ours, compiled, mask)
    (other,) = [graph for graph in report.graphs if graph.version]
    said = " ".join(site.reason for site in report.sites if site.graph == other.index)
    assert "keys shown by attention_mask" in said
    assert "args[" not in str(report)


@pytest.mark.parametrize("order", ["padded padded ones padded", "ones padded ones", "left_padded ones left_padded"])
def test_the_first_batch_says_what_is_compiled_first(order):
    """Whoever trains on padded batches compiles nothing for others, and pays for no call of a version."""
    eager, ours, compiled = models()
    masks = [globals()[name] for name in order.split()]
    compiled_after = []
    with fx_fusion.recording() as report:
        for mask in masks:
            same_step(eager, ours, compiled, mask)
            compiled_after.append(len(report.graphs))
    assert compiled_after == {"p": [1, 1, 2, 2], "o": [1, 2, 2], "l": [1, 2, 2]}[order[0]]
    first, other = report.graphs
    assert not any(g.fallback for g in report.graphs), str(report)
    fired = [Counter(s.fusion for s in report.sites if s.graph == g.index and s.status == "fused") for g in report.graphs]
    assert (fired[0]["causal_mask"] > 0) == (order[0] == "o"), "attention is causal where there is no padding"
    assert (fired[1]["causal_mask"] > 0) == (order[0] != "o")
    held = sum(mask is ones for mask in masks)
    assert facts(report)["fx_fusion/assumption_held"] == held / len(masks), "each call counts once"
    if order[0] != "o":
        assert first.unassumed == other.assumes == ("attention_mask is all ones",)
        assert (first.unmet.assumed, first.unmet.otherwise) == (held, len(masks) - held)
        assert "graph 0: not assumed, as it did not hold in the first call: attention_mask is all ones" in str(
            report
        ).replace(f"graph {first.index}", "graph 0")


def test_a_graph_compiled_for_padding_first_keeps_what_dynamo_noted():
    """Which inputs are parameters (CUDA graphs copy the others in each call), and why the graph ends where it does."""
    seen = []

    def rest(gm, examples, options):
        seen.append(gm)
        return eager_rest(gm, examples, options)

    def broken(ids, mask):
        out = model(input_ids=ids, attention_mask=mask).logits
        torch._dynamo.graph_break()
        return out.sum()

    model = tiny_llama()
    parsed = parse(None, {"select": "always", "strict": True})
    for mask in (ones, padded):
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            torch.compile(broken, backend=partial(compile_graph, options=parsed, rest=rest))(ids, mask)
        assert bool(report.graphs[0].unassumed) == (mask is padded)
        assert report.graphs[0].broke.startswith("graph break at")
    notes = []
    for gm in (gm for gm in seen if len(gm.graph.nodes) > 50):
        inputs = gm.graph.find_nodes(op="placeholder")
        static = ["_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) for node in inputs]
        notes.append((gm._param_name_to_source, [parameter_path(node) for node in inputs], static, bool(gm.compile_subgraph_reason)))
    assert len(notes) == 2
    assert notes[0] == notes[1]
    assert "layers.0.mlp.up_proj.weight" in str(notes[0][1])


def test_a_mask_that_a_replayed_graph_writes_anew_is_read_anew(reading_waits):
    """A CUDA graph's replay writes into the tensor that it returned before, and its version stays."""
    q = torch.arange(16)
    kept = torch.empty(1, 1, 16, 16, dtype=torch.bool)
    options = parse("reduce-overhead", {"select": "always", "strict": True})

    def build(allowed):
        return ((q[None, :] <= q[:, None]) & allowed)[None, None]

    def attend(x, mask):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def replayed(gm, inputs, options):
        def run(*args):
            kept.data.copy_(gm(*args)[0])
            return (kept,)

        return run

    torch._dynamo.reset()
    make = torch.compile(build, backend=lambda gm, inputs: compile_graph(gm, inputs, options, replayed))
    use = torch.compile(attend, backend=lambda gm, inputs: compile_graph(gm, inputs, options, eager_rest))
    x, everything = torch.randn(2, 4, 16, 8), torch.ones(16, 16, dtype=torch.bool)
    for allowed in (everything, everything, everything.triu(-3), everything):
        mask = make(allowed)
        version = mask._version
        torch.testing.assert_close(use(x, mask), attend(x, mask))
        assert mask is kept
    assert mask._version == version
