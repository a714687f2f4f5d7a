"""Attention under a mask with a structure: FlexAttention over the blocks that the mask shows.

The mask is ``low <= q - k <= high and label[q] == label[k]`` (``fx_fusion.graph.masks``). Which blocks of 128 queries
and 128 keys show nothing, something or everything follows from the first and last position of a block and from the
smallest and largest label in it: (s/128)² comparisons, however long the sequence, and no mask of s² elements. A block
that may show something is visited and its elements are tested one by one, so the bound need not be tight.

Shapes     query: (b, h, s, d); key, value: (b, g, s, d), g divides h; labels: (s) or (b, s) of integers. Out: as query.
Dtypes     bf16 | fp16 (fp32 where it is run eagerly).
Source     Dong et al. 2024, arXiv:2412.05496, behind torch.nn.attention.flex_attention. Its public function compiles
           itself where nothing is being compiled; this calls the operator below it, which AOTAutograd and Inductor know.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_operator
from torch.nn.attention.flex_attention import BlockMask

from fx_fusion.ops.fused_op import plain_function

BLOCK = 128
# What the operator's lowering expects to be told. Every query sees itself, but not in every block that is visited.
_OPTIONS = {
    "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
    "OUTPUT_MAX": False,
}  # fmt: skip


@plain_function
def visible_blocks(query: Tensor, labels: Sequence[Tensor], low: int | None, high: int | None) -> tuple[Tensor, ...]:
    """For each block of queries: how many blocks of keys are partly visible, and which; then the same for the blocks that
    are visible entirely; then all four for each block of keys. Each (b or 1, 1, n[, n]), int32, as in ``BlockMask``."""
    s, device = query.shape[-2], query.device
    n = (s + BLOCK - 1) // BLOCK
    first = torch.arange(n, device=device) * BLOCK
    last = first + (BLOCK - 1)
    nearest, farthest = first[:, None] - last[None, :], last[:, None] - first[None, :]  # of q - k in a pair of blocks
    some = torch.ones(1, 1, n, n, dtype=torch.bool, device=device)
    whole = last < s
    every = (whole[:, None] & whole[None, :])[None, None]
    if low is not None:
        some, every = some & (farthest >= low), every & (nearest >= low)
    if high is not None:
        some, every = some & (nearest <= high), every & (farthest <= high)
    inside = torch.arange(n * BLOCK, device=device).clamp(max=s - 1)
    for label in labels:
        blocks = label.reshape(-1, 1, s)[:, :, inside].reshape(-1, 1, n, BLOCK)
        least, most = blocks.amin(-1), blocks.amax(-1)
        some = some & (least[..., :, None] <= most[..., None, :]) & (least[..., None, :] <= most[..., :, None])
        one = least == most
        every = every & (one[..., :, None] & one[..., None, :]) & (least[..., :, None] == least[..., None, :])
    lists = some & ~every, some & every
    return tuple(t for blocks in (*lists, *(x.transpose(-1, -2) for x in lists)) for t in _listed(blocks))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of a row are set, and their columns, in front. Both are made with all their dims: the kernels step
    from one batch to the next by the stride of the dim of heads, which a view of size 1 need not have."""
    blocks = blocks.to(torch.int32, memory_format=torch.contiguous_format)
    columns = torch.argsort(blocks, dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), columns.to(torch.int32)


@plain_function
def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tensor], labels: Sequence[Tensor],
    low: int | None, high: int | None, scale: float,
) -> Tensor:  # fmt: skip
    """softmax(query · keyᵀ · scale, where visible) · value over ``visible_blocks``."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *labels: Tensor) -> Tensor:
        conditions = [] if low is None else [q - k >= low]
        conditions += [] if high is None else [q - k <= high]
        for label in labels:
            row = [] if label.dim() == 1 else [b]
            conditions.append(_at(label, [*row, q]) == _at(label, [*row, k]))
        return functools.reduce(torch.logical_and, conditions)

    mask = BlockMask((query.shape[-2], key.shape[-2]), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)
    options = {**_OPTIONS, "OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}
    out = flex_attention_operator(query, key, value, _score, mask.as_tuple(), scale, options, (), tuple(labels))
    return out[0]


def _score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score


def _at(label: Tensor, index: list[Tensor]) -> Any:
    return torch.ops.aten.index(label, index)
