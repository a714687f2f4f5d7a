"""Tell which kernel answers a call of ``scaled_dot_product_attention``: torch's own selection."""

from __future__ import annotations

import torch
from torch import Tensor

_UNFUSED = 0  # SDPBackend.MATH


def takes_grouped_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Return True if a fused kernel takes fewer heads of keys and values than of queries, with this mask, on the operands'
    device, once they are cast to ``dtype``. They may be fake ones of a GPU. Gone, or no such device here: False."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return False
    try:
        query, key, value = (t.to(dtype) for t in (query, key, value))
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        return choose(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=True) != _UNFUSED
    except (RuntimeError, TypeError, ValueError, AttributeError):  # symbolic sizes, no kernels of that device
        return False
