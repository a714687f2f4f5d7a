"""``options={"verify": ...}``: what is right trains on as it was, and what is wrong stops the run with a file that shows it."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion import commands
from fx_fusion.backend import compile_graph
from fx_fusion.errors import OptionError, VerificationError
from fx_fusion.options import parse
from fx_fusion.rewrite import verify_graph, verify_site
from fx_fusion.testing import rewriting_backend
from tests import zoo
from tests.helpers import a_little_more, detached, sabotaged, tiny_llama, tokens


def compiled(model, verify="first", **options):
    return torch.compile(model, backend=rewriting_backend(verify=verify, **options), dynamic=False)


def sentences(report):
    return [s for graph in report.graphs for s in graph.verified.sentences()]


def checked(report):
    return sum(graph.verified.checked for graph in report.graphs)


def fused(report):
    """Count the fused sites; a norm that its rotation took in is checked with that."""
    norms = sum(graph.after.count("rms_norm_rope(") for graph in report.graphs)
    return sum(site.status == "fused" for site in report.sites) - norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "T5", "GPT2"])
def test_every_site_of_a_model_is_checked(family, dtype):
    with fx_fusion.recording() as report:
        compiled(zoo.build(family, dtype))(**zoo.batch()).loss.backward()
    assert checked(report) == fused(report) >= 10
    assert len(sentences(report)) == 1, "nothing is left out"
    assert re.match(r"verified in 1 call\(s\): \d+ checks of sites; the worst used 0\.\d\d of what is allowed", sentences(report)[0])
    assert sentences(report)[0] in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*zoo.FAMILIES} - {"Llama", "T5", "GPT2"}))
def test_every_site_of_every_family(family):
    with fx_fusion.recording() as report:
        compiled(zoo.build(family, torch.bfloat16))(**zoo.batch())
    of_integers = report.count("moe_sort")  # are not compared
    assert checked(report) == fused(report) - of_integers >= 10, sentences(report)


@pytest.mark.parametrize("change", [a_little_more, detached])
def test_what_is_wrong_stops_the_run_and_can_be_replayed(change, monkeypatch, tmp_path):
    """A value that is one percent off; a gradient that is missing. Both under Inductor, as users run it."""
    monkeypatch.setenv("FX_FUSION_REPRODUCERS", str(tmp_path))
    options = {"verify": "first", "select": "always"}
    with sabotaged(monkeypatch, "swiglu", 2, change), pytest.raises(VerificationError) as raised:
        torch.compile(tiny_llama(), backend="fx_fusion", options=options)(input_ids=tokens(), labels=tokens())
    said = str(raised.value)
    assert said.startswith("swiglu in model.layers.1.mlp (modeling_llama.py:")
    assert 'without it: options={"fusions": ["-swiglu"]}' in said
    (file,) = tmp_path.iterdir()
    assert f"python -m fx_fusion replay {file}" in said
    check, rows = verify_site.replayed(str(file))
    assert check.fusion == "swiglu"
    assert not rows[0].ok
    assert [row.name for row in rows if row.ok] or change is a_little_more


def test_replaying_a_site_that_is_still_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FX_FUSION_REPRODUCERS", str(tmp_path))
    real = verify_site.compare
    wrong = verify_site.Compared("y", 1.0, 0.0, 0.1)
    monkeypatch.setattr(verify_site, "compare", lambda *values: [wrong, *real(*values)])
    with pytest.raises(VerificationError):
        compiled(nn.RMSNorm(8))(torch.randn(4, 8))
    (file,) = tmp_path.iterdir()
    assert commands.replay_command(str(file)) == 1
    assert "wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_replaying_from_the_command_line(tmp_path, monkeypatch):
    """A site that is right again, and a file that is no site."""
    monkeypatch.setenv("FX_FUSION_REPRODUCERS", str(tmp_path))
    real = verify_site.compare
    monkeypatch.setattr(verify_site, "compare", lambda *values: [verify_site.Compared("y", 1.0, 0.0, 0.1), *real(*values)])
    with pytest.raises(VerificationError):
        compiled(nn.RMSNorm(8))(torch.randn(4, 8))
    (file,) = tmp_path.iterdir()
    run = [sys.executable, "-m", "fx_fusion", "replay"]
    done = subprocess.run([*run, str(file)], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rms_norm in ")
    assert "wrong" not in done.stdout
    done = subprocess.run([*run, __file__], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert "is no site that was found wrong" in done.stderr


def test_which_calls(monkeypatch):
    x = torch.randn(4, 8)
    for verify, expected in (("first", 1), (True, 3), (False, 0)):
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            call = compiled(nn.RMSNorm(8), verify)
            for _ in range(3):
                call(x)
        assert report.graphs[0].verified.calls == checked(report) == expected
    assert [n for n in range(1, 2500) if verify_graph.WHEN["sample"](n)] == [1, 1000, 2000]


def test_a_training_step_is_what_it_is_without():
    """Random numbers are drawn once, buffers count once, gradients are the same."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.batch_norm, self.out = nn.RMSNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.out(F.dropout(self.norm(self.batch_norm(x)), 0.5))

    seen = {}
    for verify in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Model(), torch.randn(16, 8)
        call = compiled(model, verify)
        with fx_fusion.recording() as report:
            for _ in range(3):
                y = call(x)
                y.square().sum().backward()
        assert checked(report) == (3 if verify else 0)
        seen[verify] = [y, model.calls, model.batch_norm.running_mean, model.norm.weight.grad, torch.rand(3)]
    for one, other in zip(seen[False], seen[True], strict=True):
        assert torch.equal(one, other)


