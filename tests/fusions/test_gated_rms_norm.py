"""RMSNorm of a gated value, by groups."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import rewritten, statuses

N = 24


def grouped(x, gate, w, shape):
    h = x.float() * F.silu(gate.float())
    h = h.view(shape)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.view(x.shape).to(x.dtype)


@pytest.mark.parametrize(
    ("shape", "fires"), [((2, 5, 3, 8), True), ((2, 5, 1, 24), True), ((2, 5, 24, 1), True), ((2, 15, 1, 8), False)]
)
def test_groups_of_a_gated_norm_are_read_from_the_views(shape, fires):
    x, gate, w = torch.randn(2, 5, N), torch.randn(2, 5, N), torch.randn(N)
    y, report = rewritten(lambda x, g, w: grouped(x, g, w, shape), x, gate, w)
    assert (statuses(report, "gated_rms_norm") == ["fused"]) == fires, str(report)
    torch.testing.assert_close(y, grouped(x, gate, w, shape))


@pytest.mark.kernel
def test_a_gate_in_16_bits_beside_a_value_in_float32():
    """The gradient of the value is float32, and its sigmoid has to be, too."""
    torch.manual_seed(0)
    x, gate, w, dy = torch.randn(500, 64), torch.randn(500, 64).bfloat16(), torch.randn(64), torch.randn(500, 64)
    gradients = []
    for dtype, function in ((torch.float64, exactly), (torch.float32, exactly), (torch.float32, None)):
        leaf = x.to(dtype).requires_grad_()
        if function is None:
            y, report = rewritten(lambda x, gate, w: grouped(x, gate, w, (500, 1, 64)), leaf, gate, w)
        else:
            y = function(leaf, gate.to(dtype), w.to(dtype))
        gradients.append(torch.autograd.grad(y, leaf, dy.to(dtype))[0])
    assert statuses(report, "gated_rms_norm") == ["fused"], str(report)
    exact, eager, ours = gradients
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()


def exactly(x, gate, w):
    """``grouped`` in the dtype of x, one group."""
    h = x * F.silu(gate)
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
