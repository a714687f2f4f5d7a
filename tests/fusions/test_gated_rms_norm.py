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
