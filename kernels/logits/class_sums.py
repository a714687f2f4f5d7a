"""Combine what all ranks found in their columns of a row of logits -> its loss and its entropy: formulas in ``class_part``.

Shapes     found: (ranks, k, m): of each rank top_r, total_r, z_r, with smoothing y_r, and with an entropy H_r of its own
           columns; target: (m); weight: (V), all classes; loss, entropy: (m); stats: (2, m), top and total.
Dtypes     found, loss, stats, entropy fp32. target int64.
Traffic    k numbers a row and rank; one launch where a formula at a time would be some twenty.
"""

import triton
import triton.language as tl

from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.ops.launch import launch

_ROWS = 128


@triton.jit
def _class_sums_kernel(
    found_ptr, target_ptr, weight_ptr, weight_sum_ptr, z_factor_ptr, loss_ptr, stats_ptr, entropy_ptr, m, k, ranks, classes,
    ignore_index, smoothing,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, ENTROPY: tl.constexpr, Z_LOSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Combine ROWS rows."""
    smoothing = tl.cast(smoothing, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < m
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    for rank in range(ranks):
        top = tl.maximum(top, tl.load(found_ptr + rank * k * m + row, live, 0.0))
    total = tl.zeros((ROWS,), tl.float32)
    z_target = tl.zeros((ROWS,), tl.float32)
    wz = tl.zeros((ROWS,), tl.float32)
    products = tl.zeros((ROWS,), tl.float32)
    for rank in range(ranks):
        at = found_ptr + rank * k * m + row
        own_top = tl.load(at, live, 0.0)
        own_total = tl.load(at + m, live, 1.0)
        # where, not a product: 0 of a rank whose classes are all masked, NaN of one whose logits are.
        share = tl.where(own_top == -float("inf"), own_total, own_total * tl.exp(own_top - top))
        total += share
        z_target += tl.load(at + 2 * m, live, 0.0)
        if SMOOTH:
            wz += tl.load(at + 3 * m, live, 0.0)
        if ENTROPY:
            own_mean = tl.log(own_total) - tl.load(at + (k - 1) * m, live, 0.0)
            products += tl.where(share > 0, share * (own_mean + own_top - top), 0.0)
    target = tl.load(target_ptr + row, live, 0)
    counts = target != ignore_index
    known = (target >= 0) & (target < classes)
    w_target = 1.0
    if HAS_WEIGHT:
        w_target = tl.load(weight_ptr + target, live & known, 0.0).to(tl.float32)
    lse = tl.log(total) + top
    loss = w_target * (tl.log(total) + (top - z_target))
    if SMOOTH:
        w_sum = classes * 1.0
        if HAS_WEIGHT:
            w_sum = tl.load(weight_sum_ptr)
        loss = (1.0 - smoothing) * loss + smoothing / classes * (lse * w_sum - wz)
    loss = tl.where(counts, tl.where(known, loss, float("nan")), 0.0)
    if Z_LOSS:
        z_factor = tl.load(z_factor_ptr + row, live, 0.0)
        loss += tl.where(counts | (z_factor != 0.0), z_factor * lse * lse, 0.0)
    tl.store(loss_ptr + row, loss, live)
    tl.store(stats_ptr + row, top, live)
    tl.store(stats_ptr + m + row, total, live)
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.log(total) - products / total, live)


def launch_class_sums(
    found, target, weight, w_sum, classes: int, ignore_index: int, smoothing: float, *, loss, stats, entropy, z_factor
):
    """Fill ``loss``, ``stats`` and, unless it is None, ``entropy``. ``weight`` of unit stride, ``w_sum`` and ``z_factor``
    may be None."""
    ranks, k, m = found.shape
    if m == 0:
        return
    absent = (found if t is None else t for t in (weight, w_sum, z_factor))
    launch(
        _class_sums_kernel, (cdiv(m, _ROWS),), found, target, *absent, loss, stats, found if entropy is None else entropy,
        m, k, ranks, classes, int(ignore_index), float(smoothing), HAS_WEIGHT=weight is not None, SMOOTH=smoothing > 0,
        ENTROPY=entropy is not None, Z_LOSS=z_factor is not None, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