def test_sites_in_checkpointed_blocks_and_under_autocast():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gate, self.up = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(8, 16)

        def forward(self, x):
            h = self.norm(x)
            return F.silu(self.gate(h)) * self.up(h)

    block = Block()
    for call in (lambda x: checkpoint(block, x, use_reentrant=False), block):
        torch._dynamo.reset()
        with fx_fusion.recording() as report, torch.autocast("cpu", torch.bfloat16):
            compiled(call)(torch.randn(4, 8, requires_grad=True)).sum().backward()
        report.assert_fused(rms_norm=1, swiglu=1)
        assert checked(report) == 2, sentences(report)


def test_dynamic_sizes_and_a_mask_that_is_no_longer_ones():
    """Each version of a graph is checked when it first runs."""
    model = tiny_llama()
    call = torch.compile(model, backend=rewriting_backend(verify="first"), dynamic=True)
    with fx_fusion.recording() as report:
        for padded in (0, 3):
            ids, mask = tokens(), torch.ones_like(tokens())
            mask[0, :padded] = 0
            call(input_ids=ids, labels=ids, attention_mask=mask)
    assert len(report.graphs) == 2
    assert all(graph.verified.calls == 1 for graph in report.graphs)
    assert checked(report) == fused(report) - report.count("dense_mask")


def test_what_cant_be_compared_is_named_and_trains_on():
    def attention(q, mask):
        return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=0.5)

    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with fx_fusion.recording() as report:
        compiled(lambda q: attention(q, torch.ones(8, 8, dtype=torch.bool).tril()))(q).sum().backward()
    assert fused(report) == 1
    assert re.search(r"not verified: causal_mask in .*: it draws random numbers", str(report)), str(report)
    assert checked(report) == 0


def test_options():
    assert parse(None, {"verify": "sample"}).verify == "sample"
    assert parse(None, {}).verify is False
    with pytest.raises(OptionError, match=r"options\['verify'\] = 'frist'. Did you mean 'first'\?"):
        parse(None, {"verify": "frist"})
    with pytest.raises(OptionError, match="must be a bool or str"):
        parse(None, {"verify": 1.5})


@pytest.mark.parametrize(("text", "meant"), [("first", "first"), ("1", True), ("0", False)])
def test_from_the_environment(monkeypatch, text, meant):
    monkeypatch.setenv("FX_FUSION_VERIFY", text)
    assert parse(None, {}).verify is meant or parse(None, {}).verify == meant


