"""The report, the options, the ways to fail."""

import json

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion import debug
from fx_fusion.options import parse
from fx_fusion.registry import all_fusions
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

    monkeypatch.setattr("fx_fusion.canonicalize.View.term", broken)
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

    from fx_fusion.registry import fusion_named
    from fx_fusion.sizes import elements

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
