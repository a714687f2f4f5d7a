"""The report, the options, the ways to fail."""

import json

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.options import parse
from fx_fusion.report import trace as debug
from fx_fusion.testing import rewriting_backend
from tests.helpers import rewritten, tiny_llama, tokens


def silu_mlp(x, w):
    return F.silu(x @ w) * (x @ w.t())


x, w = torch.randn(4, 8), torch.randn(8, 8)


def test_table_diff_json_and_counts():
    model, ids = tiny_llama(), tokens()
    with fx_fusion.recording() as report:
        torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids)
    text = str(report)
    assert "modeling_llama.py:" in text
    assert "model.layers.{0-1}.mlp" in text
    assert report.count("swiglu", "fused") == 2
    report.assert_fused(swiglu=2, rope=2, linear_cross_entropy=1)
    with pytest.raises(AssertionError, match="swiglu: 2 fused, 7 expected"):
        report.assert_fused(swiglu=7)
    site = next(s for s in report.sites if s.fusion == "swiglu")
    assert (site.status, site.reason, site.module) == ("fused", "", "model.layers.0.mlp")
    assert site.location.startswith("modeling_llama.py:")
    assert site.shapes == {"gate": "float32[2, 16, 128]", "up": "float32[2, 16, 128]"}
    data = json.loads(report.to_json())
    assert data["counts"]["fused/swiglu"] == 2
    assert data["sites"][0].keys() >= {"fusion", "status", "reason", "module", "location", "shapes"}
    removed = [line for line in report.diff().splitlines() if line.startswith("-q_embed")]
    added = [line for line in report.diff().splitlines() if line.startswith("+q_embed")]
    assert removed
    assert added, "the node that takes the place of another keeps its name"


def test_explain_leaves_the_model_alone():
    model, ids = tiny_llama(), tokens()
    report = fx_fusion.explain(model, input_ids=ids, labels=ids, options={"select": "always"})
    report.assert_fused(swiglu=2)
    assert all(p.grad is None for p in model.parameters())


def test_statuses_on_cpu():
    _, report = rewritten(silu_mlp, x, w, options={"select": "auto"})
    assert [(s.fusion, s.status) for s in report.sites] == [("swiglu", "kept")]
    assert "CPU" in report.sites[0].reason
    _, report = rewritten(silu_mlp, x, w, options={"select": "never"})
    assert report.sites[0].status == "kept"
    _, report = rewritten(silu_mlp, x, w, options={"fusions": ["-swiglu"]})
    assert report.count("swish") == 1, "the smaller fusion takes its place"


def test_fuel_stops_after_n_replacements(monkeypatch):
    model, ids = tiny_llama(), tokens()
    for fuel in (0, 1, 5):
        monkeypatch.setenv("FX_FUSION_FUEL", str(fuel))
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            out = torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids)
        assert sum(s.status == "fused" for s in report.sites) == fuel
        torch.testing.assert_close(out.loss, model(input_ids=ids, labels=ids).loss)
    monkeypatch.setenv("FX_FUSION_FUEL", "many")
    with pytest.raises(fx_fusion.OptionError, match="FX_FUSION_FUEL='many' must be a number"):
        parse(None, None)


def test_debug_prints_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FX_FUSION_DEBUG", "1")
    _, report = rewritten(silu_mlp, x, w)
    assert "swiglu" in capsys.readouterr().out
    (file,) = (tmp_path / "fx_fusion_debug").glob("*.diff")
    assert "fx_fusion.swiglu" in file.read_text()


def test_artifacts_reach_the_structured_trace(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        debug,
        "trace_structured",
        lambda kind, metadata_fn, payload_fn: seen.update({metadata_fn()["name"]: payload_fn()}),
    )
    rewritten(silu_mlp, x, w)
    assert seen.keys() == {"fx_fusion_report", "fx_fusion_diff", "fx_fusion_json"}
    assert "swiglu" in seen["fx_fusion_report"]


@pytest.mark.parametrize(("options", "fragment"), [
    ({"slect": "always"}, "Did you mean 'select'"),
    ({"nonsense": 1}, "Valid: select, fusions, defer_outputs, speculate, strict"),
    ({"select": "allways"}, "Did you mean 'always'"),
    ({"fusions": ["rmsnorm"]}, "Did you mean 'rms_norm'"),
    ({"fusions": ["-swigloo"]}, "Did you mean 'swiglu'"),
    ({"strict": 1}, "must be a bool"),
    ({"fusions": "rms_norm"}, "must be a list"),
])  # fmt: skip
def test_unknown_options_are_named(options, fragment):
    with pytest.raises(fx_fusion.OptionError, match=fragment):
        parse(None, options)


