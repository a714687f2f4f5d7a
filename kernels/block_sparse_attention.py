"""Attention under a mask with a structure: FlexAttention over the blocks that contain a visible pair of q and k.

    mask[q, k] = low <= q − k <= high  and  label[q] == label[k] for every label
                 and  shown[k] for all of ``keys``  and  shown[q] for all of ``queries``     (``fx_fusion.graph.masks``)
    score[q, k] = query · keyᵀ · scale,  or  softcap · tanh(query · keyᵀ · scale / softcap)
    out = softmax(score, where mask) · value;  0 for a query that sees nothing, as PyTorch's attention
    score[q, k] = query · keyᵀ · scale + bias[b, h, q, k],  where there is one; its gradient is added up by atomics

A mask that adds the lowest number of its dtype to hide makes all scores of a row that sees nothing that one number: equal
probabilities for all keys. Such rows are ``hidden``: they see all keys, with

    score[q, k] = 0, and the gradient of the score that the number was added to

or none, where it was ``filled`` in: in place of the score, or of the bias, which has no gradient then.

A *sink* is one more score of each row, which is in the sum of its softmax and has no value: it makes of out

    out · exp(lse) / (exp(lse) + exp(sink))  =  out · sigmoid(lse − sink),    lse = log Σ_k exp(score), where mask

A block of 128 queries and 128 keys is *empty*, *partial* or *full* (no, some, every pair is visible). That follows from its
first and last positions, from its smallest and largest labels, and from whether any and all of its keys are shown: some
(s/128)² comparisons for any sequence, and no mask of s² elements. A block that may be partial is visited and its elements
are tested one by one, so the bound need not be tight.

Shapes     query: (b, h, s, d); key, value: (b, g, t, d), g divides h; labels: (s) or (b, s) of integers, where t = s;
           keys, of booleans: (t) or (b, t); queries, hidden: (s) or (b, s); sink: (b or 1, h or 1, s or 1, 1); bias: (s, t),
           (h, s, t) or (b, h, s, t), in fp32. out: as query.
Dtypes     bf16 | fp16 (fp32 where it is run eagerly).
Source     Dong et al. 2024, arXiv:2412.05496, behind torch.nn.attention.flex_attention; sinks: Xiao et al. 2023,
           arXiv:2309.17453, learned ones as in gpt-oss; softcap: Gemma 2, arXiv:2408.00118.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fx_fusion.kernels.lib.block_lists import block_lists
from fx_fusion.ops.library import plain_function
from fx_fusion.torch_internals.flex_attention import flex_attention, value_at

BLOCK = 128

_FORWARD = "fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_warps", "fwd_num_stages"
_BACKWARD = "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_warps", "bwd_num_stages"
# By head dim, for compute capability 9: the fastest of 7 to 11 in each direction (bench/attention_tiles.py) on an H200, in
# bf16, over padding, causal padding and windows. Inductor's own choice takes 5 to 11 times as long forward at 64 (it
# spills), 1.4 at 32 and 256, and 1.46 backward at 256. At 128 its backward is the best.
_TILES: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    16: ((64, 64, 4, 3), (32, 64, 64, 32, 4, 3)),
    32: ((64, 64, 4, 3), (32, 64, 64, 32, 4, 3)),
    64: ((64, 64, 4, 3), (64, 64, 64, 64, 4, 3)),
    128: ((64, 64, 4, 3), ()),
    256: ((128, 64, 8, 2), (64, 64, 64, 64, 8, 2)),
}


@plain_function
def visible_blocks(
    query: Tensor, key: Tensor, labels: Sequence[Tensor], keys: Sequence[Tensor], queries: Sequence[Tensor],
    low: int | None, high: int | None, hidden: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns, for each block of queries, the number of partial blocks of keys and their columns, and both of the full ones;
    then these four for each block of keys. Each is (b or 1, 1, n[, n]), int32, as in ``BlockMask``."""
    s, t, device = query.shape[-2], key.shape[-2], query.device
    first, first_key = (torch.arange(_blocks(n), device=device) * BLOCK for n in (s, t))
    last, last_key = first + (BLOCK - 1), first_key + (BLOCK - 1)
    least_distance, most_distance = first[:, None] - last_key[None, :], last[:, None] - first_key[None, :]  # q - k
    full = ((last < s)[:, None] & (last_key < t)[None, :])[None, None]
    visible = torch.ones_like(full)
    if low is not None:
        visible, full = visible & (most_distance >= low), full & (least_distance >= low)
    if high is not None:
        visible, full = visible & (least_distance <= high), full & (most_distance <= high)
    for label in labels:
        least, most = (extreme(_in_blocks(label), -1) for extreme in (torch.amin, torch.amax))
        visible = visible & (least[..., :, None] <= most[..., None, :]) & (least[..., None, :] <= most[..., :, None])
        uniform = least == most
        full = full & (uniform[..., :, None] & uniform[..., None, :]) & (least[..., :, None] == least[..., None, :])
    for shown in keys:
        blocks = _in_blocks(shown)
        visible, full = visible & blocks.any(-1)[..., None, :], full & blocks.all(-1)[..., None, :]
    for shown in queries:
        blocks = _in_blocks(shown)
        visible, full = visible & blocks.any(-1)[..., :, None], full & blocks.all(-1)[..., :, None]
    if hidden is not None:
        visible = visible | _in_blocks(hidden).any(-1)[..., :, None]
    return tuple(block_lists(visible & ~full, visible & full))


