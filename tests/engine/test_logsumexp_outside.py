"""Log-probabilities written out of unread logits, outside of the compiled model: logsumexp and gather."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.rewrite import loss_outside
from tests.engine.test_log_probs_outside import weights
from tests.engine.test_loss_outside import B, L, Model, V, check, compiled_of, ids, small_sizes, trained  # noqa: F401


def of_class(z, index=ids):
    return z.gather(-1, index[..., None]).squeeze(-1)


def from_both(z):
    wide = z.float()
    return (wide.logsumexp(-1).float() - of_class(wide).to(torch.float32)) * weights


SPELLINGS = {
    "sum of exponentials first": lambda z: ((z.logsumexp(-1) - of_class(z)) * weights).sum(),
    "class first": lambda z: ((z.gather(-1, ids[..., None])[..., 0] - torch.logsumexp(z, dim=-1)) * weights).sum(),
    "keepdim": lambda z: ((z.logsumexp(2, keepdim=True) - z.gather(2, ids.unsqueeze(2)))[..., 0] * weights).sum(),
    "by function": lambda z: (torch.sub(torch.logsumexp(z, (-1,)), of_class(z)) * weights).sum(),
    "subtract": lambda z: (z.logsumexp(-1).subtract(torch.take_along_dim(z, ids[..., None], -1).select(-1, 0)) * weights).sum(),
    "temperature": lambda z: (sum(s.logsumexp(-1) - of_class(s) for s in [z / 0.7]) * weights).sum(),
    "scaled twice": lambda z: (((2 * z).float().logsumexp(-1) - of_class((2 * z).float())) * weights).sum(),
    "casts": lambda z: from_both(z).sum(),
    "rows": lambda z: sum((s.view(-1, V).logsumexp(-1) - s.view(-1, V).gather(1, ids.view(-1, 1)).view(-1)).view(B, L) * weights
                          for s in [z * 1.5]).sum(),
    "views of their own": lambda z: ((z.logsumexp(-1).view(-1) - of_class(z).flatten()).view(B, L) * weights).sum(),
    "shifted twice": lambda z: (z[:, :-1].float().logsumexp(-1) - of_class(z[:, :-1].float(), ids[:, 1:])).mean(),
    "shifted": lambda z: sum(s.logsumexp(-1) - of_class(s, ids[:, 1:]) for s in [z[:, :-1]]).mean(),
    "a log_softmax": lambda z: (of_class(z - z.logsumexp(-1, keepdim=True)) * weights).sum(),
    "a log_softmax of scaled rows": lambda z: sum(-F.nll_loss(s - torch.logsumexp(s, -1, True), ids.view(-1))
                                                  for s in [(z / 3).view(-1, V)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("kept", [False, True], ids=["again", "kept"])
def test_spellings(name, kept, monkeypatch):
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: kept)
    report = check(Model(bias="rows" in name), SPELLINGS[name], rtol=2e-5)
    assert "a loss outside took what they are made of in 1" in str(report)


@pytest.mark.parametrize("name", ["class first", "a log_softmax", "casts"])
def test_bfloat16_and_autocast(name):
    """Eager rounds the logarithm and the logit before it subtracts one of the other."""
    check(Model().bfloat16(), SPELLINGS[name], rtol=6e-2, atol=6e-2)
    check(Model(), SPELLINGS[name], rtol=6e-2, atol=6e-2, dtype=torch.bfloat16)


READS = {
    "one of them alone": lambda z: (z.logsumexp(-1) * weights).sum() + of_class(z).mean(),
    "their sum": lambda z: ((z.logsumexp(-1) + of_class(z)) * weights).sum(),
    "twice the one": lambda z: (torch.sub(z.logsumexp(-1), of_class(z), alpha=2) * weights).sum(),
    "of other logits": lambda z: (((z / 2).logsumexp(-1) - of_class(z)) * weights).sum(),
    "of other rows": lambda z: (z[:, 1:].logsumexp(-1) - of_class(z[:, :-1], ids[:, 1:])).mean(),
    "transposed": lambda z: (z.logsumexp(-1).view(L, B) - of_class(z).transpose(0, 1)).square().mean(),
    "broadcast": lambda z: (z.logsumexp(-1)[..., None] - of_class(z)[:, None]).mean(),
    "a part": lambda z: (z.logsumexp(-1)[:, :1] - of_class(z)).mean(),
    "over positions": lambda z: (z.logsumexp(1, keepdim=True) - z.gather(-1, ids[..., None])).mean(),
    "rounded": lambda z: ((z.logsumexp(-1).bfloat16().float() - of_class(z)) * weights).sum(),
    "both the same": lambda z: (z.logsumexp(-1) - z.logsumexp(-1) + of_class(z)).mean(),
    "minus a number": lambda z: (z.logsumexp(-1) - 1.0).mean(),
    "float64": lambda z: (z.double().logsumexp(-1) - of_class(z.double())).mean().float(),
    "a difference that is read": lambda z: (z - z.logsumexp(-1, keepdim=True)).square().mean(),
    "without what keeps the dim": lambda z: (z[:, :, 0] - z.logsumexp(-1)).mean(),
}


@pytest.mark.parametrize("name", READS)
def test_what_else_reads_them_gets_eagers(name):
    check(Model(), READS[name], taken=0, read=1, rtol=1e-4)


def test_a_z_loss_beside_it_is_right_too():
    def loss_of(z):
        lse = z.logsumexp(-1)
        return ((lse - of_class(z)) * weights).sum() + 1e-2 * lse.square().mean()

    check(Model(), loss_of, taken=1, read=1, rtol=1e-4)


def test_an_index_that_is_written_to_later():
    """In eager the backward is an error then; the loss is that of the index as it was."""
    model, index = Model(), ids.clone()
    z = compiled_of(model)(ids)
    chosen = of_class(z, index)
    index.fill_(3)
    torch.testing.assert_close(chosen - z.logsumexp(-1), of_class(model(ids).log_softmax(-1)))


def test_their_types_are_known_and_their_values_are_eagers():
    model = Model()
    z = model(ids)
    with fx_fusion.recording() as report:
        made = compiled_of(model)(ids)
        found = made.logsumexp(-1), made.gather(-1, ids[..., None]), made - made.logsumexp(-1, keepdim=True)
        expected = z.logsumexp(-1), z.gather(-1, ids[..., None]), z.log_softmax(-1)
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert report.graphs[0].reads.calls_read == 0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one + 0, other)
    assert report.graphs[0].reads.calls_read == 1


def test_hooks_on_what_is_between():
    """On the logits, on the logarithm, on the logits of classes."""
    found = []
    for ours in (False, True):
        for where in range(3):
            model = Model()
            z = (compiled_of(model) if ours else model)(ids) / 0.7
            parts = z, z.logsumexp(-1), of_class(z)
            parts[where].register_hook(lambda g: found.append(g.abs().sum()))
            ((parts[1] - parts[2]) * weights).sum().backward()
    torch.testing.assert_close(found[:3], found[3:])


def test_errors_are_those_of_pytorch():
    z = compiled_of(Model())(ids)
    with pytest.raises(RuntimeError, match="out of bounds"):
        z.gather(-1, ids[..., None] + V)
    with pytest.raises(IndexError, match="Dimension out of range"):
        z.logsumexp(5)
    with pytest.raises(RuntimeError, match="must match the size"):
        z.logsumexp(-1) - of_class(z)[:, :3]


def test_no_gradient_is_wanted():
    model = Model()
    z = compiled_of(model)(ids)
    with torch.no_grad():
        found = z.logsumexp(-1) - of_class(z)
    torch.testing.assert_close(found, -of_class(model(ids).log_softmax(-1)).detach())
    assert not found.requires_grad


@pytest.mark.parametrize("name", ["class first", "a log_softmax"])
def test_a_loss_that_is_checkpointed_alone(name):
    model, exact = Model(), Model()
    checkpoint(SPELLINGS[name], compiled_of(model)(ids), use_reentrant=False).backward()
    checkpoint(SPELLINGS[name], exact(ids), use_reentrant=False).backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_training_loop(monkeypatch):
    """No logits in any step, and the parameters of eager."""
    monkeypatch.setattr(loss_outside, "again_takes_longer", lambda *given: True)
    model = Model()
    with fx_fusion.recording() as report:
        call = compiled_of(model)
        for _ in range(4):
            expected, gradients = trained(model, model, SPELLINGS["class first"])
            found, ours = trained(model, call, SPELLINGS["class first"])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    assert (report.graphs[0].reads.calls_taken, report.graphs[0].reads.calls_read) == (4, 0), str(report)
