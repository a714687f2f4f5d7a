"""linear_cross_entropy makes no logits for rows whose target is ignored: padding, prompts."""

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits import logit_chunks

M, H, V = 96, 16, 40


@pytest.fixture
def rows_of_chunks(monkeypatch):
    """Lets few logits count as many, in chunks of 32 rows; the rows of each call of ``each_chunk``."""
    seen, original = [], logit_chunks.each_chunk

    def spy(x, *given, **more):
        seen.append(x.shape[0])
        return original(x, *given, **more)

    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 0)
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", {"cuda": (32 * V * 4,) * 2, "cpu": (32 * V * 4,) * 2})
    monkeypatch.setattr(logit_chunks, "_ROW_MULTIPLE", 8)
    monkeypatch.setattr(logit_chunks, "each_chunk", spy)
    return seen


def masked(kind):
    target = torch.randint(0, V, (M,))
    target[{"prompts": slice(0, 60), "holes": slice(0, None, 2), "one_left": slice(1, None), "all": slice(None)}[kind]] = -100
    return target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", ["plain", "weighted_smooth_bias"])
@pytest.mark.parametrize("kind", ["prompts", "holes", "one_left", "all"])
def test_ignored_rows_need_no_logits(kind, options, reduction, rows_of_chunks, device):
    torch.manual_seed(0)
    x, w, target = torch.randn(M, H), torch.randn(V, H), masked(kind)
    with_all = options != "plain"
    bias, weight = (torch.randn(V), torch.rand(V) + 0.1) if with_all else (None, None)
    smoothing = 0.1 if with_all else 0.0
    given = [None if t is None else t.to(device).requires_grad_() for t in (x, w, bias)]
    exact = [None if t is None else t.double().to(device).requires_grad_() for t in (x, w, bias)]
    weight, target = None if weight is None else weight.to(device), target.to(device)
    needs = [True, True, with_all]
    loss = linear_cross_entropy(*given, target, weight, reduction, -100, smoothing, 0.0, 1.0, needs, False)[0]
    expected = F.cross_entropy(
        F.linear(*exact), target, None if weight is None else weight.double(), reduction=reduction, label_smoothing=smoothing
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    if kind == "all" and reduction == "mean":
        return  # the gradient of 0 / 0
    upstream = torch.randn(expected.shape, device=device, dtype=torch.float64)
    found = torch.autograd.grad(loss, [t for t in given if t is not None], upstream.float())
    wanted = torch.autograd.grad(expected, [t for t in exact if t is not None], upstream)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert set(rows_of_chunks) == {int((target != -100).sum())}


@pytest.mark.parametrize("ignored", [0, M // 16 - 1])
def test_few_ignored_rows_stay(ignored, rows_of_chunks, device):
    x, w = (torch.randn(n, H, device=device, requires_grad=True) for n in (M, V))
    target = torch.randint(0, V, (M,), device=device)
    target[:ignored] = -100
    linear_cross_entropy(x, w, None, target, None, "mean", -100, 0.0, 0.0, 1.0, [True, True, False], False)
    assert rows_of_chunks == [M]


def test_chunks_of_fewer_rows_are_of_equal_size(rows_of_chunks, monkeypatch):
    """65 of 96 rows in chunks of at most 32: three of 24, not two of 32 and one of 1."""
    chunks, original = [], logit_chunks.loss_of_rows
    monkeypatch.setattr(logit_chunks, "loss_of_rows", lambda logits, *rest: (chunks.append(logits.shape[0]), original(logits, *rest)))
    target = torch.randint(0, V, (M,))
    target[65:] = -100
    linear_cross_entropy(torch.randn(M, H), torch.randn(V, H), None, target, None, "sum", -100, 0.0, 0.0, 1.0, [False] * 3, False)
    assert chunks == [24, 24, 17]
