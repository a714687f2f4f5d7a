"""Label smoothing by hand, outside of the compiled model: transformers' LabelSmoother, as it is."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.rewrite import loss_outside
from tests.engine.test_loss_outside import B, L, Model, V, check, compiled_of, ids, small_sizes, some, trained  # noqa: F401

pytest.importorskip("transformers")
from transformers.trainer_pt_utils import LabelSmoother


def smoothed(z, shift=False, count=None, epsilon=0.1):
    return LabelSmoother(epsilon)({"logits": z}, some, shift_labels=shift, num_items_in_batch=count)


def by_hand(z):
    """As seq2seq code has it: nll and smoothed, both positive."""
    log_probs = -F.log_softmax(z.float() / 2, -1)
    nll, smooth = log_probs.gather(-1, ids[..., None]).squeeze(-1), log_probs.sum(-1)
    return (0.9 * nll + 0.1 / V * smooth).mean()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("count", [None, 30, torch.tensor(30.0)], ids=["of the batch", "number", "tensor"])
def test_label_smoother(shift, count, bias):
    report = check(Model(bias=bias), lambda z: smoothed(z, shift, count), rtol=1e-4, atol=1e-5)
    assert "a loss outside took what they are made of in 1" in str(report)


def test_other_spellings():
    check(Model(), by_hand, rtol=1e-4, atol=1e-5)
    check(Model(), lambda z: (-z.log_softmax(-1)).gather(-1, ids[..., None]).mean(), rtol=1e-4, atol=1e-5)


def test_bfloat16_is_nearer_than_eager():
    """Log-probabilities in bfloat16 are rounded before they are added up."""
    model, exact = Model().bfloat16(), Model().bfloat16().double()
    wanted, gradients = trained(exact, exact, smoothed)
    eager, of_eager = trained(model, model, smoothed)
    found, ours = trained(model, compiled_of(model), smoothed)
    assert found.dtype == eager.dtype
    assert (found - wanted).abs() <= (eager - wanted).abs() + 1e-6
    for name, gradient in gradients.items():
        worst = [(g[name].double() - gradient).abs().max() for g in (of_eager, ours)]
        assert worst[1] <= 2 * worst[0], name


READ = {
    "the sum first": lambda z: (lambda p: p.sum(-1).mean() + p.gather(-1, ids[..., None]).mean())(-z.log_softmax(-1)),
    "the sum of other classes": lambda z: (lambda p: p.gather(-1, ids[..., None]).mean() + p[..., 1:].sum(-1).mean())(-z.log_softmax(-1)),
    "the sum of rows": lambda z: (lambda p: p.gather(-1, ids[..., None]).mean() + p.sum(1).mean())(-z.log_softmax(-1)),
    "the mean": lambda z: (lambda p: p.gather(-1, ids[..., None]).mean() + p.mean(-1).mean())(-z.log_softmax(-1)),
    "minus logits": lambda z: (-z).mean(),
    "twice minus": lambda z: torch.neg(-z.log_softmax(-1)).gather(-1, ids[..., None]).mean(),
    "nll_loss of minus": lambda z: F.nll_loss((-z.log_softmax(-1)).view(-1, V), ids.view(-1)),
    "kl_div of minus": lambda z: F.kl_div(-z.log_softmax(-1), torch.ones(B, L, V) / V, reduction="batchmean"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_reads_them(name):
    """As eager, whether a part of it was taken or not."""
    model = Model()
    expected, gradients = trained(model, model, READ[name])
    torch._dynamo.reset()
    with fx_fusion.recording() as report:
        found, ours = trained(model, compiled_of(model), READ[name])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-6)
    assert report.graphs[0].reads.calls_read == 1, str(report)


def test_they_are_kept_where_they_are_small_beside_the_memory(monkeypatch):
    monkeypatch.setattr(loss_outside, "memory_of_device", lambda x: 7 * B * L * V * 4)
    check(Model(), smoothed, taken=0, read=1, rtol=1e-4, atol=1e-5)


def test_only_one_of_both_gets_a_gradient():
    model = Model()
    for loss_of in (
        lambda z: (lambda p: p.gather(-1, ids[..., None]).mean() + 0 * p.sum(-1).detach().mean())(-z.log_softmax(-1)),
        lambda z: (lambda p: 0 * p.gather(-1, ids[..., None]).detach().mean() + p.sum(-1).mean() / V)(-z.log_softmax(-1)),
    ):
        check(model, loss_of, rtol=1e-4, atol=1e-5)


def test_weights_that_changed_in_between():
    """An optimizer's step between the two: the sum is of the weights that the class was taken of, or an error."""
    model = Model()
    log_probs = -compiled_of(model)(ids).log_softmax(-1)
    log_probs.gather(-1, ids[..., None])
    with torch.no_grad():
        model.head.weight.mul_(1.1)
    with pytest.raises(RuntimeError, match="changed"):
        log_probs.sum(-1)


def test_a_second_backward():
    model = Model()
    loss, exact = smoothed(compiled_of(model)(ids)), smoothed(model(ids))
    for _ in range(2):
        for ours, theirs in zip(*(torch.autograd.grad(y, list(model.parameters()), retain_graph=True) for y in (loss, exact)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
