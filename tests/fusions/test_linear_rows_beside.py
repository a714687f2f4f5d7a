"""Losses of rows with something beside: rows without weight, logits that are returned, teachers with a head of their own."""

import pytest
import torch
from torch import nn

import fx_fusion
from fx_fusion.kernels import linear_rows
from fx_fusion.kernels.logits import logit_chunks
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.testing import rewriting_backend
from tests.rows import B, T, V, of, of_labels, operands, results_of, rows_kl, small_chunks  # noqa: F401  a fixture


def masked(z, t, y):
    mask = (y > 3000).float()
    return (rows_kl(z, t) * mask).sum() / mask.sum()


def chosen(z, t, y):
    return torch.where(y > 3000, rows_kl(z, t), 0).sum(1).mean()


def clipped(z, t, y):
    gain = (of_labels(z, y) - t[..., 0]).exp().clamp(0.8, 1.2) * t[..., 1] - 1e-3 * z.square().mean(-1)
    mask = (y > 3000).float()
    return -((gain * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def in_the_backward(z, t, y):
    """Its gradient depends on the losses."""
    mask = (y > 3000).float()
    return ((rows_kl(z, t) * mask).sum(1) / mask.sum(1).clamp(min=1)).square().mean()


def beside_a_count(z, t, y):
    """All rows are read: of how many the divergence is large."""
    each, mask = rows_kl(z, t), (y > 3000).float()
    return (each * mask).sum() / mask.sum() + (each > 1).float().mean()


def beside_a_metric(z, t, y):
    each, mask = rows_kl(z, t), (y > 3000).float()
    return (each * mask).sum() / mask.sum(), each.detach().mean()


def beside_a_metric_of_sequences(z, t, y):
    each, keep = rows_kl(z, t).sum(-1), (y[:, 0] > 2000).float()
    return (each * keep).sum(), each.detach()


def beside_a_running_sum(z, t, y):
    each, mask = rows_kl(z, t), (y > 3000).float()
    run = each.cumsum(-1)
    return (run[:, -1] * mask[:, 0]).sum(), run.detach()


def rounded(z, t, y):
    """The second term has no gradient, but all rows."""
    each, keep = rows_kl(z, t).sum(-1), (y[:, 0] > 3000).float()
    return (each * keep).sum() + each.round().sum()


# How many of three passes over rows take all of them, and the rest those that count: a loss, its forward and its backward.
LEFT_OUT = {"masked": (masked, [True]), "chosen": (chosen, [True]), "clipped": (clipped, [True])}
LEFT_OUT |= {"in_the_backward": (in_the_backward, [False, True])}
LEFT_OUT |= {f.__name__: (f, [False]) for f in (beside_a_metric_of_sequences, beside_a_running_sum, rounded)}
LEFT_OUT |= {"beside_a_count": (beside_a_count, [False]), "beside_a_metric": (beside_a_metric, [False])}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_rows_without_weight_are_left_out(name, monkeypatch):
    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 0)
    passes, run_all = [], linear_rows._run_all
    monkeypatch.setattr(linear_rows, "_run_all", lambda x, *args, **kw: passes.append(len(x)) or run_all(x, *args, **kw))
    loss, some = LEFT_OUT[name]
    head, x, t, y = operands(torch.float32)
    t.requires_grad_()
    compiled = torch.compile(of(loss), backend=rewriting_backend(select="always"))
    found, expected = (results_of(call, head, x, t, y) for call in (compiled, of(loss)))
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    count = (y > 3000).sum().item()
    assert 0 < count < B * T
    assert passes == [count if left_out else B * T for left_out in some]
    passes.clear()
    for ours, eager in zip(*(results_of(call, head, x, t, y * 0) for call in (compiled, of(loss))), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6, equal_nan=True)  # no row counts


def capped(z, t, y):
    z = 5 * torch.tanh(z / 5)
    return rows_kl(z, t).mean(), z


RETURNED = {  # A model's own loss beside its logits.
    "logits": lambda z, t, y: (rows_kl(z, t).mean(), z),
    "in float32": lambda z, t, y: (rows_kl(z.float(), t).mean(), z.float()),
    "cast behind the loss": lambda z, t, y: (rows_kl(z, t).mean(), z.to(torch.bfloat16)),
    "capped": capped,
    "shifted": lambda z, t, y: (rows_kl(z[:, :-1], t[:, :-1]).mean(), z),
    "shifted in float32": lambda z, t, y: ((z.float()[:, :-1] - t[:, :-1]).abs().mean(), z),
    "two views": lambda z, t, y: (rows_kl(z, t).mean(), z, z.view(-1, V)),
    "log-probabilities": lambda z, t, y: (rows_kl(z, t).mean(), z.log_softmax(-1)),
    "with predictions": lambda z, t, y: (rows_kl(z, t).mean(), z, z.argmax(-1)),
    "detached": lambda z, t, y: (rows_kl(z, t).mean(), z.detach()),
    "detached beside": lambda z, t, y: (rows_kl(z, t).mean(), z, (z * 1.0).float().detach() * 2),
}


@pytest.mark.parametrize("read", ["not", "values", "gradients"])
@pytest.mark.parametrize("name", RETURNED)
def test_returned_logits_wait(name, read):
    head, x, t, y = operands(torch.float32)
    compiled = torch.compile(of(RETURNED[name]), backend=rewriting_backend(select="always"))
    with fx_fusion.recording() as report:
        loss, *rest = compiled(head, x, t, y)
    assert report.count("linear_rows") == 1, str(report)
    assert len(report.graphs[0].deferred) == len(rest) - (name == "with predictions")
    assert type(rest[0]) is DeferredTensor
    assert rest[0]._value is None
    expected, *others = of(RETURNED[name])(head, x, t, y)
    assert [r.requires_grad for r in rest] == [o.requires_grad for o in others]
    if read != "not":
        torch.testing.assert_close(tuple(rest), tuple(others), check_device=True)
    if read == "gradients" and rest[0].requires_grad:
        loss, expected = loss + rest[0].float().sin().mean(), expected + others[0].float().sin().mean()
    trained = [x, *head.parameters()]
    ours, theirs = (torch.autograd.grad(number, trained) for number in (loss, expected))
    torch.testing.assert_close((loss, *ours), (expected, *theirs), rtol=1e-3, atol=1e-5)


class Twice(torch.autograd.Function):
    """Scales a gradient, as losses of routers do."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


UNUSUAL = {  # What the analysis can't follow, and must not fall over.
    "a function of its own": lambda z, t, y: Twice.apply(rows_kl(z, t)).mean(),
    "a function of the number": lambda z, t, y: Twice.apply(rows_kl(z, t).mean()),
    "weights in the code": lambda z, t, y: (rows_kl(z, t) * torch.tensor([0.0, 1, 0, 1, 2, 0, 1, 1])).sum(),
    "rows in the code": lambda z, t, y: rows_kl(z, t)[torch.tensor([0, 2])].sum(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_tails(name):
    head, x, t, y = operands(torch.float32)
    compiled = torch.compile(of(UNUSUAL[name]), backend=rewriting_backend(select="always"))
    found, expected = (results_of(call, head, x, t, y) for call in (compiled, of(UNUSUAL[name])))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_teacher_that_a_checkpoint_is_given():
    from torch.utils.checkpoint import checkpoint

    head, x, _, y = operands(torch.float32)
    teacher, h = nn.Linear(12, V), torch.randn(B, T, 12)

    def step(head, x, _, y):
        return checkpoint(lambda x, q: rows_kl(head(x), q).mean(), x, teacher(h).detach(), use_reentrant=False)

    compiled = torch.compile(step, backend=rewriting_backend(select="always"))
    found, expected = (results_of(call, head, x, x, y) for call in (compiled, step))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


CHECKED = {
    "a mean": lambda z, t, y: rows_kl(z, t).mean(),
    "masked": masked,
    "clipped": clipped,
    "squared": lambda z, t, y: rows_kl(z, t).mean().square(),
    "in the backward": in_the_backward,
    "beside a metric": beside_a_metric,
    "with its logits": lambda z, t, y: (rows_kl(z, t).mean(), z),
    "in one call": lambda z, t, y: (z - t).square().mean(),
}


@pytest.mark.parametrize("name", CHECKED)
def test_verified_up_to_the_number(name, monkeypatch):
    """The gradients of the op are right for the number that they are computed for, and for no other of each row."""
    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 0)
    head, x, t, y = operands(torch.float32)
    compiled = torch.compile(of(CHECKED[name]), backend=rewriting_backend(select="always", verify=True))
    with fx_fusion.recording() as report:
        results_of(compiled, head, x, t, y)
    assert report.count("linear_rows") == 1, str(report)
    assert "checks of sites" in str(report)
    assert not report.graphs[0].verified.skipped


def without_gradient(teacher, h):
    with torch.no_grad():
        return teacher(h)


# Losses of a student's logits z and a teacher h -> logits; whether the teacher's logits are made in chunks.
TEACHERS = {
    "under no_grad": (lambda z, f, h, y: rows_kl(z, without_gradient(f, h)).mean(), True),
    "detached": (lambda z, f, h, y: rows_kl(z.float(), f(h).float().detach() / 2).mean(), True),
    "shifted": (lambda z, f, h, y: rows_kl(z[:, :-1], f(h)[:, :-1].detach()).mean(), True),
    "read twice": (lambda z, f, h, y: (lambda t: (z.softmax(-1) - t.softmax(-1)).abs().sum(-1).mean() + t.mean())(f(h).detach()), False),
    "masked": (lambda z, f, h, y: (rows_kl(z, without_gradient(f, h)) * (y > 3000)).sum() / (y > 3000).sum(), True),
    "returned": (lambda z, f, h, y: (lambda t: (rows_kl(z, t).mean(), t))(without_gradient(f, h)), False),
    "of other rows": (lambda z, f, h, y: rows_kl(z, f(h)[:1].detach()).mean(), False),
    "trained": (lambda z, f, h, y: rows_kl(z, f(h)).mean(), False),
    "in the backward": (lambda z, f, h, y: rows_kl(z, without_gradient(f, h)).norm(), False),
}  # fmt: skip


@pytest.mark.parametrize("first", [False, True], ids=["student first", "teacher first"])
@pytest.mark.parametrize("name", TEACHERS)
def test_teachers_with_a_head_of_their_own(name, first, monkeypatch):
    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 0)
    loss, in_chunks = TEACHERS[name]
    head, x, _, y = operands(torch.float32)
    teacher, h = nn.Linear(12, V, bias=first), torch.randn(B, T, 12)

    def step(head, x, _, y):
        with torch.no_grad():
            t = teacher(h) if first and name != "trained" else None
        number = loss(head(x), teacher if t is None else lambda _: t, h, y)
        return number

    compiled = torch.compile(step, backend=rewriting_backend(select="always"))
    with fx_fusion.recording() as report:
        found = results_of(compiled, head, x, x, y)
    for ours, eager in zip(found, results_of(step, head, x, x, y), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    assert report.count("linear_rows") == 1, str(report)
    (call,) = (line for line in report.graphs[0].after.splitlines() if "fx_fusion.linear_rows(" in line)
    assert ("heads=[]" not in call) == in_chunks, call
    assert report.graphs[0].after.count(f"{V}] = linear(") == (not in_chunks)
    if name == "trained":
        assert teacher.weight.grad is not None


def two_heads(head, x, t, y):
    """The second loss reads what the first one makes: one of both is a fusion's already."""
    log_probs, z = head(x).log_softmax(-1), head(x)
    return (z.logsumexp(-1) - log_probs.gather(-1, y[..., None])[..., 0]).square().mean()


def an_empty_choice(head, x, t, y):
    log_probs = head(x).log_softmax(-1)
    return log_probs.gather(-1, y[..., None][..., :0]).sum() + log_probs.logsumexp(-1).mean() + log_probs.square().mean()


def weights_of_another_head(head, x, t, y):
    """Policy gradients: the advantage comes from a loss of other rows, which is a fusion's already."""
    advantage = of_labels(head(x), y).detach()
    return (advantage * of_labels(head(x.flip(0)), y)).mean()


def a_baseline(head, x, t, y):
    z, other = head(x), head(x * 2)
    advantage = of_labels(other, y).exp() - of_labels(z, y).detach()
    return (advantage.detach() * of_labels(z, y)).mean() + advantage.square().mean() + (z - t).abs().mean()


@pytest.mark.parametrize("loss", [two_heads, an_empty_choice, weights_of_another_head, a_baseline])
def test_odd_graphs_are_compiled(loss):
    found, expected = (
        results_of(call, *operands(torch.float32))
        for call in (torch.compile(loss, backend=rewriting_backend(select="always")), loss)
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("again", [lambda a: a.squeeze(-1), lambda a: a[..., 0], lambda a: a.view(-1), lambda a: a.squeeze(-1)[None]])
def test_views_of_losses_that_are_returned_share_memory(again):
    def loss(z, t, y):
        each = z.logsumexp(-1, keepdim=True)
        return each, again(each)

    head, x, t, y = operands(torch.float32)
    with fx_fusion.recording() as report:
        each, other = torch.compile(of(loss), backend=rewriting_backend(select="always"))(head, x, t, y)
    assert report.count("linear_rows") == 1, str(report)
    with torch.no_grad():
        each.zero_()
    assert (other == 0).all()


def test_an_input_of_a_loss_without_a_gradient_has_none():
    """A baseline that only a second result reads, which nobody differentiates."""

    def loss(z, t, y, baseline):
        return z.logsumexp(-1).square().mean(), ((z - t).square().mean(-1) - baseline).square().mean()

    head, x, t, y = operands(torch.float32)
    baseline, call = torch.zeros(B, T, requires_grad=True), of_baseline(loss)
    one, other = torch.compile(call, backend=rewriting_backend(select="always"))(head, x, t, y, baseline)
    one.backward(retain_graph=True)
    assert baseline.grad is None
    other.backward()
    assert baseline.grad is not None


def of_baseline(loss):
    return lambda head, x, t, y, baseline: loss(head(x), t, y, baseline)
