"""LayerNorm and the residual add in front of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import as_eager, rewritten, statuses

N = 24


def test_the_add_in_front_is_part_of_it():
    x, r, norm = torch.randn(3, 5, N), torch.randn(3, 5, N), nn.LayerNorm(N)

    def block(x, r):
        h = x + r
        return norm(h), h

    (y, h), report = rewritten(block, x, r)
    assert statuses(report, "add_layer_norm") == ["fused"]
    torch.testing.assert_close(y, norm(x + r))
    torch.testing.assert_close(h, x + r)


NOT_ADD_LAYER_NORM = {
    "the sum is changed in between": lambda x, r, w: F.layer_norm((x + r) * 2, (8,), w) + (x + r),
    "rows are added up": lambda x, r, w: F.layer_norm(x + r[:1], (8,), w),
    "a scaled residual": lambda x, r, w: F.layer_norm(torch.add(x, r, alpha=3), (8,), w),
}


@pytest.mark.parametrize("name", NOT_ADD_LAYER_NORM)
def test_what_is_no_added_residual(name):
    function = NOT_ADD_LAYER_NORM[name]
    x, r, w = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8), torch.randn(8)
    report = as_eager(function, x, r, w)
    assert "fused" not in statuses(report, "add_layer_norm"), str(report)
