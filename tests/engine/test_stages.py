"""Each stage of a graph's way raises: the graph goes to Inductor as it was, with a warning and right numbers; ``strict``
raises. (test_net.py breaks every single function, in a smaller graph.)"""

import importlib

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.helpers import slow_but

B, S, V = 2, 6, 40
ids, labels = torch.randint(0, V, (B, S)), torch.randint(0, V, (B, S))
full, padded = torch.ones(B, S, dtype=torch.long), torch.tensor([[1] * S, [1] * 4 + [0] * 2])


def loss_of(mask, table, w, head):
    """A deferred output, an assumed mask, three fusions."""
    x = F.rms_norm(F.embedding(ids, table), (16,), w)
    shown = (torch.arange(S)[None] <= torch.arange(S)[:, None])[None, None] & mask[:, None, None, :].bool()
    heads = x.view(B, S, 2, 8).transpose(1, 2)
    y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=shown).transpose(1, 2).reshape(B, S, 16)
    logits = F.linear(y, head)
    return F.cross_entropy(logits.view(-1, V), labels.view(-1)), logits


def weights():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((V, 16), (16,), (V, 16))]


def step(function, mask):
    given = weights()
    loss, logits = function(mask, *given)
    return [loss.detach(), logits.detach() + 0, *torch.autograd.grad(loss, given)]


STAGES = [
    "backend:snapshot", "rewriting:read_deferred_examples", "rewriting:keep_tensors", "rewriting:join_written_halves",
    "rewriting:views_of", "rewriting:describe_inputs", "rewriting:Assumptions", "pipeline:find", "pipeline:check", "pipeline:join", "pipeline:goes_channels_last", "pipeline:select",
    "cost.select:choose", "pipeline:replace_all", "pipeline:replace", "pipeline:sites", "rewriting:defer_outputs",
    "rewriting:keep_results_apart", "backend:verifying", "backend:verifying_step", "backend:read_deferred_inputs", "backend:rows",
    "backend:follow", "versions:speculate", "rewrite.deferral:DeferredOutputs.wrap", "backend:publish", "report.trace:write",
]  # fmt: skip
BY_INDUCTOR = [
    "inductor.compile:register_lowerings", "inductor.compile:key_of", "inductor.compile:with_joint_pass",
    "inductor.compile:remember_accesses", "inductor.compile:without_donated_buffers",
]  # fmt: skip


def broken(monkeypatch, where):
    """A stage raises whenever it is called; returns a list that tells whether it was."""
    happened = []

    def raising(*args, **kwargs):
        happened.append(True)
        raise ZeroDivisionError("a bug of ours")

    module, _, name = where.partition(":")
    owner = importlib.import_module(f"fx_fusion.{module}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, last, raising)
    return happened


def compiled(strict, inductor):
    if inductor:
        return torch.compile(loss_of, backend="fx_fusion", options={"select": "always", "strict": strict})
    return torch.compile(loss_of, backend=rewriting_backend(strict=strict))


def test_what_is_broken_here_runs():
    """The graph has all that the stages are about."""
    with fx_fusion.recording() as report:
        step(compiled(True, False), full)
    report.assert_fused(linear_cross_entropy=1, rms_norm=1, embedding=1, causal_mask=1)
    assert report.graphs[0].deferred
    assert report.graphs[0].assumes


FAST = ["backend:snapshot", "pipeline:check", "pipeline:replace", "rewriting:defer_outputs", "versions:speculate"]


@pytest.mark.parametrize("where", slow_but(FAST, [*STAGES, *BY_INDUCTOR]))
def test_a_stage_that_raises(monkeypatch, where):
    expected = [step(loss_of, mask) for mask in (full, padded)]
    happened = broken(monkeypatch, where)
    run = compiled(False, where in BY_INDUCTOR)
    with pytest.warns(UserWarning, match="a bug of ours; the graph goes to Inductor unchanged"):
        found = [step(run, mask) for mask in (full, padded)]
    assert happened
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a bug of ours"):
        step(compiled(True, where in BY_INDUCTOR), full)


@pytest.mark.slow
def test_what_the_backward_computes_again_is_torchs_choice(monkeypatch):
    """An error there costs that choice, and no fusion."""
    expected = step(loss_of, full)
    happened = broken(monkeypatch, "inductor.compile:decide")
    with torch._inductor.config.patch(force_disable_caches=True):  # in which the decision is made already
        alone = pytest.warns(UserWarning, match="torch's choice alone: ZeroDivisionError: a bug of ours")
        with fx_fusion.recording() as report, alone:
            found = step(compiled(False, True), full)
        assert happened
        torch.testing.assert_close(found, expected)
        report.assert_fused(linear_cross_entropy=1)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="a bug of ours"):
            step(compiled(True, True), full)


# What is called while the model runs, when another version of the graph is first needed.
@pytest.mark.parametrize("where", ["versions:compiled_apart", "runtime.speculate:write_for_dynamo"])
@pytest.mark.parametrize("needed", ["padding", "reads"])
def test_another_version_can_not_be_made(monkeypatch, where, needed):
    masks = [full, padded] if needed == "padding" else [full] * 4
    expected = [step(loss_of, mask) for mask in masks]
    happened = broken(monkeypatch, where)
    run = compiled(False, False)
    with pytest.warns(UserWarning, match="a bug of ours; graph .* it runs uncompiled"):
        found = [step(run, mask) for mask in masks]
    assert happened == [True], "once, and not in every call"
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    run = compiled(True, False)
    with pytest.raises(fx_fusion.FusionError, match="a bug of ours"):
        [step(run, mask) for mask in masks]
