"""The operator below ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What the operator's lowering expects to be told. Every query sees itself, but not in every block that is visited.
_OPTIONS = {
    "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
    "OUTPUT_MAX": False,
}  # fmt: skip


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score: Callable[..., Tensor], blocks: tuple[Any, ...], scale: float,
    mask_operands: Sequence[Tensor], tiles: Mapping[str, int], *, score_operands: Sequence[Tensor] = (),
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a block mask, by the operator that AOTAutograd and Inductor know; the public function compiles itself
    where nothing is being compiled. Gone: raises when the replacement is made, and the graph goes to Inductor unchanged.
    Returns the result, and the logarithm of the sum of exponentials of each row, (b, h, s), float32: of use ``with_lse``.

    tiles: how its kernels are tiled, by the names of ``kernel_options``; empty: Inductor decides."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    options: dict[str, Any] = {**_OPTIONS, "OUTPUT_LOGSUMEXP": with_lse or torch.is_grad_enabled(), **tiles}
    if tiles:
        options["FORCE_USE_FLEX_ATTENTION"] = True  # the other kernel, for short queries, tiles in another way
    given = tuple(score_operands), tuple(mask_operands)
    out, lse, *_ = operator(query, key, value, score, blocks, scale, options, *given)
    return out, lse * math.log(2)  # its own is to the base of 2


def value_at(values: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """``values[indices]`` inside of a score function, with a gradient that the kernels know how to add up. Gone: raises when
    the replacement is made, and the graph goes to Inductor unchanged."""
    from torch._dynamo._trace_wrapped_higher_order_op import mod_index

    return mod_index(values, list(indices))
