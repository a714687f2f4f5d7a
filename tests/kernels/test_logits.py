"""Kernels over rows of logits: targets and values at the edges, chunks, loss and gradient in one launch."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.kernels.cross_entropy import cross_entropy
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits import class_part, logit_chunks
from fx_fusion.kernels.logits.logit_chunks import chunk_plan
from fx_fusion.kernels.logits.logit_plan import logit_rows_plan
from fx_fusion.kernels.logits.logit_rows import launch_rows
from tests.helpers import pairwise

pytestmark = pytest.mark.kernel


def test_a_target_out_of_range_is_never_a_number(device):
    logits, target = torch.randn(3, 9, device=device, requires_grad=True), torch.tensor([1, 9, 2], device=device)
    loss = cross_entropy(logits, target, None, -100, 0.0, 0.0, 1.0)
    assert loss.isnan().tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.isnan().all(1).tolist() == [False, True, False], "no step is made with it"
    assert gradient.isnan().any(1).tolist() == [False, True, False]


def test_rows_of_infinities(device):
    logits = torch.randn(3, 9, device=device)
    logits[1, :] = float("-inf")
    logits[2, 4:] = float("-inf")
    target = torch.tensor([1, 0, 2], device=device)
    loss = cross_entropy(logits, target, None, -100, 0.0, 0.0, 1.0)
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v", [1, 3, 7, 9, 15, 17, 31, 4099])
def test_rows_that_start_anywhere(v, dtype, device):
    """Rows of odd length: each starts at another offset from a multiple of 16 bytes; targets at both ends of them."""
    m = 18
    logits = torch.randn(m, v, device=device).to(dtype).requires_grad_()
    target = torch.tensor([0, v - 1, v // 2] * (m // 3), device=device)
    target[4] = -100
    weight = torch.rand(v, device=device)
    dloss = torch.randn(m, device=device)
    loss = cross_entropy(logits, target, weight, -100, 0.1, 0.0, 1.0)
    (dlogits,) = torch.autograd.grad(loss, logits, dloss)
    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, target, weight.double(), label_smoothing=0.1, reduction="none")
    (gradient,) = torch.autograd.grad(expected, exact, dloss.double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dlogits.double(), gradient, rtol=eps, atol=1e-6)


def test_chunks_are_few_and_equal():
    assert chunk_plan(16384, 128256, 2, "cuda").rows == 4096, "a fourth of all rows"
    assert chunk_plan(8192, 128256, 2, "cuda").rows == 2048
    assert chunk_plan(32768, 151936, 2, "cuda").rows == 4096, "1.16 GiB"
    assert chunk_plan(16384, 32000, 2, "cuda").rows == 8192, "0.5 GiB"
    assert chunk_plan(4096, 32000, 2, "cuda").rows == 4096
    for m, v in ((16383, 128256), (12285, 128256), (8190, 151936), (8191, 262144)):
        assert -(-m // chunk_plan(m, v, 2, "cuda").rows) == 4, "more would be summed in float32"
    assert chunk_plan(20481, 151936, 2, "cuda").rows == 4352, "no chunk of one row behind five of 4096"
    assert chunk_plan(2048, 128256, 4, "cuda").rows == 2048, "products in float32 are not cut below that"
    assert chunk_plan(3, 10, 4, "cpu").rows == 3
    assert chunk_plan(0, 10, 4, "cpu").rows == 1
    for m in (1, 255, 1000, 5000, 16383):
        rows = chunk_plan(m, 151936, 2, "cuda").rows
        assert rows * 151936 * 2 <= (5 << 28) + 256 * 151936 * 2


def test_small_chunks_take_the_least_memory():
    """Of a chunk and, beyond four of them, dW in float32: rounded more often it would be less accurate."""
    sums = 4 * 128256 * 2048
    for m in (1, 700, 4096, 8192, 16384, 24576, 32768, 131072):
        few, small = (chunk_plan(m, 128256, 2, "cuda", asked, sums).rows for asked in (False, True))
        taken, less = (rows * 128256 * 2 + (sums if m > 4 * rows else 0) for rows in (few, small))
        assert less <= min(taken, (1 << 29) + sums), m
    assert chunk_plan(16384, 128256, 2, "cuda", True, sums).rows == 4096, "four"
    assert chunk_plan(32768, 128256, 2, "cuda", True, sums).rows == 2048, "0.5 GiB"
    assert chunk_plan(32768, 128256, 4, "cuda", True, 0).rows == 1024, "float32 needs no other sum"
    assert chunk_plan(0, 10, 2, "cuda", True, 0).rows == 1
    assert chunk_plan(16384, 151936, 2, "cuda", True, 4 * 151936 * 1024).rows == 4096, "16 sums of dW take 3 % of a step"
    assert chunk_plan(65536, 151936, 2, "cuda", True, 4 * 151936 * 1024).rows == 2048


@pairwise(stages=[None, 1, 3], columns=[1, 300, 4104], statics=[(0.0, 0.0, False), (0.1, 5.0, False), (0.0, 0.0, True)])
def test_loss_and_gradient_in_one_launch(columns, stages, statics, device):
    """Over the logits themselves, which are walked back in ``stages``; entropies too; a row is ignored, classes may be
    padded."""
    smoothing, softcap, padded = statics
    logits = torch.randn(5, (columns + 7) // 8 * 8 + 8 if padded else columns, device=device) * 3
    target = torch.randint(0, columns, (5,), device=device)
    target[2] = -100
    upstream, of_entropy = torch.randn(5, device=device), torch.randn(5, device=device)
    of_entropy[2] = 0  # an ignored row is not read
    exact = logits[:, :columns].double().requires_grad_()
    z = softcap * torch.tanh(exact * 0.5 / softcap) if softcap else exact * 0.5
    expected = F.cross_entropy(z, target, ignore_index=-100, reduction="none", label_smoothing=smoothing)
    log_p = z.log_softmax(-1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    ((expected * upstream).sum() + (expected_entropy * of_entropy).sum()).backward()
    loss, entropy, stats = torch.empty(5, device=device), torch.zeros(5, device=device), torch.empty(2, 5, device=device)
    plan = Plan(BLOCK=512, EACH=8, num_warps=4, programs_per_sm=2, STAGES=stages) if stages else None
    with logit_rows_plan.instead(plan) if plan else contextlib.nullcontext():
        launch_rows(
            logits, target, None, -100, smoothing, softcap, 0.5, classes=columns, loss=loss, stats=stats, dloss=upstream,
            dlogits=logits, entropy=entropy, dentropy=of_entropy,
        )  # fmt: skip
    live = target != -100
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy[live].double(), expected_entropy.detach()[live], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :columns].double(), exact.grad, rtol=1e-5, atol=1e-5)
    assert not logits[:, columns:].any()


def test_no_classes_are_an_error(device):
    """As in PyTorch, not whatever lies in the memory of the loss."""
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        cross_entropy(torch.randn(3, 0, device=device), torch.zeros(3, dtype=torch.long, device=device), None, -100, 0.0, 0.0, 1.0)
    assert cross_entropy(torch.randn(0, 0, device=device), torch.zeros(0, dtype=torch.long, device=device), None, -100, 0.0, 0.0, 1.0).shape == (0,)


@pytest.mark.parametrize(("weights", "scale", "smoothing"), [(1e5, 1.0, 0.0), (1e5, 1.0, 0.1), (1.0, 1e5, 0.0), (None, 1e5, 0.1), (1e-3, 1.0, 0.0), (1e-7, 1.0, 0.0), (1.0, 1e-7, 0.1)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_and_weights_of_classes_or_scales(weights, scale, smoothing, reduction, device):
    """Inverse frequencies as weights: the chunk of dl would overflow, or, where they add up to 1, underflow; not in eager."""
    torch.manual_seed(0)
    x, w = torch.randn(20, 16, device=device) * 1e-2, torch.randn(40, 16, device=device) * 1e-2
    t = torch.randint(0, 40, (20,), device=device)
    of_classes = None if weights is None else (torch.rand(40, device=device) + 0.5) * weights
    if reduction == "sum":
        of_classes = None if of_classes is None else of_classes / weights * 1e-4  # the sum itself has to fit
        scale = min(scale, 1.0)
    grads = []
    for dtype in (torch.float16, torch.float64):
        a, b = (p.half().to(dtype).requires_grad_() for p in (x, w))
        if dtype == torch.float16:
            loss = linear_cross_entropy(a, b, None, t, of_classes, reduction, -100, smoothing, 0.0, scale, [True, True, False], False)[0]
        else:
            logits = torch.nn.functional.linear(a, b).half().double() * scale
            loss = F.cross_entropy(logits, t, None if of_classes is None else of_classes.double(), reduction=reduction, label_smoothing=smoothing)
        grads.append(torch.autograd.grad(loss, [a, b]))
    for ours, exact in zip(*grads, strict=True):
        assert ours.isfinite().all() == exact.half().isfinite().all()
        keep = exact.half().isfinite()
        assert ((ours.double() - exact).abs()[keep] <= 4e-3 * exact.abs().max().clamp(max=65504) + 1e-7).all()


@pytest.mark.parametrize("v", [40, 37])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [True, False])
def test_logits_are_handed_out_beside_the_loss(v, reduction, trained, device, monkeypatch):
    """In chunks, with rows that need padding, and not overwritten by their gradient."""
    monkeypatch.setattr(logit_chunks, "_CHUNK_BYTES", {"cuda": (8 * v * 2,) * 2, "cpu": (8 * v * 2,) * 2})
    monkeypatch.setattr(logit_chunks, "_ROW_MULTIPLE", 8)
    torch.manual_seed(0)
    x, w = torch.randn(30, 16, device=device).bfloat16(), torch.randn(v, 16, device=device).bfloat16()
    t = torch.randint(0, v, (30,), device=device)
    t[::3] = -100
    needs = [trained, trained, False]
    loss, *_, logits = linear_cross_entropy(x, w, None, t, None, reduction, -100, 0.0, 0.0, 1.0, needs, True)
    expected = F.linear(x, w)
    assert logits.is_contiguous()
    assert not logits.requires_grad
    torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), t, reduction=reduction), rtol=1e-5, atol=1e-5)
    without = linear_cross_entropy(x, w, None, t, None, reduction, -100, 0.0, 0.0, 1.0, needs, False)
    for ours, theirs in zip((loss, *_), without[:5], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def in_parts(monkeypatch, parts, function):
    """``function(first, last)`` of every part of the columns, each of which sees what the others hand to ``gather``."""
    found = {}

    def said(tensor, ranks, group):
        found[group] = tensor.clone()
        return torch.cat([found.get(str(first), tensor) for first, _ in parts])

    monkeypatch.setattr(class_part, "gather", said)
    monkeypatch.setattr(class_part, "arrived", lambda tensor: tensor)
    for first, last in parts:
        function(first, last)
    return [function(first, last) for first, last in parts]


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("softcap", "scale", "padded"), [(0.0, 1.0, 0), (5.0, 0.5, 5)])
@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.0, True), (0.1, False), (0.3, True)])
def test_classes_on_several_ranks(kernel, softcap, scale, padded, smoothing, weighted, device, monkeypatch):
    """Each part of the columns for itself, with what the parts found handed in."""
    if not kernel:
        monkeypatch.setattr(class_part, "interpreting", lambda: False)
    if not kernel and device != "cpu":
        pytest.skip("what runs on a CPU")
    m, v = 9, 70
    logits, upstream = torch.randn(m, v, device=device) * 3, torch.randn(m, device=device)
    if not smoothing:
        logits[3, :20] = logits[0, 35:] = float("-inf")  # the last: all of the second part
    weight = torch.rand(v, device=device) * 2 if weighted else None
    target = torch.tensor([0, 69, 35, 34, -100, 12, 70, -1, 50], device=device)  # two are none of the classes
    exact = logits.double().requires_grad_()
    z = softcap * torch.tanh(exact * scale / softcap) if softcap else exact * scale
    known = (target >= 0) & (target < v)
    rows = F.cross_entropy(
        z, torch.where(known, target, -100), None if weight is None else weight.double(), reduction="none",
        label_smoothing=smoothing,
    )  # fmt: skip
    (rows * upstream * known).sum().backward()
    wrong = ~known & (target != -100)

    def computed(first, last):
        own = F.pad(logits[:, first:last], (0, padded)) if padded else logits[:, first:last].clone()
        loss = torch.empty(m, device=device)
        part = class_part.ClassPart(str(first), first, v, 2)
        part.rows(own, last - first, target, weight, (-100, smoothing, softcap, scale), loss, upstream, own)
        return first, last, own, loss

    for first, last, own, loss in in_parts(monkeypatch, [(0, 35), (35, 70)], computed):
        expected = torch.where(wrong, float("nan"), rows.detach())
        torch.testing.assert_close(loss.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)
        gradient = torch.where(wrong[:, None], float("nan"), exact.grad[:, first:last])
        torch.testing.assert_close(own[:, : last - first].double(), gradient, equal_nan=True, rtol=1e-4, atol=1e-6)
        assert not padded or not own[:, last - first :].nan_to_num().any()


def test_logits_of_a_rank_that_are_no_numbers(device, monkeypatch):
    """A part of lm_head has diverged: nobody's loss is a number. (A part that is masked has no share in it.)"""
    m, target = 3, torch.tensor([40, 50, 33], device=device)
    logits = torch.randn(m, 64, device=device)
    logits[:2, :32] = torch.tensor([[float("nan")], [float("-inf")]], device=device)

    def computed(first, last):
        loss = torch.empty(m, device=device)
        part = class_part.ClassPart(str(first), first, 64, 2)
        part.rows(logits[:, first:last].clone(), 32, target, None, (-100, 0.0, 0.0, 1.0), loss, None, None)
        return loss

    expected = F.cross_entropy(logits, target, reduction="none")
    assert expected.isnan().tolist() == [True, False, False]
    for loss in in_parts(monkeypatch, [(0, 32), (32, 64)], computed):
        torch.testing.assert_close(loss, expected, equal_nan=True)