# -- the whole graph ---------------------------------------------------------------------------------------------------
def step_by_inductor(model, **options):
    return torch.compile(model, backend="fx_fusion", options={"verify": "graph", "select": "always", **options}, dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_whole_step_is_compared(family):
    """Loss, logits (deferred, and read for the comparison only) and the gradient of every parameter; then it trains on."""
    seen = {}
    for verify in ("graph", False):
        torch._dynamo.reset()
        model = zoo.build(family, torch.float32)
        with fx_fusion.recording() as report:
            step = step_by_inductor(model, verify=verify)
            for _ in range(2):
                step(**zoo.batch()).loss.backward()
        seen[verify] = [p.grad for p in model.parameters()]
        if verify:
            assert re.search(r"verified as a whole, with its gradients: it used 0\.\d\d of what is allowed", str(report)), str(report)
            assert checked(report) == fused(report)
            assert (report.graphs[0].reads.calls, report.graphs[0].reads.calls_read) == (2, 0)
    assert all(torch.equal(one, other) for one, other in zip(seen["graph"], seen[False], strict=True))


@pytest.mark.parametrize("select", ["always", "never"])
def test_what_is_wrong_only_as_a_whole(select):
    """As if Inductor had made a wrong gradient of what no site covers."""

    def wrong(gm, example_inputs, options):
        return lambda *args: [out * 1.01 - 0.01 * out.detach() for out in gm(*args)]

    parsed = parse(None, {"select": select, "strict": True, "verify": "graph"})
    call = torch.compile(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 4)), backend=partial(compile_graph, options=parsed, rest=wrong))
    with pytest.raises(VerificationError, match=r"graph \d+, as a whole, is wrong on the inputs of this call") as raised:
        call(torch.randn(4, 8))
    assert re.search(r"gradient of \S+ +\S+ +\S+ +\S+ +wrong", str(raised.value))
    assert not re.search(r"result .* wrong", str(raised.value))
    assert 'options={"select": "never", "verify": "graph"}' in str(raised.value)


class Counts(nn.Module):
    """Writes to buffers, also to those of a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm, self.batch_norm = nn.RMSNorm(8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return self.norm(self.batch_norm(x)) + self.seen


@pytest.mark.parametrize("grad", [True, False])
def test_a_step_that_writes_to_buffers_leaves_them_as_they_were(grad):
    model = Counts()
    x = torch.randn(16, 8)
    with fx_fusion.recording() as report, torch.set_grad_enabled(grad):
        step_by_inductor(model)(x)
    assert report.graphs[0].verified.step <= 1, sentences(report)
    torch.testing.assert_close(model.seen, x.sum(0))
    assert model.batch_norm.num_batches_tracked == 1


@pytest.mark.parametrize("x", [
    torch.randn(4, 16)[:, ::2], torch.randn(8, 4).t(), torch.randn(1, 8).expand(4, 8), torch.randn(5, 8)[1:], torch.randn(0, 8),
], ids=["every other", "transposed", "expanded", "behind", "empty"])  # fmt: skip
def test_a_step_on_inputs_laid_out_in_other_ways(x):
    with fx_fusion.recording() as report:
        step_by_inductor(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 4)))(x)
    if x.numel():
        assert report.graphs[0].verified.step <= 1
    else:
        assert "not verified: graph" in str(report)


def test_a_step_with_dropout_is_named():
    with fx_fusion.recording() as report:
        step_by_inductor(nn.Sequential(nn.RMSNorm(8), nn.Dropout(0.5)))(torch.randn(4, 8))
    assert re.search(r"not verified: graph \d+ as a whole: it draws random numbers", str(report)), str(report)


def test_a_step_of_checkpointed_blocks_with_sizes_that_change():
    block = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    call = torch.compile(
        lambda x: checkpoint(block, x, use_reentrant=False), backend="fx_fusion", options={"verify": "graph"}, dynamic=True
    )
    with fx_fusion.recording() as report:
        for rows in (4, 6, 7):
            call(torch.randn(rows, 8, requires_grad=True)).sum().backward()
    assert [graph.verified.step <= 1 for graph in report.graphs] == [True], sentences(report)
