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
@pytest.mark.parametrize(
    ("read", "out"),
    [
        (lambda y: y.to(torch.bfloat16), "bfloat16"), (lambda y: y.half() * 2, "float16"), (lambda y: y.double(), "input"),
        (lambda y: (y, y.bfloat16()), "input"), (lambda y: y.bfloat16() + y.bfloat16(), "input"),
    ],
)  # fmt: skip
def test_what_is_only_cast_to_16_bits_is_stored_in_them(read, out):
    """Rows of float32, as a scan leaves them: rounded once, to what eager's cast rounds them to."""
    x, gate, w = torch.randn(7, 64, requires_grad=True), torch.randn(7, 64).bfloat16(), torch.randn(64)
    function = lambda x, gate, w: read(grouped(x, gate, w, (7, 1, 64)))  # noqa: E731
    y, report = rewritten(function, x, gate, w)
    report.assert_fused(gated_rms_norm=1)
    assert f"out={out}" in report.diff().replace("'", "")
    expected = function(x, gate, w)
    torch.testing.assert_close(y, expected, rtol=0.01, atol=1e-5)
    last, right = ((v[-1] if isinstance(v, tuple) else v).float().sum() for v in (y, expected))
    torch.testing.assert_close(torch.autograd.grad(last, x)[0], torch.autograd.grad(right, x)[0], rtol=1e-3, atol=1e-4)


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
