"""Blocks that are visited, and FlexAttention over them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from fx_fusion.kernels.block_sparse_attention import BLOCK, block_sparse_attention, visible_blocks
from tests.structured_masks import IDS, MASKS, S, tensors, window


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
