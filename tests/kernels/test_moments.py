"""Mean and variance of values that are all equal."""

import pytest
import torch

from fx_fusion.kernels import evonorm_b0
from fx_fusion.kernels.group_norm import group_norm
from fx_fusion.kernels.layer_norm import layer_norm
from tests.kernels.evonorm_b0_ways import B0_WAYS, by

pytestmark = pytest.mark.kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "value"),
    [*((torch.float32, v) for v in (985.9, 100.1, 4148.5, 1e6 + 0.3)), (torch.float16, 1785), (torch.bfloat16, 4080)],
)
def test_equal_values_have_no_variance(dtype, value, device):
    """Their float32 sum is rounded, so is their mean: 1 / sqrt(eps) makes 0.005 of that at 100, 0.6 at 10^6; eager has 0.
    Sums of 11 bits are exact up to 2^13 values, of 8 bits up to 2^16."""
    least = 2 * torch.finfo(torch.float32).eps
    for n in (96, 781, 9409, 20001, *([65537 + 2**13] if dtype == torch.bfloat16 else [])):
        w, x = torch.ones(n, device=device, dtype=dtype), torch.full((3, n), value, device=device, dtype=dtype)
        assert layer_norm(x, w, w * 0, 1e-5, False).abs().max() <= least
    for shape in ((2, 8, 7, 7), (2, 4, 45, 45), (1, 2, 97, 97), (1, 2, 130, 131)):
        for form in (torch.contiguous_format, torch.channels_last):
            x = torch.full(shape, value, device=device, dtype=dtype).to(memory_format=form)
            assert group_norm(x, 2, None, None, 1e-5).abs().max() <= least
            p = torch.ones(shape[1], device=device, dtype=dtype)
            for way in B0_WAYS:
                with by(way):
                    _, var, deviations, _ = evonorm_b0._fwd(x, p, p, p, None, 1e-3)
                assert var.max() <= least
                torch.testing.assert_close(deviations[1], torch.full_like(deviations[1], 1e-3).sqrt())
