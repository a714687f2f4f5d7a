"""Labels of documents for block_sparse_attention, and what only looks like them."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.structured_masks import TWO, S, attend, by_label, documents_by_position, positions, tensors


def test_labels_that_are_overwritten_in_between_decline(on_cpu):
    def function(query, key, value, ids):
        mask = documents_of_labels(ids)
        ids.zero_()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    inputs = {**tensors(), "ids": (torch.arange(S) // 77).expand(2, S).clone()}
    given = {n: t.clone() for n, t in inputs.items()}
    with fx_fusion.recording() as report:
        found = torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False)(**inputs)
    assert report.count("block_sparse_attention") == 0
    assert torch.equal(found, function(**given))


def documents_of_labels(ids):
    q, k = positions(ids.shape[-1])
    return ((k <= q) & (ids[:, :, None] == ids[:, None, :]))[:, None]


def lengths(*sizes):
    return torch.cat([torch.arange(n) for n in sizes])


RUNS = torch.stack([lengths(200, S - 199), lengths(300, S - 299)])  # one position more than there are queries


def over_batch(ids):
    number = (torch.diff(ids, prepend=ids[:, :1] - 1) != 1).cumsum(0)
    return ((number[:, :, None] == number[:, None, :]) & (ids[:, None, :] <= ids[:, :, None]))[:, None]


def without_prepend(ids):
    number, at = (torch.diff(ids) != 1).cumsum(-1), ids[:, :-1]
    return ((number[:, :, None] == number[:, None, :]) & (at[:, None, :] <= at[:, :, None]))[:, None]


def runs_of_others(ids):
    later, at = ids[:, 1:], ids[:, :-1]
    number = (torch.diff(later, prepend=later[:, :1] - 1) != 1).cumsum(-1)
    return ((number[:, :, None] == number[:, None, :]) & (at[:, None, :] <= at[:, :, None]))[:, None]


def runs_of_the_first_row(ids):
    number = (torch.diff(ids[:1], prepend=ids[:1, :1] - 1) != 1).cumsum(-1)
    return ((number[:, :, None] == number[:, None, :]) & (ids[:, None, :] <= ids[:, :, None]))[:, None]


TRICKY = {  # mask, ids, whether it may fire
    "first_row": (lambda ids: by_label(ids[0]), TWO, True),
    "first_row_of_two": (lambda ids: by_label(ids[:1])[:, None], TWO, True),
    "one_row": (lambda ids: by_label(ids)[:, None], TWO[:1], True),
    "three_dims": (lambda ids: by_label(ids), TWO[:1], True),
    "one_dim": (by_label, TWO[0], True),
    "one_packed_row": (documents_by_position, RUNS[:1, :S], True),
    "longer": (lambda ids: by_label(ids[:, :S])[:, None], torch.cat([TWO, TWO * 9 + 4], 1), False),
    "longer_one_dim": (lambda ids: by_label(ids[:S]), torch.cat([TWO[0], TWO[1] * 9 + 4]), False),
    "later_part": (lambda ids: by_label(ids[:, 1:])[:, None], torch.cat([TWO[:, :1] + 5, TWO], 1), False),
    "more_rows": (lambda ids: by_label(ids[:2])[:, None], torch.cat([TWO, TWO * 3]), False),
    "truncated": (lambda ids: by_label(ids.int())[:, None], TWO * 2**32, True),
    "rounded": (lambda ids: by_label(ids.float())[:, None], TWO + 2**30, False),
    "over_batch": (over_batch, RUNS[:, :S], False),
    "without_prepend": (without_prepend, RUNS, False),
    "runs_of_others": (runs_of_others, RUNS, False),
    "runs_of_the_first_row": (runs_of_the_first_row, RUNS[:, :S], False),
}


@pytest.mark.parametrize("name", TRICKY)
def test_labels_that_are_not_what_they_seem(name, on_cpu):
    mask_of, ids, may_fire = TRICKY[name]
    function, inputs = attend(mask_of), {**tensors(), "ids": ids}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False), inputs)
    assert (report.count("block_sparse_attention") == 1) == may_fire, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_no_batch(on_cpu):
    inputs = {n: t[:0] for n, t in tensors().items()}
    found = torch.compile(attend(lambda ids: by_label(ids)[:, None]), backend=rewriting_backend(), dynamic=False)(
        **inputs, ids=TWO[:0]
    )
    assert found.shape == inputs["query"].shape