@pytest.mark.parametrize("cap", [5.0, 30.0, 1000.0])
def test_a_softcap_far_above_the_logits(cap, device):
    """tanh of small numbers, whose error the cap multiplies."""
    logits = torch.randn(16, 512, device=device).requires_grad_()
    target = torch.randint(0, 512, (16,), device=device)
    exact = logits.detach().double().requires_grad_()
    loss = cross_entropy(logits, target, None, -100, 0.0, cap, 1.0)
    expected = F.cross_entropy(cap * torch.tanh(exact / cap), target, reduction="none")
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=3e-6)
    found, wanted = (torch.autograd.grad(y.sum(), x)[0] for y, x in ((loss, logits), (expected, exact)))
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-7)


@pytest.mark.parametrize("m", [1, 2, 9])
def test_a_chunk_of_several_ranks_goes_in_two_halves(m, device, monkeypatch):
    """The sums of the second half are sent before those of the first have arrived, and the numbers are those of one part."""
    v, events = 40, []
    monkeypatch.setattr(class_part, "gather", lambda own, ranks, group: events.append("sent") or torch.cat([own] * 2))
    monkeypatch.setattr(class_part, "arrived", lambda tensor: events.append("arrived") or tensor)
    logits, target = torch.randn(m, v, device=device), torch.randint(0, v, (m,), device=device)
    weight, upstream = torch.rand(2 * v, device=device), torch.rand(m, device=device)
    part = class_part.ClassPart("g", 0, 2 * v, 2)
    found = []
    for worth in (1, 1 << 30):
        monkeypatch.setattr(class_part, "_WORTH_HALVES", worth)
        own, loss, entropy = logits.clone(), torch.empty(m, device=device), torch.empty(m, device=device)
        given = own, v, target, weight, (-100, 0.1, 0.0, 1.0), loss, upstream, own
        part.rows(*given, entropy, upstream, upstream / 8)
        found.append((own, loss, entropy))
    for halves, whole in zip(*found, strict=True):
        torch.testing.assert_close(halves, whole, rtol=0, atol=0)
    assert events == (["sent", "sent", "arrived", "arrived"] if m > 1 else ["sent", "arrived"]) + ["sent", "arrived"]


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (5.0, 0.5)])
def test_the_entropy_of_classes_on_several_ranks(kernel, softcap, scale, device, monkeypatch):
    if not kernel:
        monkeypatch.setattr(class_part, "interpreting", lambda: False)
    if not kernel and device != "cpu":
        pytest.skip("what runs on a CPU")
    m, v = 7, 70
    logits, target = torch.randn(m, v, device=device) * 3, torch.randint(0, v, (m,), device=device)
    dloss, dentropy = torch.randn(2, m, device=device)
    exact = logits.double().requires_grad_()
    z = softcap * torch.tanh(exact * scale / softcap) if softcap else exact * scale
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = F.nll_loss(log_p, target, reduction="none")
    (loss * dloss + entropy * dentropy).sum().backward()

    def computed(first, last):
        own = logits[:, first:last].clone()
        part = class_part.ClassPart(str(first), first, v, 3)
        given = own, last - first, target, None, (-100, 0.0, softcap, scale)
        our_loss, stats, our_entropy = part.forward(*given, with_entropy=True)
        dlogits = torch.empty_like(own)
        part.backward(*given, stats, dloss, dlogits, our_entropy, dentropy)
        return first, last, our_loss, our_entropy, dlogits

    for first, last, our_loss, our_entropy, dlogits in in_parts(monkeypatch, [(0, 24), (24, 48), (48, 70)], computed):
        torch.testing.assert_close(our_loss.double(), loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(our_entropy.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dlogits.double(), exact.grad[:, first:last], rtol=1e-4, atol=1e-6)
