"""GroupNorm and swish in one."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import as_eager
from tests.images import G, compare, images, parameters


@pytest.mark.parametrize("last", [False, True])
def test_group_norm_swish_in_both_layouts(last, device):
    w, b, _ = parameters(device)

    def norm(x, w, b):
        y = F.group_norm(x, G, w, b)
        return y * torch.sigmoid(y)

    compare(norm, "group_norm_swish", images(device, last=last), w, b)


NOT_SWISH = {
    "another activation": lambda x, w, b: F.gelu(F.group_norm(x, G, w, b)),
    "a scaled sigmoid": lambda x, w, b: (lambda y: y * torch.sigmoid(1.702 * y))(F.group_norm(x, G, w, b)),
    "another tensor's sigmoid": lambda x, w, b: F.group_norm(x, G, w, b) * torch.sigmoid(x),
    "the norm is used as well": lambda x, w, b: (lambda y: F.silu(y) + y)(F.group_norm(x, G, w, b)),
}


@pytest.mark.parametrize("name", NOT_SWISH)
def test_what_is_no_swish_of_a_group_norm(name):
    x, (w, b, _) = images().requires_grad_(), parameters()
    report = as_eager(NOT_SWISH[name], x, w, b)
    report.assert_fused(group_norm=1, group_norm_swish=0)
