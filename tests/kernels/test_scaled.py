"""A saved gradient times the upstream one, in place: ``fx_fusion::scaled`` and what Inductor launches for it."""

import pytest
import torch

from fx_fusion.kernels.logits.scaled import scale_kernel, scaled

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [0.0, 0.3, -7.0, float("nan")])
@pytest.mark.parametrize("n", [1, 31, 4096, 9001])
def test_a_product_in_place(dtype, factor, n, device):
    x, number = torch.randn(n, device=device).to(dtype), torch.tensor(factor, device=device)
    expected = (x.double() * number.double()).to(dtype)
    torch.testing.assert_close(scaled(x, number), expected, equal_nan=True)
    scale_kernel[(2,)](x, number, n, BLOCK=64)
    torch.testing.assert_close(x, expected, equal_nan=True)


def test_one_moves_nothing(device):
    """Not even a NaN."""
    x = torch.tensor([float("nan"), 1.0, float("inf")], device=device)
    before = x.clone()
    scale_kernel[(1,)](x, torch.tensor(1.0, device=device), 3, BLOCK=4)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
