"""Losses of rows that a number is linear in: masks, weights, means of sequences. The op is told how much each row counts,
and computes its gradients in the forward, as for a sum; where a step is not linear, it hands out one loss a row."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.kernels import linear_cross_entropy as module
from fx_fusion.kernels.logits import logit_chunks
from tests.helpers import rewriting_backend, rewritten
from tests.losses import H, M, V, class_weight, compare, head, ignoring, target, x

B = 3
generator = torch.Generator().manual_seed(5)
mask = (torch.rand(M, generator=generator) > 0.4).float()
of_rows = torch.rand(M, generator=generator) + 0.1


def losses(z, t, **options):
    return F.cross_entropy(z, t, reduction="none", **options)


def log_probs(z, t):
    return z.log_softmax(-1).gather(-1, t.clamp(min=0)[:, None]).squeeze(-1)


def of_sequences(z, t, m):
    lengths = m.view(B, -1).sum(1)
    return ((losses(z, t).view(B, -1) * m.view(B, -1)).sum(1) / lengths).mean()


def per_sequence(z, t, m):
    each = F.cross_entropy(z.view(B, -1, V).transpose(1, 2), t.view(B, -1), reduction="none")
    return (each.masked_fill(m.view(B, -1) == 0, 0.0).sum(dim=1, keepdim=True) * torch.arange(1.0, B + 1)[:, None]).sum()


def in_place(z, t, m):
    each = losses(z, t)
    each *= m
    return each.sum().div_(m.sum())


def with_a_z_loss(z, t, m):
    return ((losses(z, t) + 1e-2 * z.logsumexp(-1) ** 2) * m).sum() / m.sum()


LINEAR = {
    "masked mean": lambda z, t, m: (losses(z, t) * m).sum() / m.sum(),
    "mask in front": lambda z, t, m: (m * losses(z, t)).sum() / m.sum().clamp(min=1),
    "boolean": lambda z, t, m: (losses(z, t) * (m > 0)).sum() / (m > 0).sum(),
    "mean": lambda z, t, m: losses(z, t).mean(),
    "mean that is scaled": lambda z, t, m: 0.5 * losses(z, t).mean() / 3,
    "sum over one dim": lambda z, t, m: losses(z, t).view(B, -1).sum(-1).mean(0),
    "of log-probabilities": lambda z, t, m: -(log_probs(z, t) * m).sum() / m.sum(),
    "of minus log-probabilities": lambda z, t, m: (-log_probs(z, t) * m).sum(),
    "where": lambda z, t, m: torch.where(m > 0, losses(z, t), 0.0).sum() / m.sum(),
    "where not": lambda z, t, m: torch.where(m == 0, 0.0, losses(z, t)).mean(),
    "method where": lambda z, t, m: losses(z, t).where(m > 0, 0).mean(),
    "flattened": lambda z, t, m: (losses(z, t).view(B, -1) * m.view(B, -1)).flatten().sum(),
    "a scalar and a mask": lambda z, t, m: (losses(z, t) / m.sum() * m).sum(),
    "negative weights": lambda z, t, m: (losses(z, t) * (m - 0.5)).sum(),
    "smoothed, of classes": lambda z, t, m: (losses(z, t, weight=class_weight, label_smoothing=0.1) * m).sum(),
    "sequences": of_sequences,
    "sequences, kept dims": per_sequence,
    "in place": in_place,
    "z-loss": with_a_z_loss,
    "scaled and capped": lambda z, t, m: (losses(5 * torch.tanh(z * 0.1 / 5), t) * m).sum(),
    "a mean of one number": lambda z, t, m: (losses(z, t) * m).sum().mean(-1, keepdim=True) / m.sum(),
    "a mean of a mean": lambda z, t, m: losses(z, t).mean().mean(0),
    "cast": lambda z, t, m: (losses(z, t).float() * m).sum().float(),
}
SHARED_WEIGHTS = {
    "squared": lambda z, t, m: losses(z, t).square().mean(),
    "exponential": lambda z, t, m: torch.exp(-losses(z, t)).sum(),
    "times itself": lambda z, t, m: (lambda each: (each * each).sum())(losses(z, t)),
    "read twice": lambda z, t, m: (lambda each: each.sum() + each.max())(losses(z, t)),
    "weighted by its own value": lambda z, t, m: (lambda each: (each * each.detach()).sum())(losses(z, t)),
    "divisor": lambda z, t, m: (m / (losses(z, t) + 1)).sum(),
    "plus a number": lambda z, t, m: (losses(z, t) + 1).mean(),
    "spread": lambda z, t, m: (losses(z, t)[None] * torch.ones(2, 1)).sum(),
    "filled with one": lambda z, t, m: losses(z, t).masked_fill(m == 0, 1.0).sum(),
    "maximum": lambda z, t, m: losses(z, t).max(),
    "rows": lambda z, t, m: losses(z, t) * m,
}


def calls(function, *given, **options):
    """The calls of the op in the graph that ``function`` becomes."""
    graphs = []

    def backend(gm, examples):
        compiled = rewriting_backend(select="always", **options)(gm, examples)
        graphs.append(gm)
        return compiled

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*given)
    return [n for gm in graphs for n in gm.graph.nodes if "linear_cross_entropy" in str(n.target)]


@pytest.mark.parametrize("labels", [target, ignoring], ids=["all labels", "some"])
@pytest.mark.parametrize("name", LINEAR)
def test_a_number_that_is_linear_in_the_losses(name, labels):
    def function(x, w, t):
        return LINEAR[name](F.linear(x, w), t, mask)

    compare(function, x, head, labels)
    (call,) = calls(function, x.clone().requires_grad_(), head, labels)
    assert call.kwargs["row_weights"] is not None


@pytest.mark.parametrize("name", SHARED_WEIGHTS)
def test_what_is_not_linear_gets_one_loss_a_row(name):
    def function(x, w, t):
        return SHARED_WEIGHTS[name](F.linear(x, w), t, mask)

    compare(function, x, head, ignoring)
    (call,) = calls(function, x.clone().requires_grad_(), head, ignoring)
    assert "row_weights" not in call.kwargs


def test_weights_with_a_gradient():
    def function(x, w, t, m):
        return (losses(F.linear(x, w), t) * m).sum()

    compare(function, x, head, target, of_rows)  # compare() asks for the gradient of every float
    (call,) = calls(function, x, head, target, of_rows.clone().requires_grad_())
    assert "row_weights" not in call.kwargs


def test_no_row_counts():
    """0 / 0 is NaN, also in every gradient, as in eager."""

    def function(x, w, t, m):
        return (losses(F.linear(x, w), t) * m).sum() / m.sum()

    given = [x.clone().requires_grad_(), head.clone().requires_grad_(), target]
    loss, report = rewritten(function, *given, torch.zeros(M))
    report.assert_fused(linear_cross_entropy=1)
    expected = function(*given, torch.zeros(M))
    for ours, theirs in zip(
        (loss, *torch.autograd.grad(loss, given[:2])), (expected, *torch.autograd.grad(expected, given[:2])), strict=True
    ):
        assert ours.isnan().all()
        assert theirs.isnan().all()


def nothing_in_one_sequence(z, t):
    t = t.view(B, -1).clone()
    t[1] = -100
    each, n = losses(z, t.view(-1)).view(B, -1), (t != -100).sum(1)
    return torch.where(n > 0, each.sum(1) / n, 0.0).mean()


def unseen_by_design(z, t):
    seen = (t != -100).float()
    return (losses(z, t) * (1 / seen)).masked_fill(seen == 0, 0.0).sum()


NOT_FINITE = {
    "a sequence without labels": nothing_in_one_sequence,
    "a weight of infinity that is hidden": unseen_by_design,
    "a sum over no weight": lambda z, t: losses(z, t).sum() / (mask * 0).sum(),
    "all ignored": lambda z, t: losses(z, t * 0 - 100).sum() / (t * 0).sum(),
    "a mean of sequences without labels": lambda z, t: (losses(z, t).view(B, -1).sum(1) / (t.view(B, -1) < -1).sum(1)).mean(),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_infinities_and_what_is_no_number(name):
    """The number is what the steps of the graph make of the losses, as they are; gradients where eager has numbers."""
    given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    loss, report = rewritten(lambda x, w: NOT_FINITE[name](F.linear(x, w), ignoring), *given)
    report.assert_fused(linear_cross_entropy=1)
    expected = NOT_FINITE[name](F.linear(*given), ignoring)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    for ours, theirs in zip(torch.autograd.grad(loss, given), torch.autograd.grad(expected, given), strict=True):
        known = theirs.isfinite()
        torch.testing.assert_close(ours[known], theirs[known], rtol=1e-5, atol=1e-5)


def test_a_sequence_without_labels_in_float16():
    rows, w = (n.half() for n in (x * 0.1, head))
    given = [rows.requires_grad_(), w.requires_grad_()]
    loss, report = rewritten(lambda x, w: nothing_in_one_sequence(F.linear(x, w).float(), ignoring), *given)
    report.assert_fused(linear_cross_entropy=1)
    expected = nothing_in_one_sequence(F.linear(*given).float(), ignoring)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(torch.autograd.grad(loss, given), torch.autograd.grad(expected, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_no_rows():
    for mean in (lambda each: each.mean(), lambda each: (each * mask[:0]).sum() / mask[:0].sum(), lambda each: each.sum()):
        given = [x[:0].clone().requires_grad_(), head.clone().requires_grad_()]
        loss, _ = rewritten(lambda x, w, mean=mean: mean(losses(F.linear(x, w), target[:0])), *given)
        expected = mean(losses(F.linear(*given), target[:0]))
        torch.testing.assert_close(loss, expected, equal_nan=True)
        for ours, theirs in zip(torch.autograd.grad(loss, given), torch.autograd.grad(expected, given), strict=True):
            torch.testing.assert_close(ours, theirs)


def in_another_region(x, w, t):
    with torch.autocast("cpu", torch.bfloat16):
        each = losses(F.linear(x, w), t)
    return (each * mask).sum() / mask.sum()


def without_a_gradient(x, w, t):
    each = losses(F.linear(x, w), t)
    with torch.no_grad():
        logged = (each * mask).sum()
    return logged + x.sum() * 0


def a_mask_that_is_made_in_between(x, w, t):
    z = F.linear(x, w)
    m = mask.clone()
    m[0] = 0
    return (losses(z, t) * m).sum() / m.sum()


@pytest.mark.parametrize("function", [in_another_region, without_a_gradient, a_mask_that_is_made_in_between])
def test_lm_head_stays_part_of_it(function):
    given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    loss, report = rewritten(function, *given, ignoring)
    report.assert_fused(linear_cross_entropy=1)
    torch.testing.assert_close(loss, function(*given, ignoring), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["masked mean", "of log-probabilities", "of minus log-probabilities", "negative weights", "sequences"])
def test_nothing_is_scaled_where_backward_is_called_at_once(name, monkeypatch):
    """The gradients of the forward are those of the number: a factor of 1 moves no memory."""
    factors, original = [], module.factor_behind
    monkeypatch.setattr(module, "factor_behind", lambda *given: factors.append(original(*given)) or factors[-1])
    given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    loss, _ = rewritten(lambda x, w: LINEAR[name](F.linear(x, w), ignoring, mask), *given)
    loss.backward()
    assert [float(f) for f in factors] == [1.0]


def test_a_factor_in_front_of_it():
    """Upstream gradients other than 1, twice through one graph, and none at all."""
    given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
    loss, _ = rewritten(lambda x, w: (losses(F.linear(x, w), ignoring) * mask).sum() / mask.sum(), *given)
    expected = (losses(F.linear(*given), ignoring) * mask).sum() / mask.sum()
    for factor in (1.0, -3.0, 1e-30, 0.0):
        grads = (torch.autograd.grad(y * factor, given, retain_graph=True) for y in (loss, expected))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-35 if factor == 1e-30 else 1e-5)


def test_rows_of_weight_zero_need_no_logits(monkeypatch):
    seen, original = [], logit_chunks.each_chunk
    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 0)
    monkeypatch.setattr(logit_chunks, "each_chunk", lambda x, *a, **k: (seen.append(x.shape[0]), original(x, *a, **k))[1])
    compare(lambda x, w, t: (losses(F.linear(x, w), t) * mask).sum() / mask.sum(), x, head, ignoring)
    assert seen == [int(((mask != 0) & (ignoring != -100)).sum())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_as_eager(dtype):
    def loss(x, w, t, m):
        return (losses(F.linear(x, w).float(), t) * m).sum() / m.sum()

    rows, w, m = torch.randn(64, H) * 0.3, torch.randn(V, H), torch.rand(64) * 1e-3
    t = torch.randint(0, V, (64,))
    results = []
    for wide, ours in ((True, False), (False, False), (False, True)):
        given = [(n.to(dtype).double() if wide else n.to(dtype)).requires_grad_() for n in (rows, w)]
        if ours:
            out, report = rewritten(loss, *given, t, m)
            report.assert_fused(linear_cross_entropy=1)
        else:
            z = F.linear(*given)
            out = (losses(z if wide else z.float(), t) * m).sum() / m.double().sum().to(z.dtype if wide else m.dtype)
        results.append((out.detach(), *torch.autograd.grad(out, given)))
    for exact, eager, ours in zip(*results, strict=True):
        worst = [(n.double() - exact).abs().max().item() for n in (eager, ours)]
        assert worst[1] <= 2 * worst[0] + 1e-7, worst


def test_weights_in_16_bits_are_not_rounded_again():
    """1 / 37 is no number of bfloat16; the product of it and a mask in bfloat16 is one of float32 in eager."""
    m = torch.ones(M, dtype=torch.bfloat16)

    def function(x, w, t):
        return (losses(F.linear(x, w), t) / torch.tensor(37.0) * m).sum()

    compare(function, x, head, target)


def test_batches_of_any_size():
    def function(x, w, t, m):
        each = losses(F.linear(x, w).view(-1, V), t.view(-1)).view(t.shape)
        return (each * m).sum(1).mean() + (each.shape[0] * 0)

    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for b, s in ((2, 5), (3, 7), (4, 1)):
            given = [torch.randn(b, s, H, requires_grad=True), head.clone().requires_grad_()]
            t, m = torch.randint(0, V, (b, s)), torch.rand(b, s)
            out, expected = compiled(*given, t, m), function(*given, t, m)
            torch.testing.assert_close(out, expected)
            for ours, theirs in zip(torch.autograd.grad(out, given), torch.autograd.grad(expected, given), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    report.assert_fused(linear_cross_entropy=len(report.graphs))


def test_a_mask_that_is_written_to_in_between():
    def function(x, w, t, m):
        m = m.clone()
        each = losses(F.linear(x, w), t) * m
        m.zero_()
        return each.sum() + m.sum()

    out, _ = rewritten(function, x, head, target, mask)
    torch.testing.assert_close(out, function(x, head, target, mask))


def test_a_condition_that_is_made_of_the_losses():
    """Other numbers in their shape, and a choice that they make: nothing of it is linear."""

    def shaped(x, w, t):
        return (x[:, 0].view_as(losses(F.linear(x, w), t))).sum()

    def chosen(x, w, t):
        return torch.where(losses(F.linear(x, w), t) > 1, x[:, 0], 0.0).sum()

    for function in (shaped, chosen):
        out, _ = rewritten(function, x, head, target)
        torch.testing.assert_close(out, function(x, head, target))


@pytest.mark.parametrize("read", [False, True])
def test_logits_beside_it_are_deferred(read):
    def function(x, w, t):
        z = F.linear(x, w)
        return (losses(z, t) * mask).sum() / mask.sum(), z

    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend())
        for _ in range(3):
            given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
            loss, logits = compiled(*given, ignoring)
            expected, eager_logits = function(*given, ignoring)
            torch.testing.assert_close(loss, expected)
            if read:
                torch.testing.assert_close(logits + 0, eager_logits)
            ours, theirs = torch.autograd.grad(loss, given), torch.autograd.grad(expected, given)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    report.assert_fused(linear_cross_entropy=len(report.graphs))


def test_every_replaced_site_against_float64():
    """The option ``verify`` runs the site as the model wrote it, the mask included."""
    given = [x.clone().requires_grad_(), head.clone().requires_grad_(), target, of_rows]
    with fx_fusion.recording() as report:
        compiled = torch.compile(
            lambda x, w, t, m: (losses(F.linear(x, w), t) * m).sum() / m.sum(),
            backend=rewriting_backend(select="always", verify=True),
        )
        compiled(*given).backward()
    report.assert_fused(linear_cross_entropy=1)
