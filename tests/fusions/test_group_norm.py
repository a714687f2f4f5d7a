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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16])
def test_norms_that_are_kept_in_float32(dtype, parameter):
    """GroupNorm32 of guided diffusion and its descendants; its SiLU behind the cast."""
    x, (w, b, _) = images().to(dtype), parameters()
    w, b = (t.detach().to(parameter).requires_grad_() for t in (w, b))
    group_norm = lambda x, w, b: F.group_norm(x.float(), G, w.float(), b.float()).type(x.dtype)  # noqa: E731
    as_eager(group_norm, x.requires_grad_(), w, b).assert_fused(group_norm=1)
    as_eager(lambda x, w, b: F.silu(group_norm(x, w, b)), x, w, b).assert_fused(group_norm_swish=1, group_norm=0)


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
