"""RMSNorm and the residual add in front of it."""

import torch

from tests.helpers import check_rewritten, rewritten

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
    torch.testing.assert_close(result, block(x, r), rtol=2e-6, atol=2e-6)
