"""Products of float8 matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    """(a * scale_a) @ (b * scale_b) + bias in bfloat16, of float8 a by rows and b by columns. ``fast``: sums are not
    promoted to float32 on the way, as libraries have it for forwards. Gone: raises, and every linear is in bfloat16."""
    return torch.ops.aten._scaled_mm.default(a, b, scale_a, scale_b, bias, None, torch.bfloat16, fast)
