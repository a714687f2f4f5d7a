"""Compute losses of deferred logits outside of the compiled model: a record becomes a graph when it is read."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.errors import StaleTensorError
from fx_fusion.kernels import linear_rows as kernel
from tests.engine.test_loss_behind_a_break import gradients
from tests.engine.test_loss_outside import (  # noqa: F401  a fixture
    LOSSES,
    B,
    L,
    Model,
    V,
    check,
    compiled_of,
    each_of,
    ids,
    keeps_logits,
    of_classes,
    of_sequences,
    products,
    small_sizes,
    some,
    trained,
    unread,
    z_loss,
)  # fmt: skip
from tests.helpers import rewriting_backend

T = 2.0
weights = torch.linspace(-1, 1, B * L).view(B, L)  # an upstream gradient of its own for each row
teacher = torch.randn(B, L, V, generator=torch.Generator().manual_seed(3)) * 2
few = teacher.topk(4).indices


def of_class(z, index=ids):
    return z.gather(-1, index[..., None]).squeeze(-1)


def weighed(each):
    return (each * weights).sum()


def smoothed(z):
    """Label smoothing as transformers' LabelSmoother has it."""
    log_probs = -F.log_softmax(z, dim=-1)
    labels = some.unsqueeze(-1)
    mask, labels = labels.eq(-100), labels.clamp(min=0)
    nll, total = log_probs.gather(dim=-1, index=labels), log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll.masked_fill_(mask, 0.0)
    total.masked_fill_(mask, 0.0)
    active = mask.numel() - mask.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * total.sum() / (active * V)


def kl(z, reduction="batchmean"):
    return F.kl_div(F.log_softmax(z / T, -1), F.softmax(teacher / T, -1), reduction=reduction) * T * T


def reverse_kl(z):
    log_p, log_q = z.log_softmax(-1), teacher.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def jensen_shannon(z):
    log_p, log_q = z.log_softmax(-1), teacher.log_softmax(-1)
    mixture = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    return ((log_p.exp() * (log_p - mixture) + log_q.exp() * (log_q - mixture)).sum(-1) / 2).mean()


def clipped(z):
    """The probabilities before and after, their ratio clipped, with an entropy bonus: PPO and GRPO."""
    log_p = torch.log_softmax(z.float() / 0.9, -1)
    now, entropy = of_class(log_p), -(log_p.exp() * log_p).sum(-1)
    ratio = torch.exp(now - now.detach() + 0.1)
    return -torch.min(ratio * weights, ratio.clamp(0.8, 1.05) * weights).mean() - 0.01 * entropy.mean()


def odds(z):
    """ORPO's term: its gradient depends on the mean of a sequence."""
    mean = of_class(z.log_softmax(-1)).mean(-1)
    return -F.logsigmoid(mean - torch.log1p(-mean.exp())).mean()


