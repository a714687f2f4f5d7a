"""Masks with a structure: what is read off them, which blocks are visited, and what FlexAttention makes of it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.kernels.block_sparse_attention import BLOCK, block_sparse_attention, visible_blocks
from fx_fusion.patterns import block_sparse_attention as pattern
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import reasons

S = 600  # not a multiple of a block


def positions(n):
    return torch.arange(n)[:, None], torch.arange(n)[None, :]


def window(n, size):
    q, k = positions(n)
    return (k <= q) & (k > q - size)


def both_sides(n, size):
    q, k = positions(n)
    return (q - k).abs() <= size


def chunks(n, size):
    q, k = positions(n)
    return (k <= q) & (q // size == k // size)


def documents(ids):
    q, k = positions(ids.shape[-1])
    starts = torch.diff(ids, prepend=ids[:, :1] - 1) != 1
    document = starts.cumsum(-1)
    return ((k <= q) & (document[:, :, None] == document[:, None, :]))[:, None]


def documents_by_position(ids):
    """As transformers spells it: causal by the positions themselves."""
    document = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & (ids[:, None, None, :] <= ids[:, None, :, None]) & (ids[:, None, None, :] > ids[:, None, :, None] - 64)


IDS = torch.stack([torch.cat([torch.arange(n) for n in sizes]) for sizes in ((200, 400), (7, 293, 1, 299))])
MASKS = {
    "window": (lambda x: window(S, 37), "causal window of 37"),
    "wide_window": (lambda x: window(S, 290), "causal window of 290"),
    "additive_window": (lambda x: torch.zeros(S, S).masked_fill(~window(S, 37), float("-inf")), "causal window of 37"),
    "both_sides": (lambda x: both_sides(S, 16), "window -16 <= q - k <= 16"),
    "chunks": (lambda x: chunks(S, 130), "chunks of 130, causal"),
    "documents": (documents, "documents of"),
    "documents_by_position": (documents_by_position, "causal window of 64"),
    "expanded": (lambda x: window(S, 37)[None, None].expand(2, 1, S, S), "causal window of 37"),
}


def attend(mask_of):
    def function(query, key, value, ids):
        mask = mask_of(ids)
        if mask.is_floating_point():
            mask = mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return function


def by_blocks(query, key, value, blocks, labels, low, high, scale):
    """As the GPU's kernels do it, which eager FlexAttention does not: only listed blocks are visited, in whole ones the mask
    is not asked, and both lists, of a query's and of a key's blocks, have to say the same."""
    b, s = query.shape[0], query.shape[2]
    n = -(-s // BLOCK)

    def dense(count, columns):
        assert count.shape[0] in (1, b)
        row = torch.zeros(*columns.shape[:-1], n, dtype=torch.bool)
        listed = torch.arange(n) < count[..., None]
        row.scatter_(-1, columns.long(), listed)
        return row

    partly, wholly, partly_k, wholly_k = (dense(*blocks[i : i + 2]) for i in (0, 2, 4, 6))
    if not isinstance(query, FakeTensor):
        assert torch.equal(partly, partly_k.mT)
        assert torch.equal(wholly, wholly_k.mT)
    visible = torch.ones(1, 1, s, s, dtype=torch.bool)
    q, k = positions(s)
    if low is not None:
        visible = visible & (q - k >= low)
    if high is not None:
        visible = visible & (q - k <= high)
    for label in labels:
        assert label.dim() == 1 or label.shape[0] == b
        visible = visible & (label[..., :, None] == label[..., None, :]).view(-1, 1, s, s)
    partly, wholly = (x.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :s, :s] for x in (partly, wholly))
    mask = (wholly | (partly & visible)).expand(b, -1, s, s)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


@pytest.fixture
def on_cpu(monkeypatch):
    """Without Inductor FlexAttention differentiates on CPU too."""
    guard = pattern.FUSION.guard

    def lenient(query, key, value):
        why = guard(query, key, value)
        return None if why is not None and "no backward" in why else why

    monkeypatch.setattr(pattern, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(pattern, "block_sparse_attention", by_blocks)
    object.__setattr__(pattern.FUSION, "guard", lenient)
    yield
    object.__setattr__(pattern.FUSION, "guard", guard)


def tensors(h=4, g=4, s=S, d=16):
    return {n: torch.randn(2, heads, s, d) for n, heads in (("query", h), ("key", g), ("value", g))}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_with_a_structure_fires_and_is_as_accurate(name, on_cpu):
    mask_of, _ = MASKS[name]
    function, inputs = attend(mask_of), {**tensors(), "ids": IDS}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 1, str(report)
    worst, used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)
    assert used <= 1, f"{worst} uses {used:.2f} times the allowed error"


@pytest.mark.parametrize("name", MASKS)
def test_without_a_gpu_it_is_declined_with_the_structure_known(name):
    mask_of, structure = MASKS[name]
    inputs = {**tensors(), "ids": IDS}
    with fx_fusion.recording() as report:
        run(torch.compile(attend(mask_of), backend=rewriting_backend(speculate=False), dynamic=False), inputs)
    assert report.count("block_sparse_attention", "declined") == 1, str(report)
    assert "no backward on cpu" in reasons(report, "block_sparse_attention")


@pytest.mark.parametrize("name", MASKS)
def test_the_blocks_that_are_visited_cover_the_mask(name):
    """Against brute force: nothing visible is left out, and what is said to be visible entirely is."""
    mask_of, _ = MASKS[name]
    found = {}

    def spy(query, labels, low, high):
        found["blocks"] = visible_blocks(query, labels, low, high)
        return found["blocks"]

    document = (torch.diff(IDS, prepend=IDS[:, :1] - 1) != 1).cumsum(-1)
    structure = {
        "window": ((), 0, 36), "wide_window": ((), 0, 289), "additive_window": ((), 0, 36), "both_sides": ((), -16, 16),
        "chunks": ((torch.arange(S) // 130,), 0, None), "documents": ((document,), 0, None),
        "documents_by_position": ((document,), 0, 63), "expanded": ((), 0, 36),
    }[name]  # fmt: skip
    spy(torch.zeros(2, 1, S, 16), *structure)
    partly, which, wholly, these = found["blocks"][:4]
    theirs = BlockMask.from_kv_blocks(*found["blocks"][:4], BLOCK)
    for ours, expected in zip(
        found["blocks"][4:],
        (theirs.q_num_blocks, theirs.q_indices, theirs.full_q_num_blocks, theirs.full_q_indices),
        strict=True,
    ):
        assert torch.equal(ours, expected)
        assert ours.stride() == expected.stride()
    assert all(t.is_contiguous() for t in found["blocks"])
    mask = mask_of(IDS)
    mask = (mask if mask.dtype == torch.bool else mask == 0).expand(2, 1, S, S)[:, 0]
    n = -(-S // BLOCK)
    for row, i in itertools.product(range(2), range(n)):
        at = min(row, partly.shape[0] - 1)
        partial = set(which[at, 0, i, : partly[at, 0, i]].tolist())
        full = set(these[at, 0, i, : wholly[at, 0, i]].tolist())
        assert not partial & full
        for j in range(n):
            block = mask[row, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            if block.any():
                assert j in partial | full
            if j in full:
                assert block.all()
                assert block.shape == (BLOCK, BLOCK)


def test_a_narrow_window_visits_few_blocks():
    partly, _, wholly, *_ = visible_blocks(torch.zeros(1, 1, 4096, 16), (), 0, 255)
    assert int(partly.sum() + wholly.sum()) <= 3 * 4096 // BLOCK
    document = torch.arange(4096) // 512
    partly, _, wholly, *_ = visible_blocks(torch.zeros(1, 1, 4096, 16), (document,), 0, None)
    assert int(partly.sum() + wholly.sum()) == 8 * (4 * 5 // 2)


def test_repeated_heads_are_not_copied(on_cpu):
    def function(query, key, value):
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=window(S, 37))

    inputs = tensors(h=4, g=2)
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 1
    assert "repeat_interleave" not in report.graphs[0].after
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_layers_share_the_blocks(on_cpu):
    def function(query, key, value):
        mask = window(S, 37)
        for _ in range(3):
            query = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return query

    inputs = tensors()
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    after = report.graphs[0].after
    assert report.count("block_sparse_attention") == 3
    assert after.count("visible_blocks(") == 1
    assert "arange" not in after
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_a_result_that_lies_otherwise_is_laid_out_anew(on_cpu, monkeypatch):
    def by_blocks_positions_first(*given):
        return by_blocks(*given).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(pattern, "block_sparse_attention", by_blocks_positions_first)
    function, inputs = attend(MASKS["window"][0]), {**tensors(), "ids": IDS}
    expected = function(**inputs).contiguous()
    with fx_fusion.recording() as report:
        found = torch.compile(lambda **given: function(**given).contiguous(), backend=rewriting_backend())(**inputs)
    assert report.count("block_sparse_attention") == 1, str(report)
    torch.testing.assert_close(found, expected)


def test_a_window_from_outside_of_checkpointed_bodies(on_cpu):
    def layer(query, key, value, mask):
        return F.scaled_dot_product_attention(query.sin(), key, value, attn_mask=mask)

    def function(query, key, value):
        mask = window(S, 37)[None, None]
        for _ in range(2):
            query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
        return query

    inputs = tensors()
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 2, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


@pytest.mark.parametrize("nested", [False, True], ids=["once", "nested"])
def test_documents_from_outside_of_checkpointed_bodies(on_cpu, nested):
    """The number of a document is an operand more of the body; one by that name inside is another."""

    def layer(query, key, value, mask, ids):
        document = (ids % 3 == 1).cumsum(-1)
        own = (document[:, None, :, None] == document[:, None, None, :]) & mask
        query = F.scaled_dot_product_attention(query.sin(), key, value, attn_mask=mask)
        return F.scaled_dot_product_attention(query.sin(), key, value, attn_mask=own)

    def twice(query, *more):
        query = checkpoint(layer, query, *more, use_reentrant=False)
        return checkpoint(layer, query, *more, use_reentrant=False)

    def function(query, key, value, ids):
        mask = documents(ids)
        if nested:
            return checkpoint(twice, query, key, value, mask, ids, use_reentrant=False)
        return twice(query, key, value, mask, ids)

    inputs = {**tensors(), "ids": IDS}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 4, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_what_comes_in_through_a_body_between_is_known_there(on_cpu):
    """A loss in the middle body, whose finders look at every node of it."""

    def layer(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def middle(query, key, value, mask, head, target):
        query = checkpoint(layer, query, key, value, mask, use_reentrant=False)
        log_p = torch.log_softmax(F.linear(query, head), -1)
        return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def function(query, key, value, ids, head, target):
        return checkpoint(middle, query, key, value, documents(ids), head, target, use_reentrant=False)

    inputs = {**tensors(), "ids": IDS, "head": torch.randn(50, 16), "target": torch.randint(0, 50, (2, 4, S))}
    with fx_fusion.recording() as report:
        found = torch.compile(function, backend=rewriting_backend(), dynamic=False)(**inputs)
    assert report.count("block_sparse_attention") == report.count("linear_cross_entropy") == 1, str(report)
    torch.testing.assert_close(found, function(**inputs), rtol=1e-4, atol=1e-4)


def test_any_length_with_symbolic_sizes(on_cpu):
    def function(query, key, value):
        query, key, value = (t.view(2, 4, -1, 16) for t in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=window(query.shape[2], 37))

    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for s in (S, 130, 517):
            inputs = tensors(s=s)
            fused = run(compiled, inputs)
            assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1
    assert len(report.graphs) == 1
    assert report.count("block_sparse_attention") == 1


def hidden_row(query, key, value):
    q, k = positions(S)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(k < q) & (k > q - 9))


def two_documents_kinds(query, key, value):
    q, k = positions(S)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(k <= q) & (q // 16 == k // 32))


def with_dropout(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=window(S, 9), dropout_p=0.1)


def other_lengths(query, key, value):
    q, k = torch.arange(S)[:, None], torch.arange(S - 1)[None]
    return F.scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:], attn_mask=(k <= q) & (k > q - 9))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (hidden_row, "visible where"),  # the first query sees nothing
        (two_documents_kinds, "visible where"),
        (with_dropout, "no dropout"),
        (other_lengths, "as many keys as queries"),
    ],
)
def test_what_must_not_fire(function, reason, on_cpu):
    inputs = tensors()
    torch.manual_seed(3)
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(), dynamic=False), inputs)
    assert report.count("block_sparse_attention") == 0
    assert reason in reasons(report, "block_sparse_attention") + reasons(report, "causal_mask")
    torch.manual_seed(3)
    assert torch.equal(fused.values["out0"], run(function, inputs).values["out0"])


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


@pytest.mark.parametrize("grouped", [False, True])
def test_the_function_itself_against_float64(grouped):
    inputs = tensors(h=4, g=2 if grouped else 4)
    exact = {n: t.double() for n, t in inputs.items()}
    blocks = visible_blocks(inputs["query"], (), 0, 36)
    found = block_sparse_attention(*inputs.values(), blocks, (), 0, 36, 0.25)
    expected = F.scaled_dot_product_attention(
        *exact.values(), attn_mask=window(S, 37), scale=0.25, enable_gqa=grouped
    )  # fmt: skip
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def by_label(label):
    q, k = positions(label.shape[-1])
    return (k <= q) & (label[..., :, None] == label[..., None, :])


def lengths(*sizes):
    return torch.cat([torch.arange(n) for n in sizes])


TWO = torch.stack([torch.arange(S) // 77, torch.arange(S) // 41])
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


TRICKY = {  # mask, ids, whether it may fire
    "first_row": (lambda ids: by_label(ids[0]), TWO, True),
    "first_row_of_two": (lambda ids: by_label(ids[:1])[:, None], TWO, True),
    "one_row": (lambda ids: by_label(ids)[:, None], TWO[:1], True),
    "three_dims": (lambda ids: by_label(ids), TWO[:1], True),
    "one_dim": (by_label, TWO[0], True),
    "longer": (lambda ids: by_label(ids[:, :S])[:, None], torch.cat([TWO, TWO * 9 + 4], 1), False),
    "longer_one_dim": (lambda ids: by_label(ids[:S]), torch.cat([TWO[0], TWO[1] * 9 + 4]), False),
    "later_part": (lambda ids: by_label(ids[:, 1:])[:, None], torch.cat([TWO[:, :1] + 5, TWO], 1), False),
    "more_rows": (lambda ids: by_label(ids[:2])[:, None], torch.cat([TWO, TWO * 3]), False),
    "truncated": (lambda ids: by_label(ids.int())[:, None], TWO * 2**32, True),
    "rounded": (lambda ids: by_label(ids.float())[:, None], TWO + 2**30, False),
    "over_batch": (over_batch, RUNS[:, :S], False),
    "without_prepend": (without_prepend, RUNS, False),
    "runs_of_others": (runs_of_others, RUNS, False),
}


@pytest.mark.parametrize("name", TRICKY)
def test_labels_that_are_not_what_they_seem(name, on_cpu):
    mask_of, ids, may_fire = TRICKY[name]
    function, inputs = attend(mask_of), {**tensors(), "ids": ids}
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(speculate=False), dynamic=False), inputs)
    assert (report.count("block_sparse_attention") == 1) == may_fire, str(report)
    assert worst_excess(fused, run(function, inputs), run_oracle(function, inputs), torch.float32)[1] <= 1


def test_a_scale_that_becomes_a_symbol(on_cpu):
    def function(query, key, value, scale):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=window(S, 9), scale=scale)

    inputs = tensors()
    compiled = torch.compile(function, backend=rewriting_backend())
    for scale in (0.3, 0.4):
        torch.testing.assert_close(compiled(**inputs, scale=scale), function(**inputs, scale=scale), rtol=1e-5, atol=1e-5)


def test_no_batch(on_cpu):
    inputs = {n: t[:0] for n, t in tensors().items()}
    found = torch.compile(attend(lambda ids: by_label(ids)[:, None]), backend=rewriting_backend(), dynamic=False)(
        **inputs, ids=TWO[:0]
    )
    assert found.shape == inputs["query"].shape
