"""Embeddings: gradients of their tables, scaled ones, and those that stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion.testing import rewriting_backend
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


TABLE_ROWS = {
    "the row is written to": lambda w, i: ((r := w[i]).mul_(2), w.sum() + r.sum())[1],
    "the table is written to": lambda w, i: ((r := w[i]), w.mul_(2), r.sum())[2],
}


@pytest.mark.parametrize("name", TABLE_ROWS)
def test_one_row_of_a_table_is_a_view(name):
    """``w[i]`` of an index without dims: what is written to one shows in the other."""
    w, i = torch.randn(10, 4), torch.tensor(3)
    expected = TABLE_ROWS[name](w.clone(), i)
    found, report = rewritten(TABLE_ROWS[name], w.clone(), i, options={"select": "always"})
    torch.testing.assert_close(found, expected)
    assert report.count("embedding") == 0


def test_one_row_of_a_trained_table_is_written_to_behind_the_graph():
    w, i = torch.randn(10, 4, requires_grad=True), torch.tensor(3)
    row, _ = rewritten(lambda w, i: w[i], w, i, options={"select": "always"})
    with torch.no_grad():
        row.zero_()
    assert not w[3].any()


def test_a_table_without_columns():
    w, ids = torch.randn(10, 0, requires_grad=True), torch.tensor([[1, 2], [3, 3]])
    found, report = rewritten(F.embedding, ids, w, options={"select": "always"})
    assert report.count("embedding") == 1
    assert found.shape == (2, 2, 0)
    assert torch.autograd.grad(found.sum(), w)[0].shape == w.shape


@pytest.mark.parametrize("spelling", [F.embedding, lambda ids, w: w[ids]], ids=["embedding", "index"])
def test_another_number_of_rows_is_the_same_graph(spelling):
    compiled = torch.compile(spelling, backend=rewriting_backend(select="always"), dynamic=True)
    with fx_fusion.recording() as report:
        for rows in (5, 7, 6, 9):
            w, ids = torch.randn(rows, 4, requires_grad=True), torch.tensor([1, 4, 1])
            gradient, expected = (torch.autograd.grad(f(ids, w).square().sum(), w)[0] for f in (compiled, spelling))
            torch.testing.assert_close(gradient, expected)
    assert len(report.graphs) == 1
    assert report.count("embedding") == 1


def test_torch_embedding_has_the_table_first():
    w = torch.randn(10, 4, requires_grad=True)
    for ids in (torch.tensor(3), torch.tensor([1, 2, 9, 9, 9, 9])):
        found, report = rewritten(lambda w, ids: torch.embedding(w, ids), w, ids, options={"select": "always"})
        torch.testing.assert_close(found, w[ids])
        assert not [site for site in report.sites if site.fusion == "embedding"]