TAKEN = {
    "gather": lambda z: weighed(of_class(z.log_softmax(-1))),
    "by its dim": lambda z: weighed(torch.gather(torch.log_softmax(z, 2), 2, ids.unsqueeze(2))[..., 0]),
    "module": lambda z: -of_class(nn.LogSoftmax(-1)(z.float())).mean(),
    "take_along_dim": lambda z: weighed(torch.take_along_dim(z.log_softmax(-1), ids[..., None], -1)[..., 0]),
    "by keyword": lambda z: torch.gather(input=torch.log_softmax(input=z, dim=-1), dim=-1, index=ids[..., None]).mean(),
    "wider": lambda z: weighed(of_class(F.log_softmax(z, -1, dtype=torch.float32))),
    "rows behind": lambda z: weighed(z.log_softmax(-1).view(-1, V).gather(1, ids.view(-1, 1)).view(B, L)),
    "shifted": lambda z: -z[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean(),
    "shifted behind": lambda z: -z.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean(),
    "the last position": lambda z: -z.log_softmax(-1)[:, -1].gather(-1, ids[:, -1:]).mean(),
    "nll_loss": lambda z: F.nll_loss(F.log_softmax(z.view(-1, V), -1), some.view(-1)),
    "nll_loss of a transposition": lambda z: F.nll_loss(z.log_softmax(-1).transpose(1, 2), some, reduction="sum") / 7,
    "nll_loss with weights": lambda z: nn.NLLLoss(of_classes)(z.log_softmax(-1).flatten(0, 1), ids.flatten()),
    "nll_loss of logits": lambda z: F.nll_loss(z.flatten(0, 1), ids.flatten()),
    "sum of exponentials": lambda z: weighed(z.logsumexp(-1) - of_class(z)),
    "class first": lambda z: weighed(z.gather(-1, ids[..., None])[..., 0] - torch.logsumexp(z, dim=-1)),
    "keepdim": lambda z: weighed((z.logsumexp(2, keepdim=True) - z.gather(2, ids.unsqueeze(2)))[..., 0]),
    "subtract": lambda z: weighed(z.logsumexp(-1).subtract(torch.take_along_dim(z, ids[..., None], -1).select(-1, 0))),
    "scaled twice": lambda z: weighed((2 * z).float().logsumexp(-1) - of_class((2 * z).float())),
    "shifted twice": lambda z: (z[:, :-1].float().logsumexp(-1) - of_class(z[:, :-1].float(), ids[:, 1:])).mean(),
    "a log_softmax": lambda z: weighed(of_class(z - z.logsumexp(-1, keepdim=True))),
    "a z-loss beside it": lambda z: weighed(z.logsumexp(-1) - of_class(z)) + 1e-2 * z.logsumexp(-1).square().mean(),
    "entropy beside it": lambda z: weighed(of_class(z.log_softmax(-1))) - 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "several classes": lambda z: (z.log_softmax(-1).gather(-1, few).exp() - 0.1).square().sum(-1).mean(),
    "a difference": lambda z: (z - z.logsumexp(-1, keepdim=True)).square().mean(),
    "label smoothing by hand": smoothed,
    "sums of classes": lambda z: (lambda p: p.sum(-1).mean() / V + of_class(p).mean())(-z.log_softmax(-1)),
    "batchmean": kl,
    "mean": lambda z: F.kl_div(z.log_softmax(-1), teacher.softmax(-1)) * 1e3,
    "log target": lambda z: F.kl_div(z.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True),
    "rows of a divergence": lambda z: F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1).mean(),
    "probabilities": lambda z: F.cross_entropy(z.view(-1, V), teacher.softmax(-1).view(-1, V)),
    "beside the usual loss": lambda z: 0.5 * F.cross_entropy(z.view(-1, V), ids.view(-1)) + 0.5 * kl(z),
    "probabilities of one position": lambda z: F.kl_div(z.log_softmax(-1), teacher.softmax(-1)[:1].expand(B, L, V)[:, :1]) * 1e3,
    "reverse KL": lambda z: reverse_kl(z).mean(),
    "masked reverse KL": lambda z: (reverse_kl(z) * (ids > 2000)).sum() / (ids > 2000).sum(),
    "Jensen-Shannon": jensen_shannon,
    "total variation": lambda z: (z.softmax(-1) - teacher.softmax(-1)).abs().sum(-1).mean() / 2,
    "a clipped ratio": clipped,
    "odds": odds,
    "focal": LOSSES["focal"],
    "narrower": lambda z: F.cross_entropy(z.half().float().view(-1, V), ids.view(-1)),
    "accuracy": lambda z: LOSSES["rows"](z) + 0 * (z.argmax(-1) == ids).float().mean(),
    "chunks": lambda z: sum(F.cross_entropy(c.flatten(0, 1), y.flatten()) for c, y in zip(z.chunk(4, 1), ids.chunk(4, 1), strict=True)),
    "sequence by sequence": lambda z: torch.stack([F.cross_entropy(row, y) for row, y in zip(z, ids, strict=True)]).mean(),
    "parts": lambda z: sum((c.log_softmax(-1).exp() * c).sum(-1).mean() for c in torch.split(z, [2, 6], dim=1)),
    "a padded vocabulary": lambda z: (lambda p: weighed(of_class(p, ids.clamp(max=3999))) + 0 * len(p))(z[..., :4000].log_softmax(-1)),
    "in place behind it": lambda z: each_of(z).mul_(2.0).mean(),
}  # fmt: skip
READS = {
    "fewer rows": lambda z: z.log_softmax(-1).gather(-1, ids[:1, :, None]).mean(),
    "over positions": lambda z: z.log_softmax(1).gather(-1, ids[..., None]).mean(),
    "float64": lambda z: z.log_softmax(-1, dtype=torch.float64).gather(-1, ids[..., None]).mean(),
    "the sum of rows": lambda z: -z.log_softmax(-1).sum(1).square().mean(),
    "into memory that is there": lambda z: torch.mul(z.detach(), 2.0, out=torch.empty(B, L, V)).mean() + z.mean(),
    "in place": lambda z: (z * 2).mul_(2.0).logsumexp(-1).mean(),
    "of other rows": lambda z: (z[:, 1:].logsumexp(-1) - of_class(z[:, :-1], ids[:, 1:])).square().mean(),
    "a product": unread,
}
pytestmark = pytest.mark.filterwarnings("ignore:.*reduction. .mean. divides", "ignore:.*the size of input")


@pytest.mark.parametrize("name", TAKEN)
def test_spellings(name):
    report = check(Model(bias="rows" in name), TAKEN[name], rtol=1e-4, atol=1e-5)
    assert "a loss outside took what they are made of in 1" in str(report)
    assert "graph 0 for a loss outside of it" in str(report)