@plain_function
def hidden_rows(
    query: Tensor, key: Tensor, keys: Sequence[Tensor], queries: Sequence[Tensor], low: int | None, high: int | None
) -> Tensor:  # fmt: skip
    """Returns which queries see nothing, where no label is in the mask: (s) or (b, s), bool."""
    s, t = query.shape[-2], key.shape[-2]
    seen = functools.reduce(torch.logical_and, keys, torch.ones(t, dtype=torch.bool, device=query.device))
    before = F.pad(seen.cumsum(-1, dtype=torch.int32), (1, 0))  # how many keys before each are shown
    q = torch.arange(s, device=query.device)
    first = torch.zeros_like(q) if high is None else (q - high).clamp(0, t)
    behind = torch.full_like(q, t) if low is None else (q - low + 1).clamp(0, t)
    hidden = before[..., behind] <= before[..., first]
    return functools.reduce(lambda hidden, shown: hidden | ~shown, queries, hidden)


def _blocks(positions: int) -> int:
    return (positions + BLOCK - 1) // BLOCK


def _in_blocks(values: Tensor) -> Tensor:
    """Returns what stands at each position, (s) or (b, s), as (b or 1, 1, n, BLOCK); the last position stands for those
    behind it."""
    s = values.shape[-1]
    n = _blocks(s)
    positions = torch.arange(n * BLOCK, device=values.device).clamp(max=s - 1)
    return values.reshape(-1, 1, s)[:, :, positions].reshape(-1, 1, n, BLOCK)


@plain_function
def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tensor], labels: Sequence[Tensor], keys: Sequence[Tensor],
    queries: Sequence[Tensor], low: int | None, high: int | None, scale: float, softcap: float | None = None,
    sink: Tensor | None = None, hidden: Tensor | None = None, filled: bool = False,
) -> Tensor:  # fmt: skip
    """Returns softmax(score, where visible) · value, from the ``blocks`` of ``visible_blocks``, with the sink if there is
    one."""
    given = query, key, value, blocks, labels, keys, queries, low, high, scale, softcap
    out, lse = _attend(*given, with_lse=sink is not None, hidden=hidden, filled=filled)
    return out if sink is None else (out * torch.sigmoid(lse[..., None] - sink)).to(out.dtype)


@plain_function
def block_sparse_attention_and_lse(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tensor], labels: Sequence[Tensor], keys: Sequence[Tensor],
    queries: Sequence[Tensor], low: int | None, high: int | None, scale: float, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns what ``block_sparse_attention`` returns, without a sink, and lse: (b, h, s), float32."""
    return _attend(query, key, value, blocks, labels, keys, queries, low, high, scale, softcap, with_lse=True)


@plain_function
def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tensor], labels: Sequence[Tensor], keys: Sequence[Tensor],
    queries: Sequence[Tensor], low: int | None, high: int | None, scale: float, bias: Tensor,
    hidden: Tensor | None = None, filled: bool = False,
) -> Tensor:  # fmt: skip
    """Returns softmax(score + bias, where visible) · value."""
    given = query, key, value, blocks, labels, keys, queries, low, high, scale, None
    return _attend(*given, with_lse=False, biases=(bias,), hidden=hidden, filled=filled)[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tensor], labels: Sequence[Tensor], keys: Sequence[Tensor],
    queries: Sequence[Tensor], low: int | None, high: int | None, scale: float, softcap: float | None, *, with_lse: bool,
    biases: Sequence[Tensor] = (), hidden: Tensor | None = None, filled: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = () if hidden is None else (hidden,)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *data: Tensor) -> Tensor:
        conditions = [] if low is None else [q - k >= low]
        conditions += [] if high is None else [q - k <= high]
        for i, values in enumerate(data[len(rows) :]):
            if i < len(labels):
                conditions.append(_at(values, b, q) == _at(values, b, k))
            else:
                conditions.append(_at(values, b, k if i < len(labels) + len(keys) else q))
        seen = functools.reduce(torch.logical_and, conditions) if conditions else q >= 0
        return functools.reduce(torch.logical_or, (_at(values, b, q) for values in data[: len(rows)]), seen)

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *operands: Tensor) -> Tensor:
        without_bias = score
        for bias in operands[len(rows) :]:
            score = score + value_at(bias, (b, h, q, k)[-bias.dim() :])
        if softcap is not None:
            score = softcap * (2 * torch.sigmoid(score * (2 / softcap)) - 1)  # tanh: half the instructions, registers too
        for values in operands[: len(rows)]:
            added_to = without_bias if filled else score
            zero = torch.zeros_like(score) if filled and not biases else added_to - added_to.detach()
            score = torch.where(_at(values, b, q), zero, score)
        return score

    mask = BlockMask((query.shape[-2], key.shape[-2]), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)
    operands = (*rows, *labels, *keys, *queries)
    given = query, key, value, score, mask.as_tuple(), scale, operands, tiles_for(query)
    return flex_attention(*given, score_operands=(*rows, *biases), with_lse=with_lse)


def tiles_for(query: Tensor) -> dict[str, int]:
    """Returns how FlexAttention's kernels are tiled for this head dim on this device; empty: as Inductor has it."""
    if query.device.type != "cuda" or not torch.cuda.is_available():
        return {}
    if torch.version.hip or torch.cuda.get_device_capability(query.device)[0] != 9:
        return {}
    forward, backward = _TILES.get(int(query.shape[-1]), ((), ()))
    return dict([*zip(_FORWARD, forward, strict=False), *zip(_BACKWARD, backward, strict=False)])


def _at(values: Tensor, b: Tensor, position: Tensor) -> Any:
    return torch.ops.aten.index(values, [position] if values.dim() == 1 else [b, position])
