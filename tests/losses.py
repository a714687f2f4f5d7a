"""Share what tests of losses need: rows, heads, targets, and the comparison with eager."""

import torch

from tests.helpers import rewritten

M, H, V = 12, 16, 40
generator = torch.Generator().manual_seed(0)
x = torch.randn(M, H, generator=generator)
head = torch.randn(V, H, generator=generator)
bias = torch.randn(V, generator=generator)
target = torch.randint(0, V, (M,), generator=generator)
ignoring = target.clone().index_fill_(0, torch.arange(0, M, 3), -100)
class_weight = torch.rand(V, generator=generator) + 0.1


def compare(function, *tensors, expect=("linear_cross_entropy",), options=None):
    """Same loss and gradients as eager, and exactly these loss fusions."""
    leaves = [[t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors] for _ in range(2)]
    result, report = rewritten(function, *leaves[0], options=options)
    expected = function(*leaves[1])
    for name in ("linear_cross_entropy", "cross_entropy"):
        assert report.count(name) == expect.count(name), str(report)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    if expected.requires_grad:
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
        result.backward(upstream)
        expected.backward(upstream)
        for ours, theirs in zip(*leaves, strict=True):
            if ours.is_floating_point():
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    return report
