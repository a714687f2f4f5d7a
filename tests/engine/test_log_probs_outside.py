"""Log-probabilities of unread logits outside of the compiled model: log_softmax and gather, nll_loss."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.kernels.logits import kept_logits, logit_chunks
from fx_fusion.rewrite import log_probs_outside, loss_outside
from tests.engine import test_loss_outside
from tests.engine.test_loss_outside import B, L, Model, V, check, compiled_of, ids, of_classes, small_sizes, some, trained  # noqa: F401

weights = torch.linspace(-1, 1, B * L).view(B, L)  # an upstream gradient of its own for each row


def gathered(log_probs):
    return log_probs.gather(-1, ids[..., None]).squeeze(-1)


SPELLINGS = {
    "gather": lambda z: (gathered(z.log_softmax(-1)) * weights).sum(),
    "functional": lambda z: (gathered(F.log_softmax(z, dim=-1)) * weights).sum(),
    "by its dim": lambda z: (torch.gather(torch.log_softmax(z, 2), 2, ids.unsqueeze(2))[..., 0] * weights).sum(),
    "module": lambda z: -gathered(nn.LogSoftmax(-1)(z.float())).mean(),
    "take_along_dim": lambda z: (torch.take_along_dim(z.log_softmax(-1), ids[..., None], -1)[..., 0] * weights).sum(),
    "temperature": lambda z: (gathered(torch.log_softmax(z / 0.7, -1)) * weights).sum(),
    "wider": lambda z: (gathered(F.log_softmax(z, -1, dtype=torch.float32)) * weights).sum(),
    "rows": lambda z: (z.view(-1, V).log_softmax(-1).gather(1, ids.view(-1, 1)).view(B, L) * weights).sum(),
    "rows behind": lambda z: (z.log_softmax(-1).view(-1, V).gather(1, ids.view(-1, 1)).view(B, L) * weights).sum(),
    "shifted": lambda z: -z[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean(),
    "shifted behind": lambda z: -z.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean(),
    "nll_loss": lambda z: F.nll_loss(F.log_softmax(z.view(-1, V), -1), some.view(-1)),
    "nll_loss of a transposition": lambda z: F.nll_loss(z.log_softmax(-1).transpose(1, 2), some, reduction="sum") / 7,
    "nll_loss with weights": lambda z: nn.NLLLoss(of_classes)(z.log_softmax(-1).flatten(0, 1), ids.flatten()),
    "nll_loss of each": lambda z: (F.nll_loss(z.log_softmax(-1).flatten(0, 1), ids.flatten(), reduction="none").view(B, L) * weights).sum(),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("kept", [False, True], ids=["again", "kept"])
def test_spellings(name, kept, monkeypatch):
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: kept)
    report = check(Model(bias="rows" in name), SPELLINGS[name], rtol=2e-5)
    assert "a loss outside took what they are made of in 1" in str(report)


@pytest.mark.parametrize("kept", [False, True], ids=["again", "kept"])
def test_bfloat16_and_autocast(kept, monkeypatch):
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: kept)
    check(Model().bfloat16(), SPELLINGS["wider"], rtol=2e-2, atol=2e-3)
    for name in ("gather", "nll_loss"):
        check(Model().bfloat16(), SPELLINGS[name], rtol=5e-2, atol=5e-2)
        check(Model(), SPELLINGS[name], rtol=5e-2, atol=5e-2, dtype=torch.bfloat16)


READS = {
    "several classes": lambda z: z.log_softmax(-1).gather(-1, ids[..., None].expand(-1, -1, 2)).mean(),
    "fewer rows": lambda z: z.log_softmax(-1).gather(-1, ids[:1, :, None]).mean(),
    "over positions": lambda z: z.log_softmax(1).gather(-1, ids[..., None]).mean(),
    "entropy": lambda z: (z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1).mean(),
    "probabilities": lambda z: z.softmax(-1).gather(-1, ids[..., None]).log().mean(),
    "logits": lambda z: z.gather(-1, ids[..., None]).mean(),
    "nll_loss of logits": lambda z: F.nll_loss(z.flatten(0, 1), ids.flatten()),
    "of log-probabilities": lambda z: z.log_softmax(-1).log_softmax(-1).gather(-1, ids[..., None]).mean(),
    "scaled": lambda z: (z.log_softmax(-1) / 2).gather(-1, ids[..., None]).mean(),
    "float64": lambda z: z.log_softmax(-1, dtype=torch.float64).gather(-1, ids[..., None]).mean(),
    "into memory that is there": lambda z: torch.mul(z.detach(), 2.0, out=torch.empty(B, L, V)).mean() + z.mean(),
    "by keyword": lambda z: torch.gather(input=torch.log_softmax(input=z, dim=-1), dim=-1, index=ids[..., None]).mean(),
    "rounded": lambda z: torch.div(z, 0.5, rounding_mode="floor").mean() + z.mean(),
}


@pytest.mark.parametrize("name", READS)
def test_what_else_reads_log_probabilities_gets_eagers(name):
    check(Model(), READS[name], taken=0, read=1, rtol=1e-4)


def test_entropy_beside_it_is_right_too():
    def loss_of(z):
        log_probs = z.log_softmax(-1)
        return (gathered(log_probs) * weights).sum() - 0.1 * (log_probs.exp() * log_probs).sum(-1).mean()

    check(Model(), loss_of, taken=1, read=1, rtol=1e-4)


def test_their_type_is_known_and_their_values_are_eagers():
    model = Model()
    expected = F.log_softmax(model(ids) / 2, -1)
    with fx_fusion.recording() as report:
        found = F.log_softmax(compiled_of(model)(ids) / 2, -1)
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert report.graphs[0].reads.calls_read == 0
        torch.testing.assert_close(found + 0, expected)
    assert report.graphs[0].reads.calls_read == 1


FEW = 260  # of V classes: Triton's interpreter needs a minute for all rows of the embedding
of_few = ids % FEW
GATHERED_LATER = {
    "a column": lambda lp: lp.gather(-1, torch.stack((of_few, of_few + 1), -1)[..., :1]),
    "expanded": lambda lp: lp.gather(-1, torch.tensor([[[7]]]).expand(B, L, 1)),
    "the last position": lambda lp: lp[:, -1].gather(-1, of_few[:, -1:]),
}


@pytest.mark.kernel
@pytest.mark.parametrize("kept", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("name", GATHERED_LATER)
def test_an_index_that_lies_otherwise(name, kept, monkeypatch):
    """The kernels read one class behind the other."""
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: kept)
    monkeypatch.setattr(loss_outside, "_FEWEST_CLASSES", FEW)
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", {"cpu": (5 * FEW * 4,) * 2, "cuda": (5 * FEW * 4,) * 2})
    monkeypatch.setattr(test_loss_outside, "V", FEW)
    monkeypatch.setattr(test_loss_outside, "ids", of_few)
    check(Model(), lambda z: GATHERED_LATER[name](z.log_softmax(-1)).sum(), rtol=1e-4, atol=1e-5)


def test_many_gathers_of_one_log_softmax_read_it(monkeypatch):
    """Each would keep the logits."""
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: True)
    check(Model(), lambda z: sum(gathered(lp) * k for lp in [z.log_softmax(-1)] for k in range(4)).sum(), read=1, rtol=1e-4)


@pytest.mark.parametrize("how", ["checkpoint", "hooks"])
def test_saved_tensor_hooks_have_all_that_is_saved(how, monkeypatch):
    """Logits are not kept beside what a checkpoint drops or offloading moves."""
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: True)
    monkeypatch.setattr(log_probs_outside, "losses_of_kept_logits", None)
    model = Model()
    call = compiled_of(model)
    loss_of = lambda i: (gathered(call(i).log_softmax(-1)) * weights).sum()  # noqa: E731
    if how == "checkpoint":
        loss = checkpoint(loss_of, ids, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(ids)
    found = torch.autograd.grad(loss, list(model.parameters()))
    exact = torch.autograd.grad((gathered(model(ids).log_softmax(-1)) * weights).sum(), list(model.parameters()))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_what_is_kept_for_the_next_step_is_computed():
    """A KL to the step before: eager's log-probabilities are tensors like any other."""
    losses = []
    for ours in (False, True):
        model, before = Model(), None
        call = compiled_of(model) if ours else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            now = F.log_softmax(call(ids) / 0.7, -1)
            loss = -gathered(now).mean()
            if before is not None:
                loss = loss + F.kl_div(now, before, log_target=True, reduction="batchmean")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            before = now.detach()
            losses.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[:3]), torch.stack(losses[3:]))


