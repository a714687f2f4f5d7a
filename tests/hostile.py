"""Share what tests of hostile graphs need."""

import torch

from tests.helpers import rewritten

V, H, S = 24, 8, 5
w8 = torch.randn(8)
head = torch.randn(V, H)
h3 = torch.randn(2, 3, H)
t3 = torch.randint(0, V, (2, 3))
x = torch.randn(4, 8)
u = torch.randn(4, 8)
q4, k4 = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)


def rms(x, statistic=None):
    statistic = x.pow(2).mean(-1, keepdim=True) if statistic is None else statistic
    return w8 * (x * torch.rsqrt(statistic + 1e-6))


def same(function, *tensors, fires=()):
    """Eager's numbers and the same writes to the arguments; exactly the fusions of ``fires`` are fused, one a name."""
    copies = [[t.clone() for t in tensors] for _ in range(2)]
    found, report = rewritten(function, *copies[0])
    expected = function(*copies[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)  # 0 * -inf is NaN in eager too
    torch.testing.assert_close(copies[0], copies[1], rtol=1e-6, atol=1e-6)  # the same writes to the arguments
    assert sorted(site.fusion for site in report.sites if site.status == "fused") == sorted(fires), str(report)
    return report
