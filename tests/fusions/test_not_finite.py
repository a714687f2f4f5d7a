"""NaN and infinities come in: they come out where eager has them, in results and gradients, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import rewritten

NAN, INF = float("nan"), float("inf")


def attention(q, k):
    n = q.shape[-2]
    mask = torch.arange(n)[None] <= torch.arange(n)[:, None]
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def written_out(q, k):
    return (q @ k.mT / 8**0.5).softmax(-1) @ k


# What the rewritten graph calls. torch's own kernel on CPU makes zeros of a query that is NaN, where a mask that is a tensor,
# and attention written out, keep the NaN: docs/limits.md.
BY_HAND = {
    "causal_mask": lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
    "attention": lambda q, k: F.scaled_dot_product_attention(q, k, k),
}


def rope(x, c):
    return x * c + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * c


def loss(x, w):
    return F.cross_entropy(F.linear(x, w), torch.arange(6) % w.shape[0], reduction="none")


def swiglu(x, w):
    return F.silu(x * w) * x


def geglu(x, w):
    return F.gelu(x * w) * x


def images(x, w):
    return F.silu(F.group_norm(x, 2, w, w))


rows, weight, scores = torch.randn(6, 8), torch.randn(8), torch.randn(2, 3, 5, 8)
CASES = {
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), rows, weight),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w, w), rows, weight),
    "add_rms_norm": (lambda x, w: F.rms_norm(x + x.sin(), (8,), w), rows, weight),
    "group_norm_swish": (images, torch.randn(2, 8, 3, 3), weight),
    "swiglu": (swiglu, rows, weight),
    "geglu": (geglu, rows, weight),
    "rope": (rope, scores, torch.randn(1, 1, 5, 8)),
    "causal_mask": (attention, scores, torch.randn(2, 3, 5, 8)),
    "attention": (written_out, scores, torch.randn(2, 3, 5, 8)),
    "linear_cross_entropy": (loss, rows, torch.randn(24, 8)),
    "cross_entropy": (lambda x, w: F.cross_entropy(x * w, torch.arange(6), reduction="none"), rows, weight),
    "embedding": (lambda x, w: F.embedding(torch.tensor([0, 2, 2, 5]), x) * w, rows, weight),
}


def gradients(y, leaves):
    return torch.autograd.grad(y.sum(), leaves)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name, value):
    function, x, w = CASES[name]
    for which in range(2):
        given = [x.clone(), w.clone()]
        given[which].view(-1)[1] = value
        learned = 1 if name == "rope" else 2  # its tables are constants
        ours, theirs = ([t.clone().requires_grad_(n < learned) for n, t in enumerate(given)] for _ in range(2))
        torch._dynamo.reset()
        found, report = rewritten(function, *ours)
        assert report.count(name), str(report)
        expected = BY_HAND.get(name, function)(*theirs)
        torch.testing.assert_close(found, expected, equal_nan=True)
        for a, b in zip(gradients(found, ours[:learned]), gradients(expected, theirs[:learned]), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_target_and_nothing_to_divide_by(smoothing):
    """transformers divides the sum by num_items_in_batch, which is 0 where no row has a target: the loss is NaN, the gradients
    are zeros. NaN would be the end of the weights."""

    def mean(x, w, target, count):
        return F.cross_entropy(F.linear(x, w), target, reduction="sum", label_smoothing=smoothing) / count

    target, count = torch.full((6,), -100), torch.tensor(0)
    ours, theirs = ([t.clone().requires_grad_() for t in (rows, torch.ones(24, 8))] for _ in range(2))
    found, report = rewritten(mean, *ours, target, count)
    report.assert_fused(linear_cross_entropy=1)
    expected = mean(*theirs, target, count)
    assert found.isnan()
    assert expected.isnan()
    for a, b in zip(gradients(found, ours), gradients(expected, theirs), strict=True):
        assert not b.any()
        torch.testing.assert_close(a, b)
