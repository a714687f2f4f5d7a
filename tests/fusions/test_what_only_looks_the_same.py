"""Programs with two of what a pattern has one of: computed without its gradient, drawn again, or of other bytes."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import rewritten

generator = torch.Generator().manual_seed(0)
x, r, w = torch.randn(3, 8, generator=generator), torch.randn(3, 8, generator=generator), torch.rand(8, generator=generator)
rows, head = torch.randn(6, 8, generator=generator), torch.randn(32, 8, generator=generator)
y = torch.randint(0, 32, (6,), generator=generator)
q, labels = torch.randn(1, 16, 8, generator=generator), torch.randint(0, 32, (16,), generator=generator)


def normed(h, of, w):
    return w * (h * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + 1e-5))


def twins(first, second=None):
    """Return what ``first`` makes, with its gradient and without."""
    with torch.no_grad():
        without = (second or first)()
    return first(), without


def z_loss(logits, other, target):
    return F.cross_entropy(logits, target) + 0.1 * (other.logsumexp(-1) ** 2).mean()


def drawn_twice(q, head):
    """A model that runs twice, with no dropout but that of its attention (R-Drop)."""
    def run(q):
        a = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return F.linear(F.layer_norm(a + q, (8,)), head).view(-1, 32)

    return run(q), run(q)


def of_two_draws(q, head):
    first, second = drawn_twice(q, head)
    log_p = first.log_softmax(-1)
    return log_p.gather(-1, labels[:, None]), -(second.softmax(-1) * log_p).sum(-1)


def a_mean_without_a_gradient(x, w):
    h, of = twins(lambda: x * 2)
    return F.silu(w) * ((h - of.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True, correction=0) + 1e-5))


PROGRAMS = {
    "statistics": ("rms_norm", lambda x, w: normed(*twins(lambda: x * 2), w), (x, w)),
    "statistics of a slice": ("rms_norm", lambda x, w: normed(*twins(lambda: x[1:]), w), (x, w)),
    "a slice": ("rms_norm", lambda x, w: normed(*twins(lambda: x[1:])[::-1], w), (x, w)),
    "statistics behind an add": ("add_rms_norm", lambda x, r, w: normed(*twins(lambda: x + r), w), (x, r, w)),
    "mean": ("layer_norm", a_mean_without_a_gradient, (x, w)),
    "z-loss of attention drawn twice": (None, lambda q, head: z_loss(*drawn_twice(q, head), labels), (q, head)),
    "entropy of attention drawn twice": ("token_log_probs", of_two_draws, (q, head)),
    "z-loss of other logits": (None, lambda x, head: z_loss(*twins(lambda: F.linear(x, head)), y), (rows, head)),
    "z-loss of another input": (None, lambda x, head: z_loss(*(F.linear(h, head) for h in twins(lambda: x * 1.0)), y), (rows, head)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(name):
    fusion, function, inputs = PROGRAMS[name]
    found = []
    for run in (lambda *given: rewritten(function, *given), lambda *given: (function(*given), None)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        torch.manual_seed(3)
        result, report = run(*leaves)
        outs = result if isinstance(result, tuple) else (result,)
        grads = torch.autograd.grad([t.square().sum() for t in outs], leaves, allow_unused=True)
        found.append((outs, grads))
        if report is not None and fusion is not None:
            assert report.count(fusion) == 0, str(report)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_bias_in_float32_behind_a_product_in_16_bits():
    """1001 and 1003 are no bfloat16."""
    x, head = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    bias, target = torch.tensor([1000.0, 1001, 1002, 1003] * 2), torch.tensor([3, 3, 7, 7])
    function = lambda x, head, b: F.cross_entropy(F.linear(x, head).float() + b, target)  # noqa: E731
    found, report = rewritten(function, x, head, bias)
    assert (report.count("linear_cross_entropy"), report.count("cross_entropy")) == (0, 1), str(report)
    torch.testing.assert_close(found, function(x, head, bias))
    _, report = rewritten(lambda x, head, b: F.cross_entropy(F.linear(x, head).float() + b, target), x, head, bias.bfloat16())
    assert report.count("linear_cross_entropy") == 1, str(report)


BYTES = {
    "logits": lambda x, head: F.cross_entropy(x.view(torch.float16), y % 8),
    "logits of a head": lambda x, head: F.cross_entropy(F.linear(x, head).view(torch.float16).float(), y),
}


@pytest.mark.parametrize("name", BYTES)
def test_the_same_bytes_are_other_numbers(name):
    given = rows.bfloat16(), head.bfloat16()
    found, _ = rewritten(BYTES[name], *given)
    torch.testing.assert_close(found, BYTES[name](*given))


def test_a_z_loss_in_float64():
    """The kernels compute it in float32."""
    def function(x, head):
        logits = F.linear(x, head)
        return F.cross_entropy(logits, y) + 0.1 * (logits.double().logsumexp(-1) ** 2).mean()

    found, report = rewritten(function, rows.clone().requires_grad_(), head.clone().requires_grad_())
    assert "z_loss=0.1" not in report.graphs[0].after
    torch.testing.assert_close(found, function(rows, head), rtol=1e-7, atol=1e-6)
