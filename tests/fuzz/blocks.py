"""Attention over the blocks of a mask with a structure, on CPU: there FlexAttention has no backward, and its fusion is
not legal. What the fusion reads off a mask is the same everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fusion.kernels.block_sparse_attention import BLOCK
from fx_fusion.patterns import block_sparse_attention as pattern


def by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[Tensor],
    labels: Sequence[Tensor],
    low: Any,
    high: Any,
    scale: float,
) -> Tensor:
    """As the kernels do it: only listed blocks are visited, and in whole ones the mask is not asked."""
    b, s = query.shape[0], query.shape[2]
    n = (s + BLOCK - 1) // BLOCK

    def dense(count: Tensor, columns: Tensor) -> Tensor:
        listed = torch.arange(n) < count[..., None]
        return torch.zeros(*columns.shape[:-1], n, dtype=torch.bool).scatter(-1, columns.long(), listed)

    partly, wholly = dense(*blocks[:2]), dense(*blocks[2:4])
    q, k = torch.arange(s)[:, None], torch.arange(s)[None, :]
    visible = (q - k == q - k)[None, None]
    if low is not None:
        visible = visible & (q - k >= low)
    if high is not None:
        visible = visible & (q - k <= high)
    for label in labels:
        visible = visible & (label[..., :, None] == label[..., None, :]).view(-1, 1, s, s)
    partly, wholly = (x.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :s, :s] for x in (partly, wholly))
    mask = (wholly | (partly & visible)).expand(b, -1, s, s)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


@contextlib.contextmanager
def structures_on_cpu() -> Iterator[None]:
    """The fusion of masks with a structure fires on CPU too, in any dtype."""
    guard, dtypes, op = pattern.FUSION.guard, pattern._DTYPES, pattern.block_sparse_attention

    def lenient(query: Tensor, key: Tensor, value: Tensor) -> str | None:
        why = guard(query, key, value)
        return None if why is not None and "no backward" in why else why

    pattern._DTYPES, pattern.block_sparse_attention = (torch.float32, torch.bfloat16, torch.float16), by_blocks
    object.__setattr__(pattern.FUSION, "guard", lenient)
    try:
        yield
    finally:
        pattern._DTYPES, pattern.block_sparse_attention = dtypes, op
        object.__setattr__(pattern.FUSION, "guard", guard)
