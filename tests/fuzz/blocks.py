"""Attention over the blocks of a mask with a structure, on CPU: there FlexAttention has no backward, and its fusion is
not legal. What the fusion reads off a mask is the same everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fx_fusion.patterns import block_sparse_attention as pattern
from tests.structured_masks import by_blocks


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
