"""lm_head, cross-entropy and z-loss in one: the spellings, what is left alone and why, deferred logits beside it."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from tests.helpers import reasons, rewriting_backend, rewritten
from tests.losses import H, M, V, compare, head, ignoring, target, x

C = 1e-2


def squares(z):
    return torch.logsumexp(z, -1).square()


def as_olmo(z, t):
    """Labels and logits of (batch, length), the squares of rows without a label dropped from the mean of all."""
    z = z.view(2, -1, V).float()
    loss = F.cross_entropy(z.view(-1, V), t.view(-1))
    of_rows = z.logsumexp(-1).pow(2)
    return loss + C * (of_rows * (t.view(2, -1) != -100)).mean()


def of_those_that_count(z, t):
    mask = (t != -100).float()
    return F.cross_entropy(z, t) + (z.float().logsumexp(dim=-1) ** 2 * mask).sum() / mask.sum() * C


def of_each_row(z, t):
    lse = z.logsumexp(-1)
    losses = F.cross_entropy(z, t, reduction="none") + lse * lse / 100
    mask = t != -100
    return (losses * mask).sum() / mask.sum()


SPELLINGS = {
    "mean": lambda z, t: F.cross_entropy(z, t) + C * squares(z).mean(),
    "first": lambda z, t: (C * squares(z)).mean() + F.cross_entropy(z, t, label_smoothing=0.1),
    "sum": lambda z, t: F.cross_entropy(z, t, reduction="sum") + C * squares(z).sum(),
    "sum of those that count": lambda z, t: F.cross_entropy(z, t, reduction="sum") + C * ((t != -100) * squares(z)).sum(),
    "scaled and capped": lambda z, t: (lambda s: F.cross_entropy(s, t) + C * squares(s).mean())(5 * torch.tanh(z * 0.1 / 5)),
    "log-probabilities": lambda z, t: F.nll_loss(z.log_softmax(-1), t) + C * squares(z).mean(),
    "gathered": lambda z, t: -z.log_softmax(-1).gather(-1, t.clamp(min=0)[:, None]).squeeze(-1).mean() + C * squares(z).mean(),
    "transposed": lambda z, t: (
        lambda s: F.cross_entropy(s.transpose(1, 2), t.view(2, -1)) + C * squares(s).mean()
    )(z.view(2, -1, V)),
    "as OLMo": as_olmo,
    "of those that count": of_those_that_count,
    "of each row": of_each_row,
    "bool masks": lambda z, t: F.cross_entropy(z, t) + C * (squares(z) * (t != -100)).sum() / (t != -100).sum(),
    "at least one": lambda z, t: (
        F.cross_entropy(z, t) + C * (squares(z) * (t != -100)).sum() / (t != -100).sum().clamp(min=1)
    ),
    "as T5X": lambda z, t: (
        F.cross_entropy(z, t, reduction="none") + C * z.logsumexp(-1, keepdim=True).squeeze(-1) ** 2
    ),
    "squares as rows": lambda z, t: (
        F.cross_entropy(z, t, reduction="none") + C * z.view(2, -1, V).logsumexp(-1).square().view(-1)
    ),
    "factor of 0": lambda z, t: F.cross_entropy(z, t) + 0.0 * squares(z).mean(),
}  # fmt: skip


@pytest.mark.parametrize("labels", [target, ignoring], ids=["all labels", "some"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, labels):
    report = compare(lambda x, w, t: SPELLINGS[name](F.linear(x, w), t), x, head, labels)
    assert "logsumexp" not in report.graphs[0].after, "no logits are left"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_half_precision_is_as_near_as_eager(reduction):
    def loss(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z.float(), t, reduction=reduction) + C * getattr(squares(z.float()), reduction)()

    rows, w = torch.randn(64, H) * 0.3, torch.randn(V, H)
    t = torch.randint(0, V, (64,))
    results = []
    for dtype, ours in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        given = [n.bfloat16().to(dtype).requires_grad_() for n in (rows, w)]
        if ours:
            out, report = rewritten(loss, *given, t)
            report.assert_fused(linear_cross_entropy=1)
        elif dtype == torch.float64:
            z = F.linear(*given)
            out = F.cross_entropy(z, t, reduction=reduction) + C * getattr(squares(z), reduction)()
        else:
            out = loss(*given, t)
        results.append((out.detach(), *torch.autograd.grad(out, given)))
    for exact, eager, ours in zip(*results, strict=True):
        worst = [(n.double() - exact).abs().max().item() for n in (eager, ours)]
        assert worst[1] <= 2 * worst[0] + 1e-6, worst


def logged(z, t):
    loss, of_squares = F.cross_entropy(z, t), C * squares(z).mean()
    return loss + of_squares, of_squares.detach()


LEFT = {
    "another reduction": (lambda z, t: F.cross_entropy(z, t) + C * squares(z).sum(), "not reduced as the loss is"),
    "a mean beside rows": (lambda z, t: F.cross_entropy(z, t, reduction="none") + C * squares(z).mean(), None),
    "another dtype's bits": (
        lambda z, t: F.cross_entropy(z, t) + C * (squares(z) * (t != -100).float().view(torch.int32)).mean(), None
    ),
    "of other rows": (lambda z, t: F.cross_entropy(z[1:], t[1:]) + C * squares(z).mean(), None),
    "subtracted": (lambda z, t: F.cross_entropy(z, t) - C * squares(z).mean(), None),
    "of the absolute value": (lambda z, t: F.cross_entropy(z, t) + C * z.logsumexp(-1).abs().mean(), None),
    "of another dim": (lambda z, t: F.cross_entropy(z, t) + C * z.logsumexp(0).square().mean(), None),
    "another mask": (lambda z, t: F.cross_entropy(z, t) + C * (squares(z) * (t != 3)).mean(), None),
    "divided twice": (
        lambda z, t: F.cross_entropy(z, t) + C * (squares(z) * (t != -100)).sum() / (t != -100).sum() / (t != -100).sum(), None
    ),
    "broadcast": (lambda z, t: F.cross_entropy(z, t) + C * (squares(z)[:, None] * (t != -100)).mean(), None),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_z_loss_of_these_rows_stays(name):
    function, reason = LEFT[name]
    report = compare(lambda x, w, t: function(F.linear(x, w), t), x, head, ignoring, expect=("cross_entropy",))
    assert reason is None or reason in reasons(report, "linear_cross_entropy")


def prompt_is_masked(z, t):
    mask = (t != -100).float()
    mask[:4] = 0
    return F.cross_entropy(z, t) + C * (squares(z) * mask).sum() / mask.sum()


def mask_behind_a_view(z, t):
    mask = t != -100
    mask.view(-1)[1] = True
    return F.cross_entropy(z, t, reduction="sum") + C * (squares(z) * mask).sum()


def count_is_clamped(z, t):
    mask = (t != -100).float()
    count = mask.sum()
    count.clamp_(min=100)
    return F.cross_entropy(z, t) + C * (squares(z) * mask).sum() / count


def mask_after_its_count(z, t):
    mask = (t != -100).float()
    count = mask.sum()
    mask.mul_(2)
    return F.cross_entropy(z, t) + C * (squares(z) * mask).sum() / count


WRITTEN = {  # what is read behind the write is another value, or memory is written to that something else reads
    prompt_is_masked: "writes to the target, or to a mask",
    mask_behind_a_view: "writes to the target, or to a mask",
    count_is_clamped: "linear is also used outside the pattern, by logsumexp",
    mask_after_its_count: "linear is also used outside the pattern, by logsumexp",
}


@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_masks_and_counts_that_are_written_to(function):
    report = compare(lambda x, w, t: function(F.linear(x, w), t), x, head, ignoring, expect=("cross_entropy",))
    assert WRITTEN[function] in reasons(report, "linear_cross_entropy")


def test_a_target_that_is_written_to_behind_its_mask():
    def before_the_head(x, w, t):
        t = t.clone()
        mask = t != -100
        t[1] = -100
        z = F.linear(x, w)
        return F.cross_entropy(z, t) + C * (squares(z) * mask).mean()

    def behind_a_copy(x, w, t):
        y = t.view(2, -1)[:, 1:].contiguous()
        mask = t.view(2, -1)[:, 1:] != -100
        y[0, 1] = -100
        z = F.linear(x[: y.numel()], w)
        return F.cross_entropy(z, y.view(-1)) + C * (squares(z) * mask.reshape(-1)).mean()

    for function in (before_the_head, behind_a_copy):
        compare(function, x, head, ignoring, expect=("cross_entropy",))


def test_a_target_that_is_written_to_before_its_mask():
    def function(x, w, t):
        t = t.clone()
        t[t == 3] = -100
        z = F.linear(x, w)
        return F.cross_entropy(z, t) + C * (squares(z) * (t != -100)).mean()

    compare(function, x, head, ignoring)


def test_a_part_that_is_read_alone_is_named():
    def function(x, w, t):
        return logged(F.linear(x, w), t)

    given = [x.clone().requires_grad_(), head.clone().requires_grad_(), target]
    (loss, part), report = rewritten(function, *given)
    report.assert_fused(linear_cross_entropy=0)
    assert "read the sum alone" in reasons(report, "linear_cross_entropy")
    expected = function(*given)
    torch.testing.assert_close((loss, part), expected)


def test_no_gradient_where_the_model_has_none():
    """A z-loss under no_grad is a number to log, not a part of the gradient."""

    def function(x, w, t):
        z = F.linear(x, w)
        with torch.no_grad():
            of_squares = C * squares(z).mean()
        return F.cross_entropy(z, t) + of_squares

    compare(function, x, head, target, expect=("cross_entropy",))


def test_float16_is_left_with_the_reason():
    def function(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z.float(), t) + C * squares(z.float()).mean()

    given = [n.half().requires_grad_() for n in (x, head)]
    _, report = rewritten(function, *given, target)
    report.assert_fused(linear_cross_entropy=0)
    assert "float16" in reasons(report, "linear_cross_entropy")


@pytest.mark.parametrize("read", [False, True])
def test_logits_beside_it_are_deferred(read):
    def function(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t) + C * squares(z).mean(), z

    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend())
        for _ in range(3):  # read once, the calls that follow hand them out
            given = [x.clone().requires_grad_(), head.clone().requires_grad_()]
            plain = [n.detach().clone().requires_grad_() for n in given]
            loss, logits = compiled(*given, ignoring)
            expected, eager_logits = function(*plain, ignoring)
            torch.testing.assert_close(loss, expected)
            if read:
                torch.testing.assert_close(logits + 0, eager_logits)
            loss.backward()
            expected.backward()
            for ours, theirs in zip(given, plain, strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    report.assert_fused(linear_cross_entropy=len(report.graphs))
    assert len(report.graphs) == (2 if read else 1)


def test_rows_of_any_number():
    def function(x, w, t):
        z = F.linear(x, w)
        return F.cross_entropy(z, t) + 0.01 * (squares(z) * (t != -100)).mean()

    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for m in (5, 7, 1, M):
            rows, t = torch.randn(m, H), torch.randint(0, V, (m,))
            t[0] = -100 if m > 1 else 0
            torch.testing.assert_close(compiled(rows, head, t), function(rows, head, t))
    report.assert_fused(linear_cross_entropy=len(report.graphs))
