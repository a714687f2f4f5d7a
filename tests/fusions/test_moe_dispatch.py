"""Rows of tokens in the order of their experts: what is read, what is something else, and the kernels beside their reference.

Whole layers of experts: ``test_moe_combine.py``."""

import pytest
import torch

from fx_fusion.kernels.moe_dispatch import moe_combine, moe_dispatch
from fx_fusion.ops.on_cpu import kernels_on_cpu
from tests.helpers import as_eager, by_kernels, rewritten, statuses

T, K, H = 11, 3, 20
x, ids = torch.randn(T, H), torch.randint(0, 5, (T * K,))

FIRES = {
    "sort": lambda x: x[torch.sort(ids)[1] // K],
    "argsort": lambda x: x[ids.argsort(stable=True) // K],
    "descending": lambda x: x[torch.sort(ids, descending=True).indices // K],
    "index_select": lambda x: x.index_select(0, torch.argsort(ids) // K),
    "rounded down": lambda x: x[torch.div(torch.argsort(ids), K, rounding_mode="floor")],
    "all columns": lambda x: x[torch.argsort(ids) // K, :],
    "one expert a token": lambda x: x.repeat(K, 1)[torch.argsort(ids)],
    "tokens read elsewhere": lambda x: x[(at := torch.argsort(ids) // K)] * at.unsqueeze(1),
}
LEFT = {
    "any integers": lambda x: x[ids],
    "other tokens": lambda x: x[torch.argsort(ids) // (K + 1)],
    "behind each other": lambda x: x[torch.argsort(ids) % T],
    "a part of them": lambda x: x[torch.argsort(ids)[:T] // K],
    "columns": lambda x: x[:, torch.argsort(ids[:H])],
    "half of the columns": lambda x: x[torch.argsort(ids) // K, : H // 2],
    "written to": lambda x: _written(x, torch.argsort(ids)),
    "another token is written": lambda x: _other_token(x, torch.argsort(ids) // K),
    "clamped through a view": lambda x: _clamped(x, torch.argsort(ids) // K),
    "sorted in rows": lambda x: x[torch.argsort(ids.view(T, K), 0).view(-1) // K],
}


def _written(x, perm):
    perm[0] = perm[1]
    return x[perm // K]


def _other_token(x, tokens):
    tokens[0] = 0
    return x[tokens]


def _clamped(x, tokens):
    tokens.view(-1).clamp_(max=4)
    return x[tokens]


def _hidden(x, hide):
    keys, perm = torch.sort(ids, stable=True)
    rows = x[perm // K]
    return rows.masked_fill(hide(keys), 0.0)


def _written_mask(keys):
    mask = keys >= 3
    mask[0] = True
    return mask.unsqueeze(-1)


HIDDEN = {
    "the last ones": (lambda keys: (keys >= 3).unsqueeze(-1), True),
    "all": (lambda keys: (keys >= 0).unsqueeze(-1), True),
    "a written mask": (_written_mask, False),
    "the first ones": (lambda keys: (keys < 3).unsqueeze(-1), False),
    "the other ones": (lambda keys: (keys >= 3).logical_not_().unsqueeze(-1), False),
    "negative keys": (lambda keys: (keys - 4 >= 3).unsqueeze(-1), False),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_rows_that_are_hidden(name):
    """In the gather where they are the last ones, whatever the keys are; else behind it."""
    hide, inside = HIDDEN[name]
    given = x.clone().requires_grad_()
    report = as_eager(lambda x: _hidden(x, hide), given)
    report.assert_fused(moe_dispatch=1)
    assert ("here=count_of_rows" in report.graphs[0].after) is inside


@pytest.mark.parametrize("spelling", FIRES)
def test_fires(spelling):
    report = as_eager(FIRES[spelling], x.clone().requires_grad_())
    report.assert_fused(moe_dispatch=1)


@pytest.mark.parametrize("spelling", LEFT)
def test_is_left_alone(spelling):
    y, report = rewritten(LEFT[spelling], x)
    assert "fused" not in statuses(report, "moe_dispatch")
    torch.testing.assert_close(y, LEFT[spelling](x))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows_here", [None, 0, 17, T * K])
def test_kernels_compute_what_their_references_do(rows_here, index, device):
    """With the rows of other ranks, whose memory nobody wrote: NaN."""
    perm = torch.randperm(T * K)
    inverse = torch.argsort(perm)
    here = None if rows_here is None else torch.tensor([rows_here], dtype=torch.int32)
    given = perm.to(index), inverse.to(index), here, K
    rows = torch.randn(T * K, H)
    if rows_here is not None:
        rows[rows_here:] = float("nan")
    strided = x.t().contiguous().t()
    for function, first, more in (moe_dispatch, x, ()), (moe_dispatch, strided, ()), (moe_combine, rows, (torch.float32,)):
        ours = by_kernels(function, first, *given, *more, device=device)
        with kernels_on_cpu(False):
            torch.testing.assert_close(ours, function(first, *given, *more))
        assert not ours.isnan().any()