def test_what_was_between_is_freed():
    """As in eager, where a cast and a quotient keep nothing of themselves."""

    def alive():
        gc.collect()
        found = (o for o in gc.get_objects() if type(o) is torch.Tensor and o.device.type == "cpu")
        return {id(o) for o in found if tuple(o.shape) == (B, L, V)}

    before = alive()
    log_probs = F.log_softmax(compiled_of(Model().bfloat16())(ids).float() / 0.7, -1)
    assert log_probs.exp().shape == (B, L, V)
    assert len(alive() - before) == 2, "the logits, and their log-probabilities"


def test_hooks_on_what_is_between():
    found = []
    for ours in (False, True):
        model = Model()
        for early in (True, False):
            scaled = (compiled_of(model) if ours else model)(ids) / 0.7
            if early:
                scaled.register_hook(lambda g: found.append(g.abs().sum()))
            log_probs = scaled.log_softmax(-1)
            if not early:
                scaled.register_hook(lambda g: found.append(g.abs().sum()))
            (gathered(log_probs) * weights).sum().backward()
    torch.testing.assert_close(found[:2], found[2:])


@pytest.mark.parametrize("which", ["logits", "log-probabilities"])
@pytest.mark.parametrize("how", [lambda t: t.register_hook(print), lambda t: t.retain_grad()], ids=["hook", "retain_grad"])
def test_a_hook_behind_the_loss_is_an_error(which, how):
    """It would never be called."""
    z = compiled_of(Model())(ids)
    log_probs = z.log_softmax(-1)
    gathered(log_probs).sum().backward()
    with pytest.raises(RuntimeError, match="its gradient is not computed"):
        how(z if which == "logits" else log_probs)


