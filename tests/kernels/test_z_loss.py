"""The z-loss beside lm_head and cross-entropy: the square of each row's logsumexp, against float64."""

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits import class_part, logit_chunks
from fx_fusion.kernels.logits.logit_rows import launch_rows
from tests.helpers import pairwise

pytestmark = pytest.mark.kernel
M, H, V, FACTOR = 11, 16, 37, 0.3


def exact_loss(logits, target, ignored, reduction, smoothing, softcap, scale, over, weight=None):
    z = logits * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    losses = F.cross_entropy(
        z, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing
    )  # fmt: skip
    squares = FACTOR * z.logsumexp(-1).square()
    counts = target != ignored
    squares = squares if over == "all" else squares * counts
    if reduction == "mean":
        squares = squares.sum() / (counts.sum() if over == "count" else len(target))
    return losses + (squares.sum() if reduction == "sum" else squares)


def operands(device, dtype=torch.float32):
    torch.manual_seed(0)
    x, w = torch.randn(M, H, device=device) / 4, torch.randn(V, H, device=device)
    target = torch.randint(0, V, (M,), device=device)
    return x.to(dtype), w.to(dtype), torch.randn(V, device=device).to(dtype), target


@pairwise(
    over=["count", "masked", "all"], reduction=["mean", "sum", "none"], ignored=[-100, 3],
    statics=[(0.0, 0.0, 1.0, False), (0.1, 5.0, 0.5, True)],
)  # fmt: skip
def test_against_float64(device, monkeypatch, reduction, over, statics, ignored):
    """In chunks, with rows that are ignored, by an index that is no class and by one that is."""
    smoothing, softcap, scale, weighted = statics
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", {"cuda": (4 * V * 4,) * 2, "cpu": (4 * V * 4,) * 2})
    x, w, b, target = operands(device)
    target[[2, 5, 6]] = ignored
    weight = torch.rand(V, device=device) + 0.5 if weighted else None
    given = [t.requires_grad_() for t in (x, w, b)]
    exact = [t.detach().double().requires_grad_() for t in given]
    out = linear_cross_entropy(
        *given, target, weight, reduction, ignored, smoothing, softcap, scale, [True] * 3, False, z_loss=FACTOR, z_over=over
    )[0]  # fmt: skip
    of_classes = None if weight is None else weight.double()
    logits = F.linear(*exact)
    expected = exact_loss(logits, target, ignored, reduction, smoothing, softcap, scale, over, of_classes)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(out.shape, device=device)
    grads = torch.autograd.grad(out, given, upstream)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("over", ["count", "masked"])
def test_rows_that_count_alone_are_computed(device, monkeypatch, over):
    """Most rows are prompts: they are left out with their z-loss."""
    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 1)
    x, w, b, target = operands(device)
    target[1:9] = -100
    x.data[1:9] = float("nan")
    given = [t.requires_grad_() for t in (x, w, b)]
    out = linear_cross_entropy(*given, target, None, "sum", -100, 0.0, 0.0, 1.0, [True] * 3, False, z_loss=FACTOR, z_over=over)[0]
    assert all(g.isfinite().all() for g in (out, *torch.autograd.grad(out, given)))


def test_no_target_counts(device):
    """The mean of no losses is NaN; the gradients of the z-loss are those of all rows."""
    x, w, b, target = operands(device)
    target.fill_(-100)
    given = [t.requires_grad_() for t in (x, w, b)]
    out = linear_cross_entropy(*given, target, None, "mean", -100, 0.0, 0.0, 1.0, [True] * 3, False, z_loss=FACTOR, z_over="all")[0]
    exact = [t.detach().double().requires_grad_() for t in given]
    squares = FACTOR * F.linear(*exact).logsumexp(-1).square().mean()
    assert out.isnan()
    for ours, theirs in zip(torch.autograd.grad(out, given), torch.autograd.grad(squares, exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


def test_a_target_out_of_range_is_never_a_number(device):
    """Nor does a row of infinities that is ignored and has no z-loss spoil anything."""
    logits = torch.randn(4, 9, device=device)
    logits[3] = float("nan")
    target = torch.tensor([1, 9, -100, -100], device=device)
    z_factor = torch.tensor([0.5, 0.5, 0.5, 0.0], device=device)
    loss, stats, dl = torch.empty(4, device=device), torch.empty(2, 4, device=device), torch.empty_like(logits)
    if not logits.is_cuda and not logit_chunks.interpreting():
        pytest.skip("the kernel alone")
    launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, loss=loss, stats=stats, dlogits=dl, z_factor=z_factor)
    lse = logits.logsumexp(-1)
    assert loss.isnan().tolist() == [False, True, False, False]
    assert dl.isnan().any(1).tolist() == [False, True, False, False]
    torch.testing.assert_close(loss[2], 0.5 * lse[2] ** 2)
    torch.testing.assert_close(dl[2], lse[2] * logits[2].softmax(-1))
    assert loss[3] == 0
    assert not dl[3].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("over", ["count", "all"])
def test_classes_on_two_ranks(device, monkeypatch, over, smoothing):
    """Both parts in one process, one after the other: what a rank gathers is what both found."""
    x, w, _, target = operands(device)
    target[[2, 5]] = -100
    logits = x @ w.t()
    z_factor = torch.full((M,), FACTOR, device=device)
    z_factor = z_factor if over == "all" else torch.where(target != -100, z_factor, 0.0)
    exact = logits.double().requires_grad_()
    expected = exact_loss(exact, target, -100, "none", smoothing, 0.0, 1.0, over)
    expected.sum().backward()
    parts = [class_part.ClassPart("g", 0, V, 2), class_part.ClassPart("g", 20, V, 2)]
    slices = [logits[:, :20].clone(), logits[:, 20:].clone()]
    found = []
    monkeypatch.setattr(class_part, "gather", lambda own, ranks, group: found.append(own) or torch.cat([own] * 2))
    monkeypatch.setattr(class_part, "arrived", lambda tensor: tensor)
    for part, own in zip(parts, slices, strict=True):
        part.forward(own, own.shape[1], target, None, (-100, smoothing, 0.0, 1.0), z_factor=z_factor)
    both = torch.cat(found)
    monkeypatch.setattr(class_part, "gather", lambda own, ranks, group: both)
    for part, own, columns in zip(parts, slices, (slice(0, 20), slice(20, V)), strict=True):
        loss, dl = torch.empty(M, device=device), torch.empty_like(own)
        part.rows(own, own.shape[1], target, None, (-100, smoothing, 0.0, 1.0), loss, None, dl, z_factor=z_factor)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dl.double(), exact.grad[:, columns], rtol=1e-5, atol=1e-5)
