"""lm_head and a loss against distributions, in chunks: against float64, with classes beside them, rows that do not count,
rows that lie apart, infinities."""

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.kernels.linear_soft_cross_entropy import linear_soft_cross_entropy
from fx_fusion.kernels.logits import logit_chunks

pytestmark = pytest.mark.kernel
M, H, V = 13, 16, 131


def values_of(kind, device, shape=(M, V)):
    logits = torch.randn(shape, device=device) * 2
    return {"logits": logits, "log_probabilities": logits.log_softmax(-1), "probabilities": logits.softmax(-1)}[kind]


def exact_loss(logits, values, weights, kind, divergence, values_scale, scale, target, hard_weights, hard_scale):
    values = values.reshape(-1, values.shape[-1]).double()
    log_q = (values * values_scale).log_softmax(-1) if kind == "logits" else values
    q = values if kind == "probabilities" else log_q.exp()
    soft = -(q * (logits * scale).log_softmax(-1)).sum(-1)
    if divergence:
        soft = soft + (torch.xlogy(q, q) if kind == "probabilities" else torch.where(q == 0, 0, q * log_q)).sum(-1)
    loss = (weights.double() * soft).sum()
    if target is None:
        return loss
    hard = F.cross_entropy(logits * hard_scale, target.clamp(0, V - 1), reduction="none")
    return loss + (hard_weights.double() * hard).sum()


def check(values, kind, divergence, weights, device, *, values_scale=0.5, scale=0.7, hard=None, bias=True, dtype=torch.float32):
    x, w = torch.randn(M, H, device=device) / 2, torch.randn(V, H, device=device) / 2
    b = torch.randn(V, device=device) if bias else None
    given = [None if t is None else t.to(dtype).requires_grad_() for t in (x, w, b)]
    exact = [None if t is None else t.detach().double().requires_grad_() for t in given]
    target, hard_weights, hard_scale = hard or (None, None, 1.0)
    needs = [True, True, bias]
    soft, of_classes = linear_soft_cross_entropy(
        *given, values, weights, kind, divergence, values_scale, scale, needs, False, target, hard_weights, hard_scale
    )[:2]
    loss = (soft * weights).sum()
    if hard is not None:
        loss = loss + (of_classes * hard_weights).sum()
    expected = exact_loss(
        F.linear(*exact), values, weights, kind, divergence, values_scale, scale, target, hard_weights, hard_scale
    )
    eps = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=eps, atol=2 * eps)
    found = torch.autograd.grad(loss * 0.3, [t for t in given if t is not None])
    wanted = torch.autograd.grad(expected * 0.3, [t for t in exact if t is not None])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=eps, atol=eps * float(theirs.abs().max()))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", {"cuda": (4 * V * 4,) * 2, "cpu": (4 * V * 4,) * 2})
    monkeypatch.setattr(logit_chunks, "_ROW_MULTIPLE", 4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("divergence", [False, True])
@pytest.mark.parametrize("kind", ["probabilities", "log_probabilities", "logits"])
def test_against_float64(kind, divergence, bias, device):
    check(values_of(kind, device), kind, divergence, torch.rand(M, device=device) - 0.3, device, bias=bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_in_16_bits(dtype, device):
    for kind in ("probabilities", "log_probabilities", "logits"):
        check(values_of(kind, device).to(dtype), kind, True, torch.rand(M, device=device), device)


def test_any_coefficients(device):
    """A sum other than 1, and signs: what is linear in the log-probabilities."""
    check(torch.randn(M, V, device=device), "probabilities", False, torch.rand(M, device=device), device)


@pytest.mark.parametrize("kind", ["probabilities", "logits"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 1.0), (0.5, 2.0)])
def test_classes_beside_them(kind, scales, device):
    soft, hard = torch.rand(M, device=device), torch.rand(M, device=device)
    soft[3], hard[4], soft[5], hard[5] = 0, 0, 0, 0
    target = torch.randint(0, V, (M,), device=device)
    target[[4, 5]] = -100
    check(values_of(kind, device), kind, True, soft, device, scale=scales[0], hard=(target, hard, scales[1]))


def test_a_class_out_of_range(device):
    if device == "cpu":
        pytest.skip("an index error, as in PyTorch")
    target, ones = torch.randint(0, V, (M,), device=device), torch.ones(M, device=device)
    target[2] = V
    x, w = (torch.randn(n, H, device=device, requires_grad=True) for n in (M, V))
    values = values_of("logits", device)
    needs = [True, True, False]
    soft, hard = linear_soft_cross_entropy(x, w, None, values, ones, "logits", True, 1.0, 1.0, needs, False, target, ones)[:2]
    assert hard.isnan().tolist() == [i == 2 for i in range(M)]
    assert soft.isfinite().all()
    assert torch.autograd.grad(hard.sum() + soft.sum(), x)[0].isnan().all(1).tolist() == [i == 2 for i in range(M)]


def test_rows_that_lie_apart(device):
    """The rows of a teacher, shifted by one: a slice of each sequence, read where it lies."""
    whole = values_of("logits", device, (1, M + 2, V + 5))[:, 1 : M + 1, 2 : V + 2]
    check(whole, "logits", True, torch.rand(M, device=device), device)
    every_second = values_of("log_probabilities", device, (2 * M, V))[::2]
    check(every_second, "log_probabilities", False, torch.rand(M, device=device), device)
    column = values_of("probabilities", device, (V, M)).t()
    check(column, "probabilities", False, torch.rand(M, device=device), device)


def test_rows_of_weight_zero_need_no_logits(monkeypatch, device):
    seen, original = [], logit_chunks.each_chunk
    import fx_fusion.kernels.linear_soft_cross_entropy as module

    monkeypatch.setattr(logit_chunks, "_WORTH_COUNTING", 0)
    monkeypatch.setattr(module, "each_chunk", lambda x, *a, **k: (seen.append(x.shape[0]), original(x, *a, **k))[1])
    weights = torch.rand(M, device=device) * (torch.arange(M, device=device) % 3 == 0)
    check(values_of("logits", device), "logits", True, weights, device)
    check(values_of("logits", device), "logits", True, torch.zeros(M, device=device), device)
    assert seen == [5, 0]


def test_classes_that_the_teacher_masks(device):
    """Logits of -inf have the probability 0 and no part in the divergence."""
    values = values_of("logits", device)
    values[:, ::5] = float("-inf")
    check(values, "logits", True, torch.ones(M, device=device), device)
    check(values.softmax(-1), "probabilities", True, torch.ones(M, device=device), device)


def test_a_sharp_teacher(device):
    """Numbers that overflow without a maximum, and a divergence that is small beside its parts."""
    check(values_of("logits", device) * 200, "logits", True, torch.ones(M, device=device), device)


def test_bfloat16(device):
    check(values_of("logits", device).bfloat16(), "logits", True, torch.rand(M, device=device), device, dtype=torch.bfloat16, bias=False)
