"""RMSNorm and the residual add in front of it."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from tests.helpers import check_rewritten, rewriting_backend, rewritten

N = 24
x = torch.randn(3, 5, N)
w = torch.randn(N)
EPS = 1e-6


def statistic(x):
    return x.pow(2).mean(-1, keepdim=True)


def test_add_returns_both():
    r = torch.randn_like(x)

    def block(x, r):
        h = x + r
        return w * (h * torch.rsqrt(statistic(h) + EPS)), h * 2

    check_rewritten(block, x, r, rtol=2e-6, atol=2e-6, add_rms_norm=1, rms_norm=0)


def test_add_that_broadcasts_is_not_a_residual():
    r = torch.randn(N)

    def block(x, r):
        h = x + r
        return w * (h * torch.rsqrt(statistic(h) + EPS)), h

    check_rewritten(block, x, r, rtol=2e-6, atol=2e-6, add_rms_norm=0, rms_norm=1)


def test_a_sum_used_before_the_norm_exists():
    r = torch.randn_like(x)

    def block(x, r):
        h = x + r
        early = torch.tanh(h)
        weight = early.mean((0, 1))  # the norm's weight comes after a use of the sum
        return weight * (h * torch.rsqrt(statistic(h) + EPS)), early

    result, report = rewritten(block, x, r)
    report.assert_fused(add_rms_norm=1)
    torch.testing.assert_close(result, block(x, r), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_a_sum_of_frozen_inputs_requires_no_gradient(kind):
    """Only the norm's weight is trained: what leaves beside it can be read by ``.numpy()``, as in eager."""
    weight = w.clone().requires_grad_()

    def block(x, r, weight):
        h = x + r
        return getattr(F, kind)(h, (N,), weight), h

    result, report = rewritten(block, x, torch.randn_like(x), weight)
    report.assert_fused(**{f"add_{kind}": 1})
    assert [t.requires_grad for t in result] == [True, False]
    result[1].numpy()
    (ours,) = torch.autograd.grad(result[0].square().sum(), weight)
    (theirs,) = torch.autograd.grad(getattr(F, kind)(result[1], (N,), weight).square().sum(), weight)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("first", [False, True], ids=["residual second", "residual first"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("norm", [lambda h: F.rms_norm(h, (N,), eps=EPS), lambda h: F.layer_norm(h, (N,))], ids=["rms_norm", "layer_norm"])
def test_a_residual_that_the_kernel_cannot_add(norm, dtype, first):
    r = (8 * torch.randn_like(x)).to(dtype)

    def block(x, r):
        h = r + x if first else x + r
        return norm(h), h

    with fx_fusion.recording() as report:
        found = torch.compile(block, backend=rewriting_backend())(x, r)
    assert report.count("add_rms_norm") == report.count("add_layer_norm") == 0, str(report)
    for ours, theirs in zip(found, block(x, r), strict=True):
        torch.testing.assert_close(ours, theirs)
