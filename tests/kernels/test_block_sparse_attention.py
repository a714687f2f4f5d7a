"""Blocks that are visited, and FlexAttention over them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from fx_fusion.kernels.block_sparse_attention import BLOCK, block_sparse_attention, visible_blocks
from fx_fusion.kernels.lib.block_lists import block_lists
from tests.structured_masks import IDS, MASKS, S, tensors, window


@pytest.mark.parametrize("name", MASKS)
def test_the_blocks_that_are_visited_cover_the_mask(name):
    """Against brute force: nothing visible is left out, and what is said to be visible entirely is."""
    mask_of, _ = MASKS[name]
    found = {}

    def spy(query, labels, low, high):
        found["blocks"] = visible_blocks(query, query, labels, (), (), low, high)
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


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 16, 16), (3, 1, 5, 33), (1, 1, 300, 7), (2, 1, 0, 4)], ids=str)
def test_lists_of_blocks(shape, device):
    """Each row's set blocks in order, then the others; of rows of queries and of rows of keys."""
    torch.manual_seed(0)
    partial, full = (torch.rand(shape, device=device) < p for p in (0.3, 0.5))
    expected = []
    for flags in (partial, full, partial.mT, full.mT):
        columns = torch.argsort(flags.int(), dim=-1, descending=True, stable=True)
        expected += [flags.sum(-1), columns]
    for ours, theirs in zip(block_lists(partial, full), expected, strict=True):
        assert ours.dtype == torch.int32
        assert ours.is_contiguous()
        assert torch.equal(ours.long(), theirs)


@pytest.fixture
def strides_of():
    """An op that gives the strides that its argument has in memory, whatever Inductor chose."""
    library = torch.library.Library("tests_of_layouts", "FRAGMENT")
    library.define("strides(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
    library.impl("strides", lambda x: torch.tensor(x.stride()), "CPU")
    torch.library.register_fake("tests_of_layouts::strides", lambda x: torch.empty(x.dim(), dtype=torch.long), lib=library)
    yield torch.ops.tests_of_layouts.strides
    library._destroy()


def test_blocks_lie_as_the_kernels_read_them(strides_of):
    """FlexAttention's kernels step to the next row of a batch by the stride of the dim of heads, of size 1. Where nothing is
    saved for a backward Inductor chose another one, and they read behind the end: an evaluation of padded batches."""

    def function(query, mask):
        return [strides_of(t) for t in visible_blocks(query, query, (), (mask != 0,), (), 0, None)]

    query, mask = torch.zeros(4, 8, 2048, 16), torch.ones(4, 2048, dtype=torch.long)
    with torch.no_grad():
        for found in torch.compile(function)(query, mask):
            n = 16
            assert found.tolist() in ([n, n, 1], [n * n, n * n, n, 1])


SEQUENCE = torch.zeros(1, 1, 4096, 16)


def test_a_narrow_window_visits_few_blocks():
    partly, _, wholly, *_ = visible_blocks(SEQUENCE, SEQUENCE, (), (), (), 0, 255)
    assert int(partly.sum() + wholly.sum()) <= 3 * 4096 // BLOCK
    document = torch.arange(4096) // 512
    partly, _, wholly, *_ = visible_blocks(SEQUENCE, SEQUENCE, (document,), (), (), 0, None)
    assert int(partly.sum() + wholly.sum()) == 8 * (4 * 5 // 2)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_function_itself_against_float64(grouped):
    inputs = tensors(h=4, g=2 if grouped else 4)
    exact = {n: t.double() for n, t in inputs.items()}
    blocks = visible_blocks(inputs["query"], inputs["key"], (), (), (), 0, 36)
    found = block_sparse_attention(*inputs.values(), blocks, (), (), (), 0, 36, 0.25)
    expected = F.scaled_dot_product_attention(
        *exact.values(), attn_mask=window(S, 37), scale=0.25, enable_gqa=grouped
    )  # fmt: skip
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("low", [None, 0], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("lengths", [(600, 600), (300, 520), (520, 300)], ids=str)
def test_padding_of_keys_and_queries_against_brute_force(lengths, low):
    """Right and left padding, holes, a row of padding alone: of each block, whether something, and whether all is visible."""
    s, t = lengths
    torch.manual_seed(0)
    keys, queries = torch.rand(5, t) < 0.9, torch.rand(5, s) < 0.9
    keys[0], keys[1], keys[2], keys[3] = torch.arange(t) < 131, torch.arange(t) >= t - 140, False, True
    queries[:3], queries[3] = True, torch.arange(s) < 200
    mask = keys[:, None, :] & queries[:, :, None]
    if low is not None:
        mask = mask & (torch.arange(s)[:, None] - torch.arange(t)[None] >= low)
    partly, which, wholly, these, *of_keys = visible_blocks(
        torch.zeros(5, 1, s, 16), torch.zeros(5, 1, t, 16), (), (keys,), (queries,), low, None
    )
    theirs = BlockMask.from_kv_blocks(partly, which, wholly, these, BLOCK, seq_lengths=(s, t))
    expected = theirs.q_num_blocks, theirs.q_indices, theirs.full_q_num_blocks, theirs.full_q_indices
    for ours, others in zip(of_keys, expected, strict=True):
        assert torch.equal(ours, others)
    for row, i, j in itertools.product(range(5), range(-(-s // BLOCK)), range(-(-t // BLOCK))):
        block = mask[row, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        full = j in these[row, 0, i, : wholly[row, 0, i]]
        partial = j in which[row, 0, i, : partly[row, 0, i]]
        assert full == (block.shape == (BLOCK, BLOCK) and bool(block.all()))
        assert full + partial == block.any() or (partial and low is not None)  # a bound only where two conditions meet
        assert not (full and partial)
