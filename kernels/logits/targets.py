"""Compute what the reduction of a loss has to know of its targets, before the first logit is computed.

    counts_i = target_i != ignore_index
    number   = Σ counts_i
    any      = 1 if number > 0 else 0
    weights  = Σ counts_i · w_target_i       w = 1 without weights of the classes
    divisor  = weights of a mean, m where no target counts; or a given count; or 1

Shapes     target: (m); weight: (V); count: one number.
Dtypes     target int64; weight and count any; results fp32.
Traffic    m targets; one launch where a formula at a time would be some ten, while the GPU waits for the first product.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fx_fusion.ops.launch import launch
from fx_fusion.ops.on_cpu import interpreting

_BLOCK = 8192


@dataclass(frozen=True)
class Totals:
    """Sums over all targets, on the device: ``any`` (2), the same number twice; the others of no dims. ``upstream``: any /
    divisor. ``weights``: 0 where no target counts."""

    any: Tensor
    upstream: Tensor
    divisor: Tensor
    weights: Tensor
    number: Tensor


@triton.jit
def _loss_totals_kernel(
    target_ptr, weight_ptr, count_ptr, totals_ptr, m, classes, ignore_index, rows,
    HAS_WEIGHT: tl.constexpr, HAS_COUNT: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write any, any, upstream, divisor, weights and number. ``rows``: m, 1 at least. One program."""
    weights = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, m, BLOCK):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + at, at < m, 0)
        counts = (target != ignore_index) & (at < m)
        number += counts.to(tl.int32)
        if HAS_WEIGHT:
            known = (target >= 0) & (target < classes)
            weights += tl.load(weight_ptr + target, counts & known, 0.0).to(tl.float32)
    found = tl.sum(number, 0)
    total = tl.sum(weights, 0) if HAS_WEIGHT else found.to(tl.float32)
    some = (found > 0).to(tl.float32)
    divisor = some * 0.0 + 1.0
    if HAS_COUNT:
        divisor = tl.load(count_ptr).to(tl.float32)
    elif MEAN:
        divisor = tl.where(found > 0, total, tl.cast(rows, tl.float32))
    tl.store(totals_ptr, some)
    tl.store(totals_ptr + 1, some)
    tl.store(totals_ptr + 2, some / divisor)
    tl.store(totals_ptr + 3, divisor)
    tl.store(totals_ptr + 4, total)
    tl.store(totals_ptr + 5, found.to(tl.float32))


def totals_of(target, weight, ignore_index: int, *, mean: bool, count=None) -> Totals:
    """Returns the sums over ``target``. ``mean``: the divisor is the sum of weights, unless there is a ``count``."""
    if not (target.is_cuda or interpreting()):
        return _with_torch(target, weight, ignore_index, mean, count)
    totals = torch.empty(6, dtype=torch.float32, device=target.device)
    weight = None if weight is None else weight.contiguous()
    launch(
        _loss_totals_kernel, (1,), target, *(totals if t is None else t for t in (weight, count)), totals, target.numel(),
        0 if weight is None else len(weight), int(ignore_index), float(max(target.numel(), 1)),
        HAS_WEIGHT=weight is not None, HAS_COUNT=count is not None, MEAN=mean, BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return Totals(totals[:2], *totals[2:].unbind())


def _with_torch(target, weight, ignore_index: int, mean: bool, count) -> Totals:
    counts = target != ignore_index
    number = counts.sum(dtype=torch.float32)
    some = (number > 0).float()
    weights = number if weight is None else torch.where(counts, weight.float()[torch.where(counts, target, 0)], 0).sum()
    divisor = torch.ones_like(some)
    if count is not None:
        divisor = count.float().reshape(())
    elif mean:
        divisor = torch.where(number > 0, weights, float(max(target.numel(), 1)))
    return Totals(some.repeat(2), some / divisor, divisor, weights, number)
