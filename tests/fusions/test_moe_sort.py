"""The order of experts: whose choices are counted and sorted by our kernel, and whose are left to torch."""

import pytest
import torch

from fx_fusion.kernels.moe_sort import moe_sort
from fx_fusion.ops.on_cpu import kernels_on_cpu
from tests.helpers import by_kernels, rewritten, statuses

T, E, K = 40, 7, 3
scores = torch.randn(T, E)


def ends(keys, experts=E, least=0, most=None):
    most = experts - 1 if most is None else most
    return torch.cumsum(torch.histc(keys.float(), bins=experts, min=least, max=most), 0, dtype=torch.int32)


def chosen(scores):
    return scores.topk(K, -1)[1].reshape(-1)


def sorted_by(ids, **options):
    keys, perm = torch.sort(ids, stable=True, **options)
    return ends(keys), perm, keys


def _in_rows(ids):
    keys, perm = torch.sort(ids, dim=-1, stable=True)
    return ends(keys), perm


def _rounded(ids):
    keys, perm = torch.sort(ids, stable=True)
    return torch.cumsum(torch.histc(keys.to(torch.bfloat16), bins=E, min=0, max=E - 1), 0, dtype=torch.int32), perm


def _changed(ids):
    keys, perm = torch.sort(ids, stable=True)
    keys[0] = E - 1
    return ends(keys), perm


def masked(ids):
    ids[::5] = E
    return ids


FIRES = {
    "of transformers": lambda s: sorted_by(chosen(s)),
    "in groups of experts": lambda s: sorted_by(torch.topk(s.softmax(-1), k=K, dim=1, sorted=False).indices.view(-1)),
    "the smallest": lambda s: sorted_by(s.topk(K, largest=False)[1].flatten()),
    "without the keys": lambda s: sorted_by(chosen(s))[:2],
}
LEFT = {
    "the counts alone": lambda s: ends(torch.sort(chosen(s), stable=True)[0]),
    "any integers": lambda s: sorted_by((s.reshape(-1) * 3).abs().long()),
    "descending": lambda s: sorted_by(chosen(s), descending=True),
    "fewer groups": lambda s: ends(torch.sort(chosen(s), stable=True)[0], E - 1),
    "other groups": lambda s: ends(torch.sort(chosen(s), stable=True)[0], E, 1, E),
    "in rows": lambda s: _in_rows(s.topk(K, -1)[1]),
    "counted in bfloat16": lambda s: _rounded(chosen(s)),
    "counted behind a write": lambda s: _changed(chosen(s)),
    "of another rank": lambda s: sorted_by(masked(chosen(s))),
    "largest in a column": lambda s: sorted_by(s.topk(K, 0)[1].reshape(-1)),
    "the sum of others": lambda s: (torch.cumsum(s[:, 0], 0), *torch.sort(chosen(s), stable=True)),
}


@pytest.mark.parametrize("spelling", FIRES)
def test_fires(spelling):
    found, report = rewritten(FIRES[spelling], scores)
    report.assert_fused(moe_sort=1)
    torch.testing.assert_close(found, FIRES[spelling](scores))


@pytest.mark.parametrize("spelling", LEFT)
def test_is_left_alone(spelling):
    found, report = rewritten(LEFT[spelling], scores)
    assert "fused" not in statuses(report, "moe_sort")
    torch.testing.assert_close(found, LEFT[spelling](scores))


@pytest.mark.parametrize(("count", "experts"), [(0, 3), (1, 1), (127, 5), (129, 1000), (64 * 128 + 1, 2), (2000, 128)])
def test_the_kernel_sorts_as_torch_does(count, experts, device):
    ids = torch.randint(0, experts, (count,))
    keys, perm, offsets = by_kernels(moe_sort, ids, experts, device=device)
    torch.testing.assert_close((keys, perm), tuple(torch.sort(ids, stable=True)))
    assert torch.equal(offsets, torch.bincount(ids, minlength=experts).cumsum(0).int())
    with kernels_on_cpu(False):
        torch.testing.assert_close(moe_sort(ids, experts), (keys, perm, offsets))


def test_all_ids_of_one_expert(device):
    _, perm, offsets = by_kernels(moe_sort, torch.full((1500,), 3), 5, device=device)
    assert torch.equal(perm, torch.arange(1500))
    assert offsets.tolist() == [0, 0, 0, 1500, 1500]