def test_arguments_that_eager_refuses():
    log_probs = compiled_of(Model())(ids).log_softmax(-1)
    with pytest.raises(RuntimeError, match=r"Double|Float"):
        F.nll_loss(log_probs.flatten(0, 1), ids.flatten(), of_classes.double())
    with pytest.raises(TypeError, match="dim"):
        compiled_of(Model())(ids).log_softmax(-1.0)


def test_errors_are_those_of_pytorch():
    log_probs = compiled_of(Model())(ids).log_softmax(-1)
    with pytest.raises(RuntimeError, match="out of bounds"):
        log_probs.gather(-1, ids[..., None] + V)
    with pytest.raises(IndexError, match="out of bounds"):
        F.nll_loss(log_probs.flatten(0, 1), ids.flatten() + V)


def test_no_gradient_is_wanted():
    model = Model()
    z = compiled_of(model)(ids)
    with torch.no_grad():
        found = gathered(z.log_softmax(-1))
    torch.testing.assert_close(found, gathered(model(ids).log_softmax(-1)).detach())
    assert not found.requires_grad


@pytest.mark.parametrize("kept", [False, True], ids=["again", "kept"])
def test_a_second_backward(kept, monkeypatch):
    """The first one of kept logits has overwritten them."""
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: kept)
    model = Model()
    made = gathered(compiled_of(model)(ids).log_softmax(-1))
    exact = gathered(model(ids).log_softmax(-1))
    for upstream in (weights, torch.ones(B, L)):
        for found, expected in zip(*(torch.autograd.grad(y, list(model.parameters()), upstream, retain_graph=True)
                                     for y in (made, exact)), strict=True):  # fmt: skip
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="first derivatives"):
        torch.autograd.grad(torch.autograd.grad(made, model.head.weight, weights, create_graph=True)[0].sum(), model.head.weight)


def test_a_policy_gradient_step_without_logits(monkeypatch):
    """The probabilities before and after, their ratio clipped: as PPO and GRPO have it."""
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: True)

    def loss_of(z):
        now = gathered(torch.log_softmax(z.float() / 0.9, -1))
        ratio = torch.exp(now - now.detach() + 0.1)
        return -torch.min(ratio * weights, ratio.clamp(0.8, 1.05) * weights).mean()

    model = Model()
    with fx_fusion.recording() as report:
        call = compiled_of(model)
        for _ in range(4):
            expected, gradients = trained(model, model, loss_of)
            found, ours = trained(model, call, loss_of)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    assert (report.graphs[0].reads.calls_taken, report.graphs[0].reads.calls_read) == (4, 0), str(report)


def test_logits_are_kept_where_they_are_small_beside_the_memory(monkeypatch):
    calls = []
    monkeypatch.setattr(log_probs_outside, "losses_of_kept_logits", lambda *given: calls.append(1) or kept_logits.losses_of_kept_logits(*given))
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: True)
    check(Model(), SPELLINGS["gather"])
    monkeypatch.setattr(loss_outside, "memory_of_device", lambda x: 7 * B * L * V * 4)
    check(Model(), SPELLINGS["gather"])
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["gather", "nll_loss", "wider"])
def test_a_loss_that_is_checkpointed_alone(name):
    model, exact = Model(), Model()
    checkpoint(SPELLINGS[name], compiled_of(model)(ids), use_reentrant=False).backward()
    checkpoint(SPELLINGS[name], exact(ids), use_reentrant=False).backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
