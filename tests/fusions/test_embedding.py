"""Embeddings: gradients of their tables, scaled ones, and those that stay."""

import pytest
import torch
from torch import nn

from tests.helpers import rewritten, statuses


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
    torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


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


@pytest.mark.parametrize("how", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_stay(how):
    table = nn.Embedding(7, 6, **how)
    _, report = rewritten(table, torch.tensor([1, 1, 2]))
    assert "fused" not in statuses(report, "embedding")
