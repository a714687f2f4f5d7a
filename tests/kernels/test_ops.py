"""Ops of torch.library: second derivatives, gradients that nobody wants, results that are written to."""

import pytest
import torch
from torch.library import opcheck

from fx_fusion.kernels import embedding, rope
from fx_fusion.kernels.cross_entropy import cross_entropy
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.kernels.swiglu import swiglu
from fx_fusion.kernels.swish import swish

pytestmark = pytest.mark.kernel

SECOND = {
    "rms_norm": lambda x, t: rms_norm(x, x[0].detach(), 1e-6, 0.0, False),
    "cross_entropy": lambda x, t: cross_entropy(x, t, None, -100, 0.0, 0.0, 1.0),
    "head_mean": lambda x, t: linear_cross_entropy(x, x.detach()[:4], None, t, None, "mean", -100, 0.0, 0.0, 1.0, [True, False, False], False)[0],
    "head_none": lambda x, t: linear_cross_entropy(x, x.detach()[:4], None, t, None, "none", -100, 0.0, 0.0, 1.0, [True, False, False], False)[0],
    "embedding": lambda x, t: embedding.embedding(t, x, -1),
    "rope": lambda x, t: rope.rope(x.view(1, 1, 5, 24), None, x.detach().view(1, 1, 5, 24), x.detach().view(1, 1, 5, 24), "rotate_half", "input", False)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_refused_not_wrong(name, device):
    """As of a gradient penalty, alone or beside a term that has its own."""
    x, t = torch.randn(5, 24, device=device, requires_grad=True), torch.tensor([0, 1, 2, 3, 0], device=device)
    torch.autograd.grad(SECOND[name](x, t).square().sum(), x)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(SECOND[name](x, t).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("needs", [[True, True, True], [True, False, False], [False, True, False]], ids=str)
def test_gradients_that_nobody_wants_are_as_the_fake_says(needs):
    """A frozen weight: the fake promises nothing, and nothing comes."""
    x, w = torch.randn(2, 6, 5), torch.randn(6)
    backwards = torch.ops.fx_fusion.group_norm_bwd.default, torch.ops.fx_fusion.gated_rms_norm_bwd.default
    _, stats = torch.ops.fx_fusion.group_norm(x, 2, w, w, 1e-5)
    opcheck(backwards[0], (x, x, 2, w, w, stats, 1e-5, needs), test_utils="test_faketensor")
    rows = torch.randn(4, 6)
    _, rstd = torch.ops.fx_fusion.gated_rms_norm(rows, rows, w, *(static := (1e-6, True, True, True, 1, "input")))
    opcheck(backwards[1], (rows, rows, rows, w, rstd, *static, needs), test_utils="test_faketensor")


def test_results_may_be_written_to_in_place(device):
    """What an op returns is no view: ``y = op(x); y *= 2`` is common."""
    x, w = torch.randn(3, 5, 24, device=device, requires_grad=True), torch.randn(24, device=device, requires_grad=True)
    image = torch.randn(2, 8, 3, 4, device=device, requires_grad=True)
    table = torch.randn(9, 24, device=device, requires_grad=True)
    results = {
        "swiglu": swiglu(x, x), "swish": swish(x), "rms_norm": rms_norm(x, w, 1e-6, 0.0, False),
        "layer_norm": torch.ops.fx_fusion.layer_norm(x, w, w, 1e-5, False)[0],
        "gated": torch.ops.fx_fusion.gated_rms_norm(x, x, w, 1e-5, True, True, False, 1, "input")[0],
        "group_norm": torch.ops.fx_fusion.group_norm(image, 2, None, None, 1e-5)[0],
        "embedding": torch.ops.fx_fusion.embedding(torch.tensor([[1, 2], [3, 4]], device=device), table, -1),
    }  # fmt: skip
    for name, y in results.items():
        assert not y._is_view(), name
        y.mul_(2).sum().backward()
