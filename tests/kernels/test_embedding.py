"""The gradient of a table: ids in order, sums over equal ones."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.kernels import embedding
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.testing import zipf
from tests.changed_launches import changed
from tests.helpers import slow_but

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("v", [1, 2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 1, 2**31, 2**33])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "sorted"])
def test_ids_in_order(ranked, dtype, v, device):
    """In keys of 16, 32 and 64 bits, the least and the greatest id among them; equal ones as they come."""
    if v > torch.iinfo(dtype).max:
        pytest.skip("no such ids")
    some = [torch.randint(0, v, (40,)), torch.tensor([0, v - 1, v // 2, 0, v - 1])]
    ids = torch.cat([*some, *some]).to(device, dtype)
    with contextlib.nullcontext() if ranked else embedding.rank_plan.instead(None):
        found, order, lowest = embedding.sort_ids(ids, v)
    expected, positions = torch.sort(ids.long(), stable=True)
    assert torch.equal(found.long() - lowest, expected)
    assert torch.equal(order.long(), positions)
    assert lowest + v <= torch.iinfo(found.dtype).max, "one more than the greatest id is looked up too"


@pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "sorted"])
@pytest.mark.parametrize("grouped", [False, True], ids=["pieces", "groups of pieces"])
@pytest.mark.parametrize("ids", slow_but(("zipf", "half"), ("uniform", "zipf", "one", "half", "strided")))
def test_gradients_of_tables_by_how_ids_repeat(ids, grouped, ranked, device, monkeypatch):
    """Each row is the sum of its gradients, whether a few ids have most of them or all are one; the same in every run."""
    empty = torch.empty  # what is not written is not read
    monkeypatch.setattr(torch, "empty", lambda *size, **given: empty(*size, **given).fill_(-7))
    n = 700
    made = {
        "uniform": torch.randint(0, 40, (n,)), "one": torch.full((n,), 7), "zipf": zipf(n, 40, "cpu"),
        "half": torch.randint(0, 40, (n,)).where(torch.rand(n) < 0.5, 7),
        "strided": torch.randint(0, 40, (n, 2))[:, 1],
    }[ids].to(device)  # fmt: skip
    table, dy = torch.randn(40, 33, device=device, requires_grad=True), torch.randn(n, 33, device=device)
    plan = Plan(PIECE=8, ROWS=4, BLOCK=64, STAGES=1, num_warps=4, grouped=grouped)
    with embedding.segments_plan.instead(plan), contextlib.nullcontext() if ranked else embedding.rank_plan.instead(None):
        first, again = (embedding.embedding_bwd(dy, made, 40, -1) for _ in range(2))  # autograd on a GPU: another thread
    assert torch.equal(first, again)
    exact = torch.zeros(40, 33, dtype=torch.float64, device=device).index_add_(0, made, dy.double())
    eager = torch.autograd.grad(F.embedding(made, table), table, dy)[0]
    assert (first - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2 * torch.finfo(
        torch.float32
    ).eps * exact.abs().max()


@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize("grouped", [False, True], ids=["pieces", "groups of pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_added_to_another_one(dtype, grouped, padding, device):
    """Rows of ids that do not occur are left as they are, to the bit."""
    n, v, h = 300, 60, 33
    ids = zipf(n, 40, "cpu").to(device)
    other, dy = torch.randn(v, h).to(device, dtype), torch.randn(n, h).to(device, dtype)
    dy[:, 0] = 0
    found = other.clone()
    plan = Plan(PIECE=8, ROWS=4, BLOCK=64, STAGES=1, num_warps=4, grouped=grouped)
    with embedding.segments_plan.instead(plan), changed(embedding, embedding._embedding_segments_kernel, dw_ptr=found, ADD=True):
        embedding.embedding_bwd(dy, ids, v, padding)
    exact = torch.zeros(v, h, dtype=torch.float64, device=device).index_add_(0, ids[ids != padding], dy[ids != padding].double())
    untouched = torch.tensor([i == padding or i not in ids for i in range(v)])
    assert untouched.sum() >= 20
    assert torch.equal(found[untouched], other[untouched])
    torch.testing.assert_close(found.double(), other.double() + exact, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)