@pytest.mark.parametrize("name", READS)
def test_what_reads_the_logits(name):
    check(Model(), READS[name], taken=0, read=1, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gather", "class first", "a log_softmax", "nll_loss", "label smoothing by hand", "batchmean", "probabilities", "a clipped ratio"])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_near_as_eager(name, autocast):
    """Eager rounds log-probabilities before it adds them up."""
    model, exact = (Model(), Model()) if autocast else (Model().bfloat16(), Model().bfloat16())
    dtype, exact = torch.bfloat16 if autocast else None, exact.double()
    wanted, of_exact = trained(exact, exact, TAKEN[name])
    eager, of_eager = trained(model, model, TAKEN[name], dtype)
    found, ours = trained(model, compiled_of(model), TAKEN[name], dtype)
    assert found.dtype == eager.dtype
    assert (found - wanted).abs() <= 2 * (eager - wanted).abs() + 2e-3 * wanted.abs()
    for key, gradient in of_exact.items():
        worst = [(g[key].double() - gradient).abs().max() for g in (of_eager, ours)]
        assert worst[1] <= 2 * worst[0] + 1e-6, key


def test_the_report_says_what_became_of_it():
    model = Model()
    with fx_fusion.recording() as report:
        loss = TAKEN["gather"](compiled_of(model)(ids))
        assert len(report.graphs) == 1, "nothing is compiled before it is read"
        loss.backward()
    assert report.count("linear_cross_entropy") == 1, str(report)
    assert "test_losses_outside.py" in str(report)


def test_types_are_known_and_values_are_eagers():
    model = Model()
    z = model(ids)
    with fx_fusion.recording() as report:
        made = compiled_of(model)(ids)
        calls = (
            lambda t: F.log_softmax(t / 2, -1), lambda t: t.logsumexp(-1), lambda t: t.gather(-1, ids[..., None]),
            lambda t: t - t.logsumexp(-1, keepdim=True), lambda t: t.argmax(-1), lambda t: t.argmax(-1) == ids,
            lambda t: F.cross_entropy(t.transpose(1, 2), some, reduction="none"), lambda t: t.mean(),
        )  # fmt: skip
        found, expected = [call(made) for call in calls], [call(z) for call in calls]
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.dtype, one.stride(), one.requires_grad) == (
                other.shape, other.dtype, other.stride(), other.requires_grad)  # fmt: skip
        assert report.graphs[0].reads.calls_read == 0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.clone(), other)


# -- when it is read ---------------------------------------------------------------------------------------------------
READ_BY = {
    "backward": lambda loss: loss.backward(),
    "autograd": lambda loss: torch.autograd.backward([loss]),
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss),
    "format": lambda loss: f"{loss:.3f}",
    "sum": lambda loss: torch.zeros(()).add_(loss.detach()),
    "bool": lambda loss: bool(loss > 0),
    "numpy": lambda loss: loss.detach().numpy(),
    "list": lambda loss: torch.stack([loss, loss]).tolist(),
    "to": lambda loss: loss.cpu(),
}


@pytest.mark.parametrize("how", READ_BY)
def test_a_loss_is_read_without_logits(how):
    model = Model()
    with fx_fusion.recording() as report:
        loss = LOSSES["rows"](compiled_of(model)(ids))
        assert report.graphs[0].reads.calls_taken == 0
        READ_BY[how](loss)
        assert (report.graphs[0].reads.calls_taken, report.graphs[0].reads.calls_read) == (1, 0)
        torch.testing.assert_close(loss + 0, LOSSES["rows"](model(ids)))


def test_all_that_is_alive_is_computed_at_once():
    """Terms that are logged one by one are parts of one loss."""
    model = Model()

    def loss_of(z):
        ce, regular, right = LOSSES["rows"](z), z_loss(z), (z.argmax(-1) == ids).float().mean()
        log = {"ce": ce.detach(), "z": regular.item(), "accuracy": right.item()}
        return ce + 1e-2 * regular + 0 * sum(log.values())

    check(model, loss_of, rtol=1e-4)


def test_a_loss_that_nobody_reads_is_never_computed():
    model = Model()
    with fx_fusion.recording() as report:
        call = compiled_of(model)
        for _ in range(3):
            z_loss(call(ids))
    assert (report.graphs[0].reads.calls_taken, report.graphs[0].reads.calls_read) == (0, 0)


def steps_as_eager(loss_of, count, atol):
    """Yield the report behind each step of a loop whose losses ``loss_of(logits, step)`` and gradients are eager's."""
    model = Model()
    with fx_fusion.recording() as report:
        call = compiled_of(model)
        for step in range(count):
            expected, of_eager = trained(model, model, lambda z, step=step: loss_of(z, step))
            found, ours = trained(model, call, lambda z, step=step: loss_of(z, step))
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(ours, of_eager, rtol=1e-4, atol=atol)
            yield report


