"""Pairs of a token and an expert in the order of their experts: a counting sort, with all that is asked of it.

    perm     sorts ids, stable: keys = ids[perm]
    offsets  where each expert's pairs end: Σ_{e' <= e} |{i: ids[i] = e'}|

Three launches: each program counts the experts of a block of ids; one program sums these counts over blocks and experts;
each program then puts the ids of its block where they belong: behind those of earlier blocks, and those before them.

Shapes     ids, keys, perm: (n); offsets: (experts).
Dtypes     ids, keys, perm: int64; offsets: int32.
Traffic    ids twice, the results once, and the counts: experts · n / 128.
Source     Cormen et al., Introduction to Algorithms, section 8.2.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op, trace_launches
from fx_fusion.ops.on_cpu import interpreting

MOST_EXPERTS = 1024
BLOCK = 128  # ids of a program
_BLOCKS = 64  # whose counts are read at once
_COMPARED = 4096  # ids with experts, at once


@triton.jit
def _moe_sort_count_kernel(
    ids_ptr, counts_ptr, n, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Store how often each expert is in a block of ids."""
    block = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for part in tl.static_range(0, BLOCK, PART):
        i = block * BLOCK + part + tl.arange(0, PART)
        ids = tl.load(ids_ptr + i, i < n, EXPERTS).to(tl.int32)
        counts += tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * EXPERTS + experts, counts)


@triton.jit
def _moe_sort_offsets_kernel(
    counts_ptr, offsets_ptr, blocks, experts, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Replace the counts of a block by the places of its first pair of each expert."""
    e, b = tl.arange(0, EXPERTS), tl.arange(0, BLOCKS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, blocks, BLOCKS):
        at = (first + b)[:, None] * EXPERTS + e[None, :]
        total += tl.sum(tl.load(counts_ptr + at, (first + b < blocks)[:, None], 0), 0)
    ends = tl.cumsum(total, 0)
    tl.store(offsets_ptr + e, ends, e < experts)
    begins = ends - total
    for first in range(0, blocks, BLOCKS):
        at, there = (first + b)[:, None] * EXPERTS + e[None, :], (first + b < blocks)[:, None]
        counts = tl.load(counts_ptr + at, there, 0)
        tl.store(counts_ptr + at, begins[None, :] + tl.cumsum(counts, 0) - counts, there)
        begins += tl.sum(counts, 0)


@triton.jit
def _moe_sort_place_kernel(
    ids_ptr, begins_ptr, keys_ptr, perm_ptr, n, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i, i < n, EXPERTS).to(tl.int32)
    others = tl.reshape(ids, (1, BLOCK))
    earlier = tl.arange(0, BLOCK)[None, :] < tl.arange(0, BLOCK)[:, None]
    before = tl.sum(((others == ids[:, None]) & earlier).to(tl.int32), 1)  # pairs of the same expert
    place = (tl.load(begins_ptr + block * EXPERTS + ids, i < n, 0) + before).to(tl.int64)
    tl.store(keys_ptr + place, ids.to(tl.int64), i < n)
    tl.store(perm_ptr + place, i, i < n)


def _sort(ids, experts):
    keys, perm, offsets = results = _fake(ids, experts)
    if not ids.is_cuda and not interpreting():
        ordered = torch.sort(ids, stable=True)
        keys.copy_(ordered.values)
        perm.copy_(ordered.indices)
        offsets.copy_(torch.bincount(ids, minlength=experts).cumsum(0))
        return results
    n, padded = ids.shape[0], next_power_of_2(experts)
    blocks = cdiv(n, BLOCK)
    counts = torch.empty((blocks, padded), dtype=torch.int32, device=ids.device)
    ids = ids.contiguous()
    if n:
        launch(
            _moe_sort_count_kernel, (blocks,), ids, counts, n, EXPERTS=padded, BLOCK=BLOCK,
            PART=max(1, min(BLOCK, _COMPARED // padded)), num_warps=4,
        )  # fmt: skip
    launch(
        _moe_sort_offsets_kernel, (1,), counts, offsets, blocks, experts, EXPERTS=padded,
        BLOCKS=max(1, min(_BLOCKS, 4 * _COMPARED // padded)), num_warps=8,
    )  # fmt: skip
    if n:
        launch(
            _moe_sort_place_kernel, (blocks,), ids, counts, keys, perm, n, EXPERTS=padded, BLOCK=BLOCK, num_warps=4
        )  # fmt: skip
    return results


def _fake(ids, experts):
    keys, perm = (ids.new_empty(ids.shape, dtype=torch.int64) for _ in range(2))
    return keys, perm, ids.new_empty((experts,), dtype=torch.int32)


moe_sort = plain_op(
    "moe_sort", "(Tensor ids, int experts) -> (Tensor keys, Tensor perm, Tensor offsets)", _sort, _fake
)  # fmt: skip
trace_launches(moe_sort, _sort, symbolic=True)
