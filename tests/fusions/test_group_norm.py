"""GroupNorm in graphs: layouts, ranks, and what must not match."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import as_eager, rewritten
from tests.images import G, N, W, column, compare, images, parameters


@pytest.mark.parametrize("last", [False, True])
def test_group_norm_in_both_layouts(last, device):
    w, b, _ = parameters(device)
    compare(lambda x, w, b: F.group_norm(x, G, w, b), "group_norm", images(device, last=last), w, b)


@pytest.mark.parametrize("shape", [(2, 6, 7), (2, 6, 3, 4, 5), (1, 6, 1), (2, 6, 0), (0, 6, 4, 4)])
def test_group_norm_of_other_ranks_and_of_nothing(shape):
    x = torch.randn(shape)
    if shape[-1] == 0 and torch.__version__ >= "2.14":
        with pytest.raises(RuntimeError, match="Expected HxW to be greater than 0"):
            F.group_norm(x, 3)
    elif 0 in shape:
        y, report = rewritten(lambda x: F.group_norm(x, 3), x)
        assert y.shape == x.shape
        assert report.count("group_norm") == 1
    else:
        compare(lambda x: F.group_norm(x, 3), "group_norm", x)


NOT_GROUP_NORM = {
    "statistics over rows": lambda x, w, b: F.layer_norm(x, (W,)),
    "statistics over the batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "written out, unbiased": lambda x, w, b: written_out(x, 1) * column(w) + column(b),
    "in float64": lambda x, w, b: F.group_norm(x.double(), G, w.double(), b.double()).float(),
}


def written_out(x, correction):
    rows = x.reshape(N, G, -1)
    return ((rows - rows.mean(2, keepdim=True)) / (rows.var(2, keepdim=True, correction=correction) + 1e-5).sqrt()).view_as(
        x
    )


@pytest.mark.parametrize("name", NOT_GROUP_NORM)
def test_what_is_no_group_norm(name):
    x, (w, b, _) = images().requires_grad_(), parameters()
    report = as_eager(NOT_GROUP_NORM[name], x, w, b)
    report.assert_fused(group_norm=0, group_norm_swish=0)