def test_numbers_that_change_from_step_to_step():
    """A schedule of the temperature, and how many tokens there are: two programs, not one for each."""

    def loss_of(z, step):
        return F.cross_entropy((z / (1 + step / 10)).view(-1, V), ids.view(-1), reduction="sum") / (20 + step) * 0.5

    made = []
    for report in steps_as_eager(loss_of, 5, atol=1e-6):
        made.append(len(report.graphs))
    assert made == [2, 3, 3, 3, 3]
    assert report.graphs[0].reads.calls_taken == 5


def test_lengths_that_change():
    """The third length is no reason to compile again."""
    model, made = Model(), []
    call = torch.compile(model, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for length in (8, 5, 7, 6):
            given = ids[:, :length]
            found, expected = (TAKEN_OF_ANY(f(given), given) for f in (call, model))
            torch.testing.assert_close(found + 0, expected)
            made.append(len(report.graphs))
    assert made[2:] == made[2:3] * 2
    assert sum(graph.reads.calls_taken for graph in report.graphs if graph.deferred) == 4


def TAKEN_OF_ANY(z, y):
    return F.cross_entropy(z.reshape(-1, V), y.reshape(-1), reduction="none").view(y.shape).mean(-1).square().sum()


# -- what may change before it is read -----------------------------------------------------------------------------------
def test_operands_that_are_written_to_later():
    """Labels and masks are small, and copied. In eager a backward is an error where a saved one was changed."""
    model, index, mask = Model(), ids.clone(), (ids > 2000).float()
    loss = (F.cross_entropy(compiled_of(model)(ids).transpose(1, 2), index, reduction="none") * mask).sum()
    expected = (F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none") * (ids > 2000)).sum()
    index.fill_(3)
    mask.zero_()
    torch.testing.assert_close(loss + 0, expected)


def test_a_teacher_that_is_written_to_later_is_an_error():
    logits = teacher.clone()
    loss = F.kl_div(compiled_of(Model())(ids).log_softmax(-1), logits, log_target=True, reduction="batchmean")
    logits.mul_(2)
    with pytest.raises(StaleTensorError, match=r"changed in place after it went into what is computed"):
        loss.backward()


def test_a_step_between_a_loss_and_its_backward():
    """Numbers are computed before the step; eager's backward would be an error, too."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss, expected = LOSSES["rows"](compiled_of(model)(ids)), LOSSES["rows"](model(ids))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(loss.detach() + 0, expected.detach())


def test_what_is_kept_for_later_steps_is_computed():
    """Losses in a list, and a KL to the step before: eager's are tensors like any other."""
    losses = []
    for ours in (False, True):
        model, before = Model(), None
        call = compiled_of(model) if ours else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            now = F.log_softmax(call(ids) / 0.7, -1)
            loss = -of_class(now).mean()
            if before is not None:
                loss = loss + F.kl_div(now, before, log_target=True, reduction="batchmean")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            before = now.detach()
            losses += [loss.detach(), now.argmax(-1).float().mean()]
    torch.testing.assert_close(torch.stack(losses[:6]), torch.stack(losses[6:]))


def test_weights_that_changed_in_between():
    model = Model()
    loss = TAKEN["gather"](compiled_of(model)(ids))
    with torch.no_grad():
        model.head.weight.mul_(1.1)
    with pytest.raises(StaleTensorError, match="changed"):
        loss.backward()


def test_what_was_between_is_freed():
    """As in eager, where a cast and a quotient keep nothing of themselves."""

    def alive():
        gc.collect()
        found = (o for o in gc.get_objects() if type(o) is torch.Tensor and o.device.type == "cpu")
        return {id(o) for o in found if tuple(o.shape) == (B, L, V)}

    before = alive()
    log_probs = F.log_softmax(compiled_of(Model().bfloat16())(ids).float() / 0.7, -1)
    assert (log_probs @ of_classes).shape == (B, L)
    assert len(alive() - before) == 1, "the log-probabilities"


# -- gradients -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("where", range(4))
def test_hooks_on_what_is_between(where, early):
    """On the logits, scaled; on their logarithm; on the logits of classes; on the loss."""
    found = []
    for ours in (False, True):
        model = Model()
        z = (compiled_of(model) if ours else model)(ids) / 0.7
        parts = [z, z.logsumexp(-1), of_class(z)]
        if early and where < 3:
            parts[where].register_hook(lambda g: found.append(g.abs().sum()))
        parts.append(weighed(parts[1] - parts[2]))
        if not early or where == 3:
            parts[where].register_hook(lambda g: found.append(g.abs().sum()))
        parts[3].backward()
        found.append(model.head.weight.grad)
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("which", ["logits", "log-probabilities"])
@pytest.mark.parametrize("how", [lambda t: t.register_hook(print), lambda t: t.retain_grad()], ids=["hook", "retain_grad"])
def test_a_hook_behind_the_loss_is_an_error(which, how):
    """It would never be called."""
    z = compiled_of(Model())(ids)
    log_probs = z.log_softmax(-1)
    of_class(log_probs).sum().backward()
    with pytest.raises(RuntimeError, match="its gradient is not computed"):
        how(z if which == "logits" else log_probs)


def test_a_gradient_of_a_loss_of_rows():
    """``retain_grad`` on what waits without classes."""
    found = []
    for call in (compiled_of(Model()), Model()):
        each = each_of(call(ids))
        each.retain_grad()
        each.square().sum().backward()
        found.append(each.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kept", [False, True], ids=["again", "kept"])
def test_a_second_backward(kept, monkeypatch):
    """The first one of kept logits has overwritten them."""
    times = keeps_logits(monkeypatch, wide=kept)
    model = Model()
    made, exact = (of_class(z.log_softmax(-1)) for z in (compiled_of(model)(ids), model(ids)))
    made = made.view(made.shape)
    for upstream in (weights, torch.ones(B, L)):
        for found, expected in zip(*(torch.autograd.grad(y, list(model.parameters()), upstream, retain_graph=True)
                                     for y in (made, exact)), strict=True):  # fmt: skip
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert len(times) == kept
    with pytest.raises(RuntimeError, match="first derivatives"):
        torch.autograd.grad(torch.autograd.grad(made, model.head.weight, weights, create_graph=True)[0].sum(), model.head.weight)


def test_no_gradient_is_wanted():
    model = Model()
    z = compiled_of(model)(ids)
    with torch.no_grad():
        found = of_class(z.log_softmax(-1))
    assert not found.requires_grad
    torch.testing.assert_close(found + 0, of_class(model(ids).log_softmax(-1)).detach())


INPUTS = {
    "autograd.grad": lambda loss, z: torch.autograd.grad(loss, z)[0],
    "autograd.grad by keyword": lambda loss, z: torch.autograd.grad(loss, inputs=[z])[0],
    "backward": lambda loss, z: (loss.backward(inputs=[z]), z.grad)[1],
    "retain_grad": lambda loss, z: (z.retain_grad(), loss.backward(), z.grad)[2],
}


@pytest.mark.parametrize("of", [lambda z: z, lambda z: z.log_softmax(-1), each_of], ids=["logits", "log-probabilities", "losses"])
@pytest.mark.parametrize("how", INPUTS)
def test_gradients_of_what_waits(how, of):
    """Somebody asks for them while nobody has read the loss yet."""
    found = []
    for call in (compiled_of(Model()), Model()):
        part = of(call(ids))
        found.append(INPUTS[how](part.square().mean() + part.mean(), part))
    torch.testing.assert_close(*found)


def test_gradients_of_what_goes_in():
    """A learned temperature, a baseline of each row, a teacher that learns too."""
    found = []
    for ours in (False, True):
        model = Model()
        scale, baseline, q = (t.clone().requires_grad_() for t in (torch.tensor(0.7), weights, teacher))
        z = (compiled_of(model) if ours else model)(ids)
        each = F.cross_entropy((z * scale).transpose(1, 2), ids, reduction="none")
        (((each - baseline) * weights).mean() + F.kl_div(z.log_softmax(-1), q.log_softmax(-1), log_target=True)).backward()
        found.append([p.grad for p in (*model.parameters(), scale, baseline, q)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


# -- checkpoints and hooks on what is saved ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gather", "nll_loss", "class first", "a log_softmax", "batchmean", "probabilities", "a clipped ratio"])
def test_a_loss_that_is_checkpointed_alone(name):
    """Nothing waits: it would be there in the second run, which would save other tensors."""
    model, exact = Model(), Model()
    checkpoint(TAKEN[name], compiled_of(model)(ids), use_reentrant=False).backward()
    checkpoint(TAKEN[name], exact(ids), use_reentrant=False).backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["checkpoint", "hooks"])
def test_saved_tensor_hooks_have_all_that_is_saved(how, monkeypatch):
    """Logits are not kept beside what a checkpoint drops or offloading moves."""
    times = keeps_logits(monkeypatch)
    model = Model()
    call = compiled_of(model)
    loss_of = lambda i: of_sequences(each_of(call(i)))  # noqa: E731
    if how == "checkpoint":
        loss = checkpoint(loss_of, ids, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(ids)
    found = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(of_sequences(each_of(model(ids))), list(model.parameters())), rtol=1e-4, atol=1e-6)
    assert not times


def test_logits_are_kept_where_they_are_small_beside_the_memory(monkeypatch):
    times = keeps_logits(monkeypatch)
    check(Model(), lambda z: of_sequences(each_of(z)))
    monkeypatch.setattr(kernel, "memory_of_device", lambda x: 7 * B * L * V * 4)
    check(Model(), lambda z: of_sequences(each_of(z)))
    assert len(times) == 1


# -- errors --------------------------------------------------------------------------------------------------------------
ERRORS = {
    "a class out of range": (lambda z: z.log_softmax(-1).gather(-1, ids[..., None] + V), RuntimeError, "out of bounds"),
    "a target out of range": (lambda z: F.nll_loss(z.log_softmax(-1).flatten(0, 1), ids.flatten() + V), IndexError, "out of bounds"),
    "weights of another dtype": (lambda z: F.nll_loss(z.log_softmax(-1).flatten(0, 1), ids.flatten(), of_classes.double()), RuntimeError, "Double|Float"),
    "a dim that is no integer": (lambda z: z.log_softmax(-1.0), TypeError, "dim"),
    "a dim out of range": (lambda z: z.logsumexp(5), IndexError, "Dimension out of range"),
    "shapes that differ": (lambda z: z.logsumexp(-1) - of_class(z)[:, :3], RuntimeError, "must match the size"),
    "probabilities with ignore_index": (lambda z: F.cross_entropy(z.view(-1, V), teacher.softmax(-1).view(-1, V), ignore_index=5), RuntimeError, "ignore_index is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_pytorch(name):
    call, kind, message = ERRORS[name]
    for model in (Model(), compiled_of(Model())):
        with pytest.raises(kind, match=message):
            call(model(ids))


# -- other models and compiled losses ------------------------------------------------------------------------------------
def test_a_teacher_that_is_compiled_too():
    """Its logits are deferred, too, under no_grad; the softmax reads them."""
    student, wise = Model(), Model(bias=True)
    call, ask = compiled_of(student), compiled_of(wise)

    def loss_of(z, teach):
        with torch.no_grad():
            q = F.softmax(teach(ids) / T, -1)
        return F.kl_div(F.log_softmax(z / T, -1), q, reduction="batchmean")

    expected, of_eager = trained(student, student, lambda z: loss_of(z, wise))
    with fx_fusion.recording() as report:
        found, ours = trained(student, call, lambda z: loss_of(z, ask))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, of_eager, rtol=1e-4, atol=1e-6)
    assert report.graphs[0].reads.calls_taken == 1


def test_preferences_of_two_calls():
    """DPO: the chosen and the rejected are two calls of the model, and meet in a number of each sequence."""

    def loss_of(call):
        one, other = (of_class(call(given).log_softmax(-1), given).sum(-1) for given in (ids, ids.flip(0)))
        return -F.logsigmoid(0.1 * (one - other)).mean()

    model = Model()
    expected = torch.autograd.grad(loss_of(model), list(model.parameters()))
    with fx_fusion.recording() as report:
        call = compiled_of(model)
        for _ in range(3):
            found = torch.autograd.grad(loss_of(call), list(model.parameters()))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (report.graphs[0].reads.calls_taken, report.graphs[0].reads.calls_read) == (6, 0), str(report)


@pytest.mark.parametrize("before", [lambda z: z, lambda z: z.float() / T, lambda z: z.log_softmax(-1)], ids=["logits", "scaled", "log-probabilities"])
@pytest.mark.parametrize("loss_of", [lambda z: kl(z), lambda z: each_of(z, ids).mean()], ids=["kl", "classes"])
def test_a_loss_that_is_compiled_by_itself(loss_of, before):
    """Its graph runs in a version that begins with lm_head's product and what was computed of it, and they fuse."""
    model = Model()
    with fx_fusion.recording() as report:
        compiled, loss = compiled_of(model), torch.compile(loss_of, backend=rewriting_backend(select="always"))
        for _ in range(3):
            found = gradients(model, loss(before(compiled(ids))))
            torch.testing.assert_close(found, gradients(model, loss_of(before(model(ids)))), rtol=1e-4, atol=1e-6)
    counted = next(graph for graph in report.graphs if graph.deferred).reads
    assert (counted.calls_taken, counted.calls_read) == (3, 0), str(report)


def test_a_long_record_reads(monkeypatch):
    """A loop over single rows would be slow to compile."""
    model = Model()
    check(model, lambda z: sum(F.cross_entropy(z[b, i], ids[b, i]) for b in range(B) for i in range(L)) * sum(z.mean() for _ in range(300)),
          taken=0, read=1, rtol=1e-3, atol=1e-3)  # fmt: skip


class Scaled(torch.autograd.Function):
    """Code that differentiates a tensor, perhaps without ever asking for its values."""

    @staticmethod
    def forward(ctx, loss, reads):
        return loss * 2 if reads else torch.ones(loss.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy * 2, None


@pytest.mark.parametrize("when", ["before", "inside", "never"])
@pytest.mark.parametrize("of", [LOSSES["rows"], each_of, lambda z: each_of(z).mul_(0.5)], ids=["number", "rows", "in place"])
def test_a_custom_function_of_a_loss(of, when):
    """Its gradient goes to the model by way of the loss's own graph: no logits are made for it."""
    found = []
    for ours in (False, True):
        model = Model()
        call = compiled_of(model) if ours else model
        with fx_fusion.recording() as report:
            loss = of(call(ids))
            if when == "before":
                loss.tolist()
            (Scaled.apply(loss, when != "never").sum() + loss.sum()).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert (report.graphs[0].reads.calls_taken, report.graphs[0].reads.calls_read) == (1, 0), str(report)


def test_a_loss_that_was_read_keeps_nothing_of_what_it_was_made_of():
    """A step that returns its loss: neither hidden states nor the teacher's logits outlive it."""
    model = Model()
    call = compiled_of(model)

    def step():
        q = teacher.clone()
        loss = F.kl_div(call(ids).log_softmax(-1), q.softmax(-1), reduction="batchmean")
        loss.backward()
        return loss

    def alive():
        gc.collect()
        found = (o for o in gc.get_objects() if type(o) is torch.Tensor and not o.is_meta)
        return sum(o.shape in ((B, L, V), (B, L, 16)) for o in found)

    before = alive()
    loss = step()
    assert alive() == before
    assert loss.item() > 0


# -- what a reading of the record found ------------------------------------------------------------------------------------
def slices_that_change(z, step):
    """Equal in one step, and different in another."""
    (a, b), e = ((1, 3), (2, 2), (1, 4))[step % 3], lambda i, j: F.cross_entropy(z[:, i:j].flatten(0, 1), ids[:, i:j].flatten())
    return e(0, 1) + 2 * e(a, a + 2) + 3 * e(b, b + 2).square()


def an_old_policy(z, step):
    now = of_class(z.log_softmax(-1))
    with torch.no_grad():
        before = now.reshape(-1).view(B, L)
    return ((now - before).exp() * now).mean()


def another_dim(z, step):
    return weighed(z.logsumexp(-1).cumsum(step % 2))


def an_accuracy(z, step):
    right = (z.argmax(-1) == ids).sum() / (20 + step)
    return LOSSES["rows"](z) + 0 * right.item()


def in_inference_mode(z, step):
    loss = LOSSES["rows"](z)
    with torch.inference_mode():
        loss.item()
    return loss


def in_a_transform(z, step):
    rows = each_of(z, ids)
    torch.func.grad(lambda t: (rows * t).mean())(torch.tensor(2.0))
    return rows.mean()


def two_metrics(z, step):
    loss = LOSSES["rows"](z)
    return loss + 0 * z.square().mean().item() + 0 * z.amax(-1).detach().mean()


FOUND = (slices_that_change, an_old_policy, another_dim, an_accuracy, in_inference_mode, in_a_transform, two_metrics)


@pytest.mark.parametrize("loss_of", FOUND, ids=lambda f: f.__name__)
def test_steps_are_eagers(loss_of):
    *_, report = steps_as_eager(loss_of, 4, atol=1e-5)
    assert report.graphs[0].reads.calls_taken == 4, str(report)


def test_two_losses_of_one_call_each_with_a_backward():
    found = []
    for call in (compiled_of(Model()), Model()):
        z = call(ids)
        one, other = LOSSES["rows"](z), z_loss(z)
        one.backward(retain_graph=True)
        other.backward()
        model = getattr(call, "_orig_mod", call)
        found.append([one.detach(), other.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_hook_on_a_loss_makes_no_logits():
    found = []
    for call in (compiled_of(Model()), Model()):
        with fx_fusion.recording() as report:
            loss = LOSSES["rows"](call(ids))
            loss.register_hook(lambda g: 3 * g)
            loss.backward()
        found.append([p.grad for p in getattr(call, "_orig_mod", call).parameters()])
        assert all((g.reads.calls_taken, g.reads.calls_read) == (1, 0) for g in report.graphs[:1]), str(report)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_no_parameter_is_copied_for_a_loss_that_was_read(monkeypatch):
    from fx_fusion.runtime import recipe

    copies, apply = [], recipe.Kept.apply
    monkeypatch.setattr(recipe.Kept, "apply", lambda t: copies.append(1) or apply(t))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = compiled_of(model)
    for _ in range(3):
        loss = LOSSES["rows"](call(ids))
        loss.backward()
        optimizer.step()
    assert not copies


def test_logits_that_are_kept_over_two_steps_are_an_error():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = compiled_of(model)
    kept = []
    for _ in range(3):
        z = call(ids)
        LOSSES["rows"](z).backward()
        optimizer.step()
        kept.append(z)
    with pytest.raises(StaleTensorError):
        kept[0].detach().float().tolist()


def test_a_custom_function_that_writes_returns_its_tensor():
    rows = each_of(compiled_of(Model())(ids))
    assert rows.mul_(2) is rows
    rows += 1
    torch.testing.assert_close(rows.detach() + 0, 2 * each_of(Model()(ids)).detach() + 1)


def test_a_write_behind_a_reentrant_checkpoint():
    """Its logits have the gradient of the checkpoint, also where they are written to."""
    found = []
    for ours in (False, True):
        model = Model()
        call = compiled_of(model) if ours else model
        z = checkpoint(lambda i, t, call=call: call(i), ids, torch.ones(1, requires_grad=True), use_reentrant=True)
        z.argmax(-1).tolist()
        z.mul_(2.0)
        z.square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_cuda_graph_writes_over_what_losses_are_made_of(replayed):
    """They are computed before the next call of the model."""
    call = compiled_of(Model(), **({"triton.cudagraphs": True} if replayed else {}))
    with fx_fusion.recording() as report:
        kept = [LOSSES["rows"](call(ids)) for _ in range(3)]
    assert report.graphs[0].reads.calls_taken == (2 if replayed else 0)
    torch.testing.assert_close(torch.stack(kept), LOSSES["rows"](Model()(ids)).expand(3))


@pytest.mark.parametrize("level", ["first", "graph"])
def test_losses_outside_are_verified(level):
    """As any graph: its sites, or the whole of it, against eager in float64."""
    call = compiled_of(Model(), verify=level)
    with fx_fusion.recording() as report:
        TAKEN["reverse KL"](call(ids)).backward()
    assert "graph 1: verified" in str(report), str(report)


# -- what a second reading found -----------------------------------------------------------------------------------------
class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        ctx.mark_dirty(loss)
        return loss.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


@pytest.mark.parametrize("read", [False, True])
def test_a_custom_function_that_writes_to_a_loss_is_an_error(read):
    """Its gradient would be lost. PyTorch may ask in the middle of its own call."""
    loss = LOSSES["rows"](compiled_of(Model())(ids))
    if read:
        loss.tolist()
    with pytest.raises((RuntimeError, SystemError)):
        (Dirty.apply(loss) * 1).backward()


@pytest.mark.parametrize("read", [False, True])
def test_a_loss_that_is_detached_in_place(read):
    model = Model()
    loss = LOSSES["rows"](compiled_of(model)(ids))
    if read:
        loss.tolist()
    assert loss.detach_() is loss
    assert (loss.requires_grad, loss.is_leaf, loss.grad_fn) == (False, True, None)
    weight = torch.ones((), requires_grad=True)
    (Scaled.apply(loss * weight, True) + loss).backward()
    torch.testing.assert_close(weight.grad, 2 * LOSSES["rows"](Model()(ids)).detach())
    assert model.head.weight.grad is None


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_of_what_a_custom_function_took(reads):
    """Eager's, or an error: never none."""
    rows = each_of(compiled_of(Model())(ids))
    made = Scaled.apply(rows, reads).mean()
    if reads:
        with pytest.raises(RuntimeError, match="took"):
            torch.autograd.grad(made, rows, allow_unused=True)
    else:
        gradient, = torch.autograd.grad(made, rows, allow_unused=True)
        torch.testing.assert_close(gradient, torch.full((B * L,), 2 / (B * L)))


def test_a_backward_under_no_grad():
    found = []
    for ours in (False, True):
        model = Model()
        loss = Scaled.apply(LOSSES["rows"]((compiled_of(model) if ours else model)(ids)), True)
        with torch.no_grad():
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_losses_that_a_custom_function_takes_in_call_after_call_cost_no_second_product():
    model = Model()
    call = compiled_of(model)

    def step():
        Scaled.apply(LOSSES["rows"](call(ids)), True).backward()

    for _ in range(3):
        step()
    assert products(step) == 3


def test_a_number_that_a_graph_returns_beside_its_loss():
    model = Model()

    def run(i):
        z = model(i)
        return LOSSES["rows"](z), z[0, 0, 5]

    for found, expected in zip(torch.compile(run, backend=rewriting_backend())(ids), run(ids), strict=True):
        torch.testing.assert_close(found + 0, expected)


@pytest.mark.parametrize("product", [
    lambda x, w: x @ w.t(), lambda x, w: torch.matmul(x, w.T), lambda x, w: torch.einsum("bld,vd->blv", x, w),
    lambda x, w: torch.mm(x.view(-1, 16), w.t()), lambda x, w: torch.addmm(w[:, 0], x.view(-1, 16), w.t()),
])  # fmt: skip
def test_a_head_that_is_a_product_with_a_transposed_weight(product):
    """As nanochat and others tie lm_head to the embeddings."""
    x, w = torch.randn(B, L, 16), torch.randn(V, 16) / 4
    found = []
    for backend in (None, rewriting_backend(select="always")):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        torch._dynamo.reset()
        with fx_fusion.recording() as report:
            head = product if backend is None else torch.compile(product, backend=backend)
            loss = F.cross_entropy(head(*leaves).view(-1, V), ids.view(-1))
            loss.backward()
        found.append((loss.detach(), *(t.grad for t in leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert report.count("linear_cross_entropy") == 1, str(report)
    assert "a loss outside took what they are made of in 1" in str(report), str(report)
