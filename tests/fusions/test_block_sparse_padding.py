"""block_sparse_attention under padding: masks that hide keys, read when the model runs."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import reasons
from tests.structured_masks import S, attend, positions, tensors

RIGHT = (torch.arange(S) < torch.tensor([[S], [317]])).long()
LEFT = RIGHT.flip(-1)
HOLES = (torch.arange(S) % 7 != 3).expand(2, S).long()
ALONE = (torch.arange(S) < torch.tensor([[S], [0]])).long()  # a row of padding alone
PADDINGS = {"right": RIGHT, "left": LEFT, "holes": HOLES, "alone": ALONE}


def causal(mask):
    q, k = positions(S)
    return (k <= q) & mask[:, None, None, :].bool()


def windowed(mask):
    q, k = positions(S)
    return (k <= q) & (k > q - 37) & (mask[:, None, None, :] != 0)


def indexed(mask):
    """As transformers spells it."""
    batch, q, k = torch.arange(2)[:, None, None, None], torch.arange(S)[:, None], torch.arange(S)[None, :]
    return ((k <= q) & mask.to(torch.bool)[batch, k]).expand(2, -1, S, S)


def of_both(mask):
    shown = mask.bool()
    return (shown[:, None, :] & shown[:, :, None])[:, None]


def packed(number):
    """Documents are numbered from 1, 0 is padding."""
    q, k = positions(S)
    return ((k <= q) & (number[:, :, None] == number[:, None, :]) & (number[:, None, :] > 0))[:, None]


def one_row_for_all(mask):
    return mask[1].bool()[None, None, None, :]


MASKS = {
    "causal": (causal, "causal, keys shown by mask"),
    "keys": (lambda mask: mask[:, None, None, :].bool(), "keys shown by mask"),
    "expanded": (lambda mask: mask.bool()[:, None, None, :].expand(2, 1, S, S), "keys shown by mask"),
    "equal_to_zero_hides": (lambda mask: ~(mask == 0)[:, None, None, :], "keys shown by mask"),
    "windowed": (windowed, "causal window of 37, keys shown by mask"),
    "indexed": (indexed, "causal, keys shown by"),
    "of_both": (of_both, "queries shown by"),
    "packed": (packed, "keys shown by"),
    "one_row_for_all": (one_row_for_all, "keys shown by"),
    "ids": (lambda mask: (mask != 0)[:, None, None, :], "keys shown by"),
}


def compared(function, inputs, speculate=False):
    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend(speculate=speculate), dynamic=False)
        fused = run(compiled, inputs)
    worst, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)
    assert used <= 1, f"{worst} uses {used:.2f} times the allowed error"
    return report


def compared_under_padding(function):
    """Compare values and gradients with float64 under every padding, and check that one graph serves all of them."""
    compiled = torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False)
    with fx_fusion.recording() as report:
        for name, padding in PADDINGS.items():
            inputs = {**tensors(), "ids": padding}
            fused = run(compiled, inputs)
            worst, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)
            assert used <= 1, f"{name}: {worst} uses {used:.2f} times the allowed error"
    assert len(report.graphs) == 1, str(report)
    return report


@pytest.mark.parametrize("name", MASKS)
def test_padding_is_read_when_the_model_runs(name, on_cpu):
    mask_of, structure = MASKS[name]
    report = compared_under_padding(attend(mask_of))
    assert report.count("block_sparse_attention") == 1, str(report)
    assert structure.replace("mask", "ids") in str(report.graphs[0]) + str(report), str(report)


def test_boolean_masks_and_masks_made_of_tokens(on_cpu):
    for padding in (RIGHT.bool(), RIGHT.int(), RIGHT * 17 + 3):
        function = attend(lambda ids: (ids != 3)[:, None, None, :] if ids.dtype != torch.bool else ids[:, None, None])
        assert compared(function, {**tensors(), "ids": padding}).count("block_sparse_attention") == 1


def test_cross_attention_over_padded_keys(on_cpu):
    inputs = {**tensors(s=130, t=S), "ids": RIGHT}
    report = compared(attend(lambda ids: ids.bool()[:, None, None, :]), inputs)
    assert report.count("block_sparse_attention") == 1, str(report)


def test_new_lengths_need_no_new_graph(on_cpu):
    compiled = torch.compile(attend(causal), backend=rewriting_backend(speculate=False), dynamic=False)
    with fx_fusion.recording() as report:
        for length in (S, 17, 333, 599, 1):
            inputs = {**tensors(), "ids": (torch.arange(S) < torch.tensor([[length], [S]])).long()}
            fused = run(compiled, inputs)
            assert worst_excess(fused, run(attend(causal), inputs), run_oracle(attend(causal), inputs), torch.float32)[1] <= 1
    assert len(report.graphs) == 1


def test_layers_share_the_blocks_and_no_mask_is_built(on_cpu):
    def function(query, key, value, ids):
        mask = indexed(ids)
        for _ in range(3):
            query = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return query

    report = compared(function, {**tensors(), "ids": RIGHT})
    after = report.graphs[0].after
    assert report.count("block_sparse_attention") == 3
    assert after.count("visible_blocks(") == 1
    assert "arange" not in after
    assert "expand" not in after


def test_a_full_and_a_padded_batch_run_two_compiled_graphs(on_cpu):
    """All ones: no mask. Else: the padding as data. The calls are counted, and nothing runs in eager."""
    function, ones = attend(causal), torch.ones(2, S, dtype=torch.long)
    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend(), dynamic=False)
        for padding in (ones, RIGHT, ones, LEFT):
            inputs = {**tensors(), "ids": padding}
            worst = worst_excess(run(compiled, inputs), run(function, inputs), run_oracle(function, inputs), torch.float32)
            assert worst[1] <= 1
    assert report.count("causal_mask") == report.count("block_sparse_attention") == 1, str(report)
    first, second = report.graphs
    assert (second.instead_of, first.calls.assumed, first.calls.otherwise) == (first.index, 2, 2)


def test_padding_from_outside_of_checkpointed_bodies(on_cpu):
    def layer(query, key, value, mask):
        return F.scaled_dot_product_attention(query.sin(), key, value, attn_mask=mask)

    def function(query, key, value, ids):
        mask = indexed(ids)
        for _ in range(2):
            query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
        return query

    report = compared(function, {**tensors(), "ids": RIGHT})
    assert report.count("block_sparse_attention") == 2, str(report)


def additive(number):
    def mask_of(ids):
        return torch.zeros(2, 1, S, S).masked_fill(~causal(ids), number)

    return mask_of


LOWEST = torch.finfo(torch.float32).min


def fewer_keys_than_queries(query, key, value, ids):
    """The last queries see no key of their own."""
    return attend(lambda ids: torch.zeros(S, S).masked_fill(~windowed(ids)[0, 0], LOWEST)[:, :90])(
        query, key[:, :, :90], value[:, :, :90], torch.ones_like(ids)
    )


@pytest.mark.parametrize(
    "function",
    [attend(additive(LOWEST)), fewer_keys_than_queries, attend(lambda ids: torch.where(windowed(ids), 0.0, LOWEST)),
     attend(lambda ids: (1.0 - (ids[:, None, None, :] != 0).float()) * LOWEST),
     attend(lambda ids: torch.zeros(2, 1, S, S).masked_fill(~of_both(ids), LOWEST))],
    ids=["causal", "fewer_keys", "window", "keys", "of_both"],
)  # fmt: skip
def test_rows_that_the_lowest_number_hides(function, on_cpu):
    """All scores of such a row are the lowest number: equal probabilities, and a gradient of queries and keys. PyTorch's
    fused kernel on a CPU has another gradient: it takes probabilities of the logarithm of their sum, which drowns in it."""
    with sdpa_kernel(SDPBackend.MATH):
        report = compared_under_padding(function)
    assert report.count("block_sparse_attention") == 1, str(report)


def in_another_dtype(query, key, value, ids):
    """Autocast casts the mask with the query: the lowest float32 is -inf in bfloat16, and a hidden row is NaN."""
    mask = additive(LOWEST)(ids)
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).float().nan_to_num(0.5)


def rounded(query, key, value, ids):
    """The lowest float32 is no float16; and the lowest float16 does not swallow a score of 20."""
    mask = torch.zeros(2, 1, S, S, dtype=torch.float16).masked_fill(~causal(ids), torch.finfo(torch.float16).min)
    return F.scaled_dot_product_attention(query.half(), key.half(), value.half(), attn_mask=mask)


def changed_later(query, key, value, ids):
    mask = ids[:, None, None, :].bool()
    ids.fill_(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def two_in_one(ids):
    return ((ids[:, None, None, :] > 0) | (ids[:, None, :, None] > 0)).expand(2, 1, S, S)


def a_part(ids):
    return ids[:, :S].bool()[:, None, None, :]


LONGER = torch.cat([RIGHT, RIGHT], 1)


@pytest.mark.parametrize(
    ("function", "padding", "reason"),
    [
        (in_another_dtype, LEFT, "may hide a row entirely"),
        (rounded, LEFT, "may hide a row entirely"),
        (attend(additive(float("-inf"))), RIGHT, "may hide a row entirely"),
        (changed_later, RIGHT, "written"),
        (attend(two_in_one), RIGHT, "depends on the input ids"),
        (attend(a_part), LONGER, "reads a part of it"),
    ],
    ids=["autocast", "float16", "infinity", "changed_later", "either", "a_part"],
)
def test_what_must_not_fire(function, padding, reason, on_cpu):
    with fx_fusion.recording() as report:
        compiled = torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False)
        given = {**tensors(), "ids": padding.clone()}
        found = compiled(**{n: t.clone() for n, t in given.items()})
    assert report.count("block_sparse_attention") == 0, str(report)
    assert reason in reasons(report, "block_sparse_attention") + reasons(report, "causal_mask"), str(report)
    assert torch.equal(found, function(**given))