def test_modes_and_options_of_inductor_pass_through():
    assert parse("reduce-overhead", None).inductor == {"triton.cudagraphs": True}
    parsed = parse("max-autotune-no-cudagraphs", {"select": "always", "shape_padding": True, "epilogue-fusion": False})
    assert parsed.inductor["max_autotune"] is True
    assert parsed.inductor["shape_padding"] is True
    assert parsed.inductor["epilogue_fusion"] is False
    with pytest.raises(fx_fusion.OptionError, match="Did you mean 'max-autotune'"):
        parse("max-autotun", None)
    with pytest.raises(RuntimeError, match="Unexpected type"):
        parse(None, {"shape_padding": "yes"})


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


def test_its_own_output_matches_nothing():
    """Rewriting a rewritten graph changes nothing."""
    from fx_fusion.backend import compile_graph

    parsed = parse(None, {"select": "always", "strict": True})
    second = []

    def again(gm, inputs, options):
        with fx_fusion.recording() as inner:
            compiled = compile_graph(gm, inputs, parsed, lambda gm, *_: gm.forward)
        second.append(inner)
        return compiled

    with fx_fusion.recording() as report:
        torch.compile(silu_mlp, backend=lambda gm, inputs: compile_graph(gm, inputs, parsed, again))(x, w)
    assert [s.status for s in report.sites] == ["fused"]
    assert "fx_fusion.swiglu" in second[0].graphs[0].before
    assert second[0].sites == []


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


def test_user_less_writes_survive():
    """What fx would call dead code: an in-place method whose result nobody uses."""
    buffer = torch.zeros(8)

    def function(x, w):
        buffer.copy_(x.mean(0))
        y = silu_mlp(x, w)
        y.masked_fill_(y > 1, 1.0)
        return y

    result, report = rewritten(function, x, w)
    report.assert_fused(swiglu=1)
    torch.testing.assert_close(buffer, x.mean(0))
    torch.testing.assert_close(result, silu_mlp(x, w).clamp(max=1.0))


def test_every_fusion_is_two_files_of_one_name():
    from pathlib import Path

    root = Path(__file__).parent.parent
    for fusion in all_fusions():
        assert (root / "patterns" / f"{fusion.name}.py").exists()
        assert (root / "kernels" / f"{fusion.name}.py").exists() or fusion.kernel is None
        assert fusion.source
        assert fusion.cases


def test_auto_keeps_what_is_too_small_for_an_op():
    """The cost rules read sizes, also symbolic ones, and add no guard."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from fx_fusion.fusion.registry import fusion_named
    from fx_fusion.graph.size_hints import elements

    norm, loss = fusion_named("rms_norm").pays, fusion_named("cross_entropy").pays
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    few, many = (mode.from_tensor(torch.empty(n, 3), symbolic_context=context).shape[0] for n in (64, 16384))
    assert isinstance(few, torch.SymInt)
    with mode:
        small, large, static = (torch.empty(n, 2048, device="cuda") for n in (few, many, 64))
        assert "below 2^24" in norm(small, None, 1e-6, 0.0, True)
        assert norm(large, None, 1e-6, 0.0, True) is None
        assert norm(static, None, 1e-6, 0.0, True) is None  # Inductor launches the kernels itself
        assert "classes" in loss(torch.empty(2**20, 1000, device="cuda"), None, None, -100, 0.0, 0.0, 1.0)
        assert loss(torch.empty(8192, 128256, device="cuda"), None, None, -100, 0.0, 0.0, 1.0) is None
    seen = []

    def backend(gm, inputs):
        seen.extend(elements(i) for i in inputs if isinstance(i, torch.Tensor))
        return gm.forward

    run = torch.compile(lambda x: x + 1, backend=backend, dynamic=True)
    for n in (5, 7, 9):
        run(torch.ones(n, 3))
    assert seen == [15], "one graph for all lengths: reading a size as a hint guards nothing"


def test_a_graph_break_before_the_loss_is_named_with_its_remedy():
    """A logger between lm_head and loss: the loss fires alone, and the report says what broke the graph, where, and how
    to mend it."""
    from tests.zoo import batch, build

    model = build("GPT2")
    model.loss_type = None  # transformers warns through its logger
    with fx_fusion.recording() as report:
        torch.compile(model, backend=rewriting_backend())(**batch())
    report.assert_fused(cross_entropy=1, linear_cross_entropy=0)
    broken = [g.broke for g in report.graphs if g.broke]
    assert len(broken) == 1
    assert broken[0].startswith("graph break at modeling_gpt2.py:")
    assert "torch._dynamo.config.ignore_logg" in broken[0]
    assert broken[0] in str(report)
    near = next(s for s in report.sites if s.fusion == "linear_cross_entropy")
    assert "expected linear, found an input of this graph" in near.reason


def test_graphs_that_return_do_not_end_at_a_break():
    with fx_fusion.recording() as report:
        torch.compile(silu_mlp, backend=rewriting_backend())(x, w)
    assert [g.broke for g in report.graphs] == [""]


def test_a_name_that_nobody_has_is_an_error():
    """A typo in an assertion of somebody's CI would pass for ever."""
    with fx_fusion.recording() as report:
        rewritten(silu_mlp, x, w)
    with pytest.raises(ValueError, match="Did you mean 'rms_norm'"):
        report.assert_fused(rmsnorm=0)
    with pytest.raises(ValueError, match="Did you mean 'fused'"):
        report.count("rms_norm", "fussed")


