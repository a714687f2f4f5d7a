"""Test what is a LayerNorm and what only looks like one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import rewritten, statuses

N = 24


def low(x):
    return x.float()


SPELLINGS = {
    "cohere": lambda x, w, b: (w.float() * ((low(x) - low(x).mean(-1, keepdim=True)) * torch.rsqrt((low(x) - low(x).mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype),
    "deberta": lambda x, w, b: w * ((low(x) - low(x).mean(-1, keepdim=True)) / torch.sqrt((low(x) - low(x).mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) + b,
    "olmo": lambda x, w, b: F.layer_norm(x.to(torch.float32), (N,), None, None, 1e-5).to(x.dtype),
    "nemotron": lambda x, w, b: F.layer_norm(x, (N,), w + 1, b, 1e-5),
    "var": lambda x, w, b: ((low(x) - low(x).mean(dim=-1, keepdim=True)) * torch.rsqrt(low(x).var(dim=-1, keepdim=True, unbiased=False) + 1e-5)).to(x.dtype),
    "module": lambda x, w, b: torch.layer_norm(x, [N], weight=w, bias=b),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, dtype):
    torch.manual_seed(0)
    x, w, b = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((3, 5, N), (N,), (N,)))
    y, report = rewritten(SPELLINGS[name], x, w, b)
    assert statuses(report, "layer_norm") == ["fused"], str(report)
    expected = SPELLINGS[name](x, w, b)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(y, expected, **tolerance)
    dy = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(t, (x, w, b), dy, allow_unused=True) for t in (y, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_gradients_of_weight_and_bias_are_summed_in_float32(weight):
    """Many rows of 16 bits, in whose dtype PyTorch would sum them on a CPU."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 4096, 64).bfloat16()
    w, b = torch.randn(2, 64).to(weight)
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    expected = torch.autograd.grad(F.layer_norm(exact[0], (64,), *exact[1:]), exact, dy.double())
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    function = lambda x, w, b: F.layer_norm(x.float(), (64,), w.float(), b.float()).to(x.dtype)  # noqa: E731
    y, report = rewritten(function, *leaves)
    assert statuses(report, "layer_norm") == ["fused"], str(report)
    for found, right in zip(torch.autograd.grad(y, leaves, dy), expected, strict=True):
        assert (found - right).abs().max() < 4e-3 * right.abs().max()


NOT_LAYER_NORM = {
    "unbiased": lambda x, w, b: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5),
    "eps outside": lambda x, w, b: (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True).sqrt() + 1e-5),
    "another mean": lambda x, w, b: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "over two dims": lambda x, w, b: F.layer_norm(x, (5, N)),
    "over the first dim": lambda x, w, b: (x - x.mean(0, keepdim=True)) * torch.rsqrt(x.var(0, unbiased=False, keepdim=True) + 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_LAYER_NORM)
def test_what_is_no_layer_norm(name):
    x, w, b = torch.randn(3, 5, N), torch.randn(N), torch.randn(N)
    y, report = rewritten(NOT_LAYER_NORM[name], x, w, b)
    assert "fused" not in statuses(report, "layer_norm"), str(report)
    torch.testing.assert_close(y, NOT_LAYER_NORM[name](x, w, b))


@pytest.mark.parametrize("layout", ["transposed", "channels last"])
def test_other_layouts(layout):
    if layout == "transposed":
        x = torch.randn(3, N, 5).transpose(1, 2)
    else:
        x = torch.randn(2, N, 3, 4).permute(0, 2, 3, 1)
    norm = nn.LayerNorm(N)
    y, report = rewritten(norm, x)
    assert statuses(report, "layer_norm") == ["fused"], str(report)
    torch.testing.assert_close(y, norm(x))
    assert y.stride() == norm(x).stride()
