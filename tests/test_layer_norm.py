"""LayerNorm, gated norms and embeddings in graphs: the spellings of the model zoo, and what must not match."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import as_eager, rewritten, statuses

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


def test_the_add_in_front_is_part_of_it():
    x, r, norm = torch.randn(3, 5, N), torch.randn(3, 5, N), nn.LayerNorm(N)

    def block(x, r):
        h = x + r
        return norm(h), h

    (y, h), report = rewritten(block, x, r)
    assert statuses(report, "add_layer_norm") == ["fused"]
    torch.testing.assert_close(y, norm(x + r))
    torch.testing.assert_close(h, x + r)


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


@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_gradients(padding, dtype):
    table = nn.Embedding(7, 6, padding_idx=padding).to(dtype)
    ids = torch.randint(0, 7, (4, 9))
    y, report = rewritten(table, ids)
    assert statuses(report, "embedding") == ["fused"]
    torch.testing.assert_close(y, table(ids))
    dy = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(t, table.weight, dy)[0] for t in (y, table(ids)))
    torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_a_table_may_be_updated_before_the_backward():
    table = nn.Embedding(7, 6)
    y, _ = rewritten(table, torch.tensor([1, 2]))
    with torch.no_grad():
        table.weight.add_(1)
    y.sum().backward()
    assert table.weight.grad.sum() == 12


def test_deterministic_algorithms_may_be_asked_for():
    torch.use_deterministic_algorithms(True)
    try:
        table, ids = nn.Embedding(7, 6), torch.randint(0, 7, (50,))
        y, report = rewritten(table, ids)
        assert statuses(report, "embedding") == ["fused"]
        ours, theirs = (torch.autograd.grad(t.square().sum(), table.weight)[0] for t in (y, table(ids)))
        torch.testing.assert_close(ours, theirs)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_embedding(dtype):
    """Gemma multiplies by the square root of the width, rounded to the table's dtype."""
    table, ids = nn.Embedding(50, 48).to(dtype), torch.randint(0, 50, (4, 9))

    def scaled(ids):
        return table(ids) * torch.tensor(48**0.5).to(table.weight.dtype)

    y, report = rewritten(scaled, ids)
    assert statuses(report, "embedding") == ["fused"]
    assert torch.equal(y, scaled(ids))
    ours, theirs = (torch.autograd.grad(t.square().sum(), table.weight)[0] for t in (y, scaled(ids)))
    torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


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


@pytest.mark.parametrize("how", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_stay(how):
    table = nn.Embedding(7, 6, **how)
    _, report = rewritten(table, torch.tensor([1, 1, 2]))
    assert "fused" not in statuses(report, "embedding")