class Broken(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = torch.nn.RMSNorm(width), torch.nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        torch._dynamo.graph_break()
        return self.linear(y)


def test_explain_sees_every_model_of_a_sweep_and_leaves_no_trace():
    models = [Broken(8 * (i + 1)) for i in range(12)]
    for i, model in enumerate(models):
        report = fx_fusion.explain(model, torch.randn(2, 8 * (i + 1)), options={"select": "always"})
        assert (len(report.graphs), report.count("rms_norm")) == (2, 1)
    graphs = []

    def count(gm, inputs):
        graphs.append([n.meta["example_value"].shape for n in gm.graph.nodes if n.op == "placeholder"])
        return gm.forward

    compiled = torch.compile(models[0], backend=count)
    compiled(torch.randn(3, 8))
    assert len(graphs) == 2, "the user's own compilation comes after twelve others"
    assert all(isinstance(n, int) for shapes in graphs for shape in shapes for n in shape), "no size was seen to change"


def test_explain_beside_a_model_that_is_compiled():
    model, graphs = Broken(8), []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=count)
    compiled(torch.randn(2, 8))
    for n in range(20):
        assert len(fx_fusion.explain(compiled if n % 2 else model, torch.randn(2 + n, 8)).graphs) == 2
    compiled(torch.randn(2, 8))
    compiled(torch.randn(5, 8))
    assert len(graphs) in (4, 6), "once, once more for another size, and at most once because its versions were dropped"


def test_threads_record_what_is_theirs():
    import threading

    seen = {}

    def work(name, function):
        with fx_fusion.recording() as report:
            barrier.wait()
            torch.compile(function, backend=rewriting_backend())(x, w)
            barrier.wait()
        seen[name] = report

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=given) for given in (("mlp", silu_mlp), ("norm", lambda x, w: F.layer_norm(x, (8,))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {s.fusion for s in seen["mlp"].sites} == {"swiglu"}
    assert {s.fusion for s in seen["norm"].sites} == {"layer_norm"}


def test_a_rewrite_that_does_not_fit_gives_its_nodes_back():
    """The weight comes after the first use of the sum: the op of both can't stand anywhere, one without the weight can."""

    def function(x, residual, weight):
        h = x + residual
        used = h * 2
        w = weight * 1
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)), used

    given = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    found, report = rewritten(function, *given)
    for ours, theirs in zip(found, function(*given), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sum(site.status == "fused" for site in report.sites) == 1
    assert "does not exist yet" in next(s.reason for s in report.sites if s.status == "declined")
    with_less, report = rewritten(function, *given, options={"fusions": ["-add_rms_norm"]})
    torch.testing.assert_close(with_less, found)
    report.assert_fused(rms_norm=1)


def test_a_number_that_changes_is_left_to_inductor():
    """An eps that the caller changes: two graphs, as without fx_fusion, not one a value."""
    compiled = torch.compile(lambda x, w, e: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e)), backend=rewriting_backend())
    with fx_fusion.recording() as report:
        for e in (1e-6, 1e-3, 0.1, 0.2, 0.3, 0.4):
            compiled(torch.randn(3, 8), torch.randn(8), e)
    assert len(report.graphs) == 2
    assert "changes between calls" in next(s.reason for s in report.sites if s.status == "declined")


