"""Masks with a structure for tests, and the kernel's way to attend under them, on a CPU."""

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fx_fusion.kernels.block_sparse_attention import BLOCK
from fx_fusion.patterns import block_sparse_attention, flex_attention
from fx_fusion.patterns.sites import blocks

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


def by_blocks(
    query, key, value, blocks, labels, keys, queries, low, high, scale, softcap=None, sink=None, hidden=None, filled=False
):  # fmt: skip
    """As the GPU's kernels do it, which eager FlexAttention does not: only listed blocks are visited, in whole ones the mask
    is not asked, and both lists, of a query's and of a key's blocks, have to say the same."""
    b, s, t = query.shape[0], query.shape[2], key.shape[2]

    def dense(count, columns):
        assert count.shape[0] in (1, b)
        row = torch.zeros(*columns.shape[:-1], columns.shape[-1], dtype=torch.bool)
        listed = torch.arange(columns.shape[-1]) < count[..., None]
        row.scatter_(-1, columns.long(), listed)
        return row

    partly, wholly, partly_k, wholly_k = (dense(*blocks[i : i + 2]) for i in (0, 2, 4, 6))
    if type(query) is torch.Tensor:  # with values, not traced
        assert torch.equal(partly, partly_k.mT)
        assert torch.equal(wholly, wholly_k.mT)
    visible = torch.ones(1, 1, s, t, dtype=torch.bool)
    distance = torch.arange(s)[:, None] - torch.arange(t)[None, :]
    if low is not None:
        visible = visible & (distance >= low)
    if high is not None:
        visible = visible & (distance <= high)
    for label in labels:
        assert label.dim() == 1 or label.shape[0] == b
        visible = visible & (label[..., :, None] == label[..., None, :]).view(-1, 1, s, t)
    for shown in (*keys, *queries):
        assert shown.dtype == torch.bool
        assert shown.dim() == 1 or shown.shape[0] == b
    for shown in keys:
        visible = visible & shown.view(-1, 1, 1, t)
    for shown in queries:
        visible = visible & shown.view(-1, 1, s, 1)
    partly, wholly = (x.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :s, :t] for x in (partly, wholly))
    if hidden is not None:
        assert hidden.dtype == torch.bool
        assert hidden.dim() == 1 or hidden.shape[0] == b
        visible = visible | hidden.view(-1, 1, s, 1)
    mask = (wholly | (partly & visible)).expand(b, -1, s, t)
    if softcap is None and sink is None and hidden is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    scores, value = scores_of(query, key, value, mask, scale, softcap, hidden, filled)
    columns = [scores] if sink is None else [scores, sink.expand(*scores.shape[:-1], 1)]
    return torch.softmax(torch.cat(columns, -1), -1)[..., :t] @ value


def by_blocks_and_lse(query, key, value, blocks, labels, keys, queries, low, high, scale, softcap=None):
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])[None, :]
    assert not labels, "of windows alone"
    assert not keys
    assert not queries
    visible = torch.ones_like(distance, dtype=torch.bool) if low is None else distance >= low
    visible = visible if high is None else visible & (distance <= high)
    scores, value = scores_of(query, key, value, visible, scale, softcap)
    return torch.softmax(scores, -1) @ value, scores.logsumexp(-1)


def scores_of(query, key, value, visible, scale, softcap, hidden=None, filled=False):
    """The scores, and the values for every head of the queries."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        zero = torch.zeros_like(scores) if filled else scores - scores.detach()
        scores = torch.where(hidden.view(-1, 1, scores.shape[-2], 1), zero, scores)
    return scores.masked_fill(~visible, float("-inf")), value


@contextlib.contextmanager
def structures_on_cpu(
    dtypes=(torch.float32, torch.bfloat16, torch.float16), op=by_blocks, any_head_dim=False
) -> Iterator[None]:  # fmt: skip
    """The fusions onto FlexAttention fire on CPU too, where Inductor has no backward of it: what they read off a graph is
    the same everywhere. ``op``: what they call; ``any_head_dim``: also that of a tiny model, 8."""
    patterns = block_sparse_attention, flex_attention
    guards = [pattern.FUSION.guard for pattern in patterns]
    before = blocks.DTYPES, block_sparse_attention.block_sparse_attention
    and_lse = flex_attention.block_sparse_attention_and_lse

    lifted = ("no backward", "head dim must") if any_head_dim else ("no backward",)

    def lenient(guard, query, key, value):
        why = guard(query, key, value)
        return None if why is not None and any(reason in why for reason in lifted) else why

    blocks.DTYPES = dtypes
    if op is by_blocks:
        flex_attention.block_sparse_attention_and_lse = by_blocks_and_lse
    for pattern, guard in zip(patterns, guards, strict=True):
        pattern.block_sparse_attention = op
        object.__setattr__(pattern.FUSION, "guard", functools.partial(lenient, guard))
    try:
        yield
    finally:
        blocks.DTYPES = before[0]
        flex_attention.block_sparse_attention_and_lse = and_lse
        for pattern, guard in zip(patterns, guards, strict=True):
            pattern.block_sparse_attention = before[1]
            object.__setattr__(pattern.FUSION, "guard", guard)


def tensors(h=4, g=4, s=S, d=16, t=None):
    t = s if t is None else t
    return {n: torch.randn(2, heads, m, d) for n, heads, m in (("query", h, s), ("key", g, t), ("value", g, t))}


def by_label(label):
    q, k = positions(label.shape[-1])
    return (k <= q) & (label[..., :, None] == label[..., None, :])


TWO = torch.stack([torch.arange(S) // 77, torch.arange(S) // 41])