def test_a_view_in_a_pattern_is_that_view(monkeypatch):
    """Groups of two neighbours are not groups of four: a view matches one that makes the same shape of the same input."""
    from fx_fusion.fusion import registry
    from fx_fusion.fusion.declaration import Fusion, case

    def pairs(x):
        return x.view(x.shape[0], -1, 2).sigmoid().view(x.shape).tanh()

    fusion = Fusion(
        name="pairs", pattern=pairs, inputs={"x": "m n"}, kernel=None, cases=(case("odd", m=3, n=8, bench=False),), read=None,
    )  # fmt: skip
    from fx_fusion.fusion.legality import has_the_shapes_of_its_pattern
    from fx_fusion.pipeline import find_matches

    monkeypatch.setattr(registry, "all_fusions", lambda: (fusion,))
    for shape, fits in (((3, 4, 2), True), ((3, 2, 4), False)):
        reasons = []

        def backend(gm, inputs, reasons=reasons):
            from fx_fusion.graph.view import View

            view = View(gm.graph)
            candidates, _ = find_matches(view)
            reasons.extend(has_the_shapes_of_its_pattern(fusion, c.match, view) for c in candidates)
            return gm.forward

        torch._dynamo.reset()
        torch.compile(lambda x, shape=shape: x.view(shape).sigmoid().view(x.shape).tanh(), backend=backend)(torch.randn(3, 8))
        assert [reason is None for reason in reasons] == [fits], reasons


def test_gradients_that_no_grad_hides_stay_hidden():
    def repeated(q, k, v):
        with torch.no_grad():
            k, v = (t.repeat_interleave(3, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    q, (k, v) = torch.randn(1, 6, 5, 16), (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in "kv")
    y, _ = rewritten(repeated, q, k, v)
    assert not y.requires_grad

    def cast(x, w):
        with torch.no_grad():
            x = x.float()
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    y, report = rewritten(cast, torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(8))
    assert not y.requires_grad
    report.assert_fused(rms_norm=1)


def test_equal_calls_that_are_returned_are_two_tensors():
    def twice(x, w):
        return F.group_norm(x, 2, w, w), F.group_norm(x * 1, 2, w, w), F.group_norm(x * 1, 2, w, w)

    options = {"select": "always", "strict": True}
    with fx_fusion.recording() as report:
        found = torch.compile(twice, backend="fx_fusion", options=options)(torch.randn(2, 4, 3, requires_grad=True), torch.randn(4))
    report.assert_fused(group_norm=3)
    assert len({t.data_ptr() for t in found}) == 3


def test_what_writes_later_counts_without_matched_nodes():
    """repeat_kv takes nodes over from nobody, but saves other tensors than eager does."""

    def function(q, k, v):
        o = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        v.detach().mul_(0.5)
        return o

    gradients = []
    for f in (function, torch.compile(function, backend=rewriting_backend())):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, n, 4, 8, requires_grad=True) for n in (4, 2, 2))
        f(q * 1, k * 1, v * 1).pow(2).sum().backward()
        gradients.append([t.grad for t in (q, k, v)])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tensors_without_values():
    """A model on the meta device, as sizes are planned with."""
    with torch.device("meta"):
        model, ids = tiny_llama().to("meta"), torch.zeros(2, 16, dtype=torch.long)
        with fx_fusion.recording() as report:
            out = torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
        out.loss.backward()
    report.assert_fused(linear_cross_entropy=1, causal_mask=2, rms_norm=1)
    assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape


def test_a_symbolic_size_is_a_node_of_the_graph():
    """explain() runs the rewritten graph as it is: outside of and inside a checkpoint, with a vocabulary of any size."""
    from torch.utils.checkpoint import checkpoint

    def loss(z, y):
        return -F.log_softmax(z, -1).gather(-1, y.unsqueeze(-1)).mean()

    z, y = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    torch._dynamo.mark_dynamic(z, 2)
    for function in (loss, lambda z, y: checkpoint(loss, z, y, use_reentrant=False)):
        fx_fusion.explain(function, z, y, options={"select": "always", "strict": True}).assert_fused(cross_entropy=1)
