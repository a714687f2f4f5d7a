"""EvoNorm-B0 of images of any size and layout, in tiles: moments, statistics, results; partial sums, their sums, gradients.
Where a channel has few parts (images x splits), every program merges them itself: two launches each way instead of three.

In the code: rq = r q and q_rq = (1 − r) q, both without the factor −w until they are summed."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.column_sums import column_sums
from fx_fusion.kernels.lib.divisibility import multiple
from fx_fusion.kernels.lib.image_tiles import Tiles, layout_flags, offset, tile_of_program
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.moments import joined, merge
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.norms.evonorm_b0_math import denominator, gradients
from fx_fusion.ops.launch import launch


@triton.jit
def _of_images(parts_ptr, image, c, live, channels, size, part, splits, all_parts):
    """Returns mean and m2 of channels ``c`` of ``image``, merged from those of its splits."""
    at = image * splits * channels + c
    means = tl.load(parts_ptr + at, live, 0.0)
    m2s = tl.load(parts_ptr + all_parts + at, live, 0.0)
    count = tl.minimum(part, size).to(tl.float32)
    for split in range(1, splits):
        count_b = tl.minimum(part, size - split * part).to(tl.float32)
        at += channels
        mean_b, m2_b = tl.load(parts_ptr + at, live, 0.0), tl.load(parts_ptr + all_parts + at, live, 0.0)
        count, means, m2s = joined(count, means, m2s, count_b, mean_b, m2_b)
    return means, m2s


@triton.jit
def _of_batch(parts_ptr, c, images, channels, size, part, splits, all_parts, ROWS: tl.constexpr):
    """Returns mean and variance over the batch of channels ``c``: (1, BC), merged from at most ROWS parts of each."""
    row = tl.arange(0, ROWS)[:, None]
    live = (row < images * splits) & (c < channels)
    count = tl.where(live, tl.minimum(part, size - row % splits * part), 0).to(tl.float32)
    at = row * channels + c
    n, mean, m2 = merge(tl.load(parts_ptr + at, live, 0.0), tl.load(parts_ptr + all_parts + at, live, 0.0), count, 0)
    return mean[None, :], (m2 / tl.maximum(n, 1.0))[None, :]


@triton.jit
def _column(sums_ptr, c, rows, channels, ROWS: tl.constexpr):
    """Returns the sum over ``rows`` (at most ROWS) of the columns ``c``: (1, BC)."""
    row = tl.arange(0, ROWS)[:, None]
    return tl.sum(tl.load(sums_ptr + row * channels + c, (row < rows) & (c < channels), 0.0), 0)[None, :]


@triton.jit
def _evonorm_statistics_kernel(
    parts_ptr, running_ptr, var_ptr, images_ptr, batch_ptr, images, channels, size, part, splits, all_parts, eps,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store mean_nc and I_nc in ``images``, mean_c and L_c in ``batch``, and the variance of BC channels in ``var``."""
    eps = tl.cast(eps, tl.float32)
    length = tl.cast(size, tl.float32)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    live_c = c < channels
    total = tl.zeros((BC,), tl.float32)
    mean = tl.zeros((BC,), tl.float32)
    m2 = tl.zeros((BC,), tl.float32)
    for first in range(0, images, ROWS):
        image = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        live = (image < images) & live_c[None, :]
        means, m2s = _of_images(parts_ptr, image, c[None, :], live, channels, size, part, splits, all_parts)
        at = image * channels + c[None, :]
        tl.store(images_ptr + at, means, live)
        tl.store(images_ptr + (images + image) * channels + c[None, :], tl.sqrt_rn(m2s / length + eps), live)
        count_b, mean_b, m2_b = merge(means, m2s, tl.where(live, length, 0.0), 0)
        total, mean, m2 = joined(total, mean, m2, count_b, mean_b, m2_b)
    var = m2 / tl.maximum(total, 1.0)
    tl.store(var_ptr + c, var, live_c)
    if RUNNING:
        var = tl.load(running_ptr + c, live_c, 1.0).to(tl.float32)
    tl.store(batch_ptr + c, mean, live_c)
    tl.store(batch_ptr + channels + c, tl.sqrt_rn(var + eps), live_c)


@triton.jit
def _evonorm_result_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, running_ptr, parts_ptr, y_ptr, var_ptr, images_ptr, batch_ptr,
    images, channels, size, part, splits, all_parts, eps,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, X_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store y of a tile. ROWS: the program merges at most so many parts and stores the statistics; 0: it loads them."""
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    block, split, image = tile_of_program(channels, splits, BC)
    c = block * BC + tl.arange(0, BC)[None, :]
    live_c = c < channels
    at = image * channels + c
    if ROWS:
        eps = tl.cast(eps, tl.float32)
        mean_nc, m2 = _of_images(parts_ptr, image, c, live_c, channels, size, part, splits, all_parts)
        I_nc = tl.sqrt_rn(m2 / tl.cast(size, tl.float32) + eps)
        mean_c, var = _of_batch(parts_ptr, c, images, channels, size, part, splits, all_parts, ROWS)
        var_of_L = tl.load(running_ptr + c, live_c, 1.0).to(tl.float32) if RUNNING else var
        L_c = tl.sqrt_rn(var_of_L + eps)
        if split == 0:
            tl.store(images_ptr + at, mean_nc, live_c)
            tl.store(images_ptr + (images + image) * channels + c, I_nc, live_c)
            if image == 0:
                tl.store(var_ptr + c, var, live_c)
                tl.store(batch_ptr + c, mean_c, live_c)
                tl.store(batch_ptr + channels + c, L_c, live_c)
    else:
        I_nc = tl.load(images_ptr + (images + image) * channels + c, live_c, 1.0)
        L_c = tl.load(batch_ptr + channels + c, live_c, 1.0)
    w = tl.load(w_ptr + c, live_c, 0.0).to(tl.float32)
    b = tl.load(b_ptr + c, live_c, 0.0).to(tl.float32)
    v = tl.load(v_ptr + c, live_c, 0.0).to(tl.float32)
    base = image * channels * size
    c = c.to(OFFSET)
    end = tl.minimum(size, (split + 1) * part)
    for s0 in tl.range(split * part, end, BS, num_stages=3):
        s = (s0 + tl.arange(0, BS)[:, None]).to(OFFSET)
        mask = live_c & (s < end)
        x = tl.load(x_ptr + base + offset(c, s, channels, size, X_LAST), mask, 0.0).to(tl.float32)
        _, inv_d = denominator(x, v, I_nc, L_c, EXACT)
        y = (x * inv_d * w + b).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + base + offset(c, s, channels, size, OUT_LAST), y, mask)


@triton.jit
def _evonorm_sums_kernel(
    x_ptr, dy_ptr, w_ptr, v_ptr, images_ptr, batch_ptr, sums_ptr, images, channels, size, part, splits, all_parts,
    X_LAST: tl.constexpr, DY_LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store the sums of db, dw, dv, (1 − r) q and r q of each channel over a split in ``sums``."""
    all_parts = tl.cast(all_parts, tl.int64)  # times four
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    block, split, image = tile_of_program(channels, splits, BC)
    c_row = block * BC + tl.arange(0, BC)
    c = c_row[None, :]
    live_c = c < channels
    v = tl.load(v_ptr + c, live_c, 0.0).to(tl.float32)
    I_nc = tl.load(images_ptr + (images + image) * channels + c, live_c, 1.0)
    L_c = tl.load(batch_ptr + channels + c, live_c, 1.0)
    base = image * channels * size
    c = c.to(OFFSET)
    dbs = tl.zeros((BS, BC), tl.float32)
    dws = tl.zeros((BS, BC), tl.float32)
    dvs = tl.zeros((BS, BC), tl.float32)
    rqs = tl.zeros((BS, BC), tl.float32)
    q_rqs = tl.zeros((BS, BC), tl.float32)
    end = tl.minimum(size, (split + 1) * part)
    for s0 in tl.range(split * part, end, BS, num_stages=3):
        s = (s0 + tl.arange(0, BS)[:, None]).to(OFFSET)
        mask = live_c & (s < end)
        x = tl.load(x_ptr + base + offset(c, s, channels, size, X_LAST), mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + base + offset(c, s, channels, size, DY_LAST), mask, 0.0).to(tl.float32)
        _, dw, q, rq = gradients(x, dy, v, I_nc, L_c, EXACT)
        dbs += dy
        dws += dw
        dvs += rq * x
        rqs += rq
        q_rqs += q - rq
    at = sums_ptr + (image * splits + split) * channels + c_row
    live = c_row < channels
    minus_w = -tl.load(w_ptr + c_row, live, 0.0).to(tl.float32)
    tl.store(at, tl.sum(dbs, 0), live)
    tl.store(at + all_parts, tl.sum(dws, 0), live)
    tl.store(at + 2 * all_parts, tl.sum(dvs, 0) * minus_w, live)
    tl.store(at + 3 * all_parts, tl.sum(q_rqs, 0) * minus_w, live)
    tl.store(at + 4 * all_parts, tl.sum(rqs, 0) * minus_w, live)


@triton.jit
def _evonorm_gradient_kernel(
    x_ptr, dy_ptr, w_ptr, v_ptr, images_ptr, batch_ptr, sums_ptr, q_rqs_ptr, dx_ptr, dw_ptr, db_ptr, dv_ptr,
    images, channels, size, part, splits, all_parts,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, X_LAST: tl.constexpr, DY_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store dx of a tile. ROWS: the program sums at most so many parts, and the first one stores dw, db and dv; 0: it loads
    the sums of (1 − r) q from ``q_rqs_ptr``."""
    all_parts = tl.cast(all_parts, tl.int64)  # times four
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    block, split, image = tile_of_program(channels, splits, BC)
    c = block * BC + tl.arange(0, BC)[None, :]
    live_c = c < channels
    w = tl.load(w_ptr + c, live_c, 0.0).to(tl.float32)
    v = tl.load(v_ptr + c, live_c, 0.0).to(tl.float32)
    mean_nc = tl.load(images_ptr + image * channels + c, live_c, 0.0)
    I_nc = tl.load(images_ptr + (images + image) * channels + c, live_c, 1.0)
    L_c = tl.load(batch_ptr + channels + c, live_c, 1.0)
    P_nc = tl.zeros_like(mean_nc)
    for i in range(splits):
        P_nc += tl.load(sums_ptr + 4 * all_parts + (image * splits + i) * channels + c, live_c, 0.0)
    P_nc = P_nc / (I_nc * size)
    if not RUNNING:
        mean_c = tl.load(batch_ptr + c, live_c, 0.0)
        if ROWS:
            q_rqs = _column(sums_ptr + 3 * all_parts, c, images * splits, channels, ROWS)
        else:
            q_rqs = tl.load(q_rqs_ptr + c, live_c, 0.0)
        Q_c = q_rqs / (L_c * size * images)
    if ROWS:
        if image * splits + split == 0:
            rows = images * splits
            db = _column(sums_ptr, c, rows, channels, ROWS)
            dw = _column(sums_ptr + all_parts, c, rows, channels, ROWS)
            dv = _column(sums_ptr + 2 * all_parts, c, rows, channels, ROWS)
            tl.store(db_ptr + c, db.to(db_ptr.dtype.element_ty), live_c)
            tl.store(dw_ptr + c, dw.to(dw_ptr.dtype.element_ty), live_c)
            tl.store(dv_ptr + c, dv.to(dv_ptr.dtype.element_ty), live_c)
    base = image * channels * size
    c = c.to(OFFSET)
    end = tl.minimum(size, (split + 1) * part)
    for s0 in tl.range(split * part, end, BS, num_stages=3):
        s = (s0 + tl.arange(0, BS)[:, None]).to(OFFSET)
        mask = live_c & (s < end)
        x = tl.load(x_ptr + base + offset(c, s, channels, size, X_LAST), mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + base + offset(c, s, channels, size, DY_LAST), mask, 0.0).to(tl.float32)
        inv_d, _, _, rq = gradients(x, dy, v, I_nc, L_c, EXACT)
        dx = w * (dy * inv_d - rq * v) + (x - mean_nc) * P_nc
        if not RUNNING:
            dx += (x - mean_c) * Q_c
        tl.store(dx_ptr + base + offset(c, s, channels, size, OUT_LAST), dx.to(dx_ptr.dtype.element_ty), mask)


@planner
def merge_plan(tiles: Tiles) -> Plan:
    """Choose by the parts of a channel and by the channels of a tile. Numbers: at most 512 parts in all; 1024 of them (128
    images of 8 channels) cost 5 % on an H200.

    Returns ROWS, the power of two of parts that every program merges itself; 0 where they are too many."""
    rows = next_power_of_2(tiles.n * tiles.splits)
    return Plan(ROWS=rows if rows * tiles.plan.BC <= 512 else 0)


def forward(x, v, weight, bias, running_var, y, var, images, batch, eps: float) -> None:
    """Fill y, var, images and batch."""
    tiles = Tiles(x)
    parts, rows, shape = tiles.moments(x), merge_plan(tiles).ROWS, _shape(tiles)
    running, flags = var if running_var is None else running_var.contiguous(), {"RUNNING": running_var is not None}
    if not rows:
        launch(
            _evonorm_statistics_kernel,
            (cdiv(tiles.c, 8),), parts, running, var, images, batch, *shape, eps, ROWS=64, BC=8, **flags
        )  # fmt: skip
    launch(
        _evonorm_result_kernel,
        tiles.grid, x, weight, bias, v, running, parts, y, var, images, batch, *shape, eps, ROWS=rows,
        **flags, **layout_flags(x=x, out=y), **tiles.constants,
    )  # fmt: skip


def backward(dy, x, v, weight, bias, running_var, images, batch, dx):
    """Fill dx; returns dv, dweight and dbias."""
    tiles = Tiles(x)
    rows, shape = merge_plan(tiles).ROWS, _shape(tiles)
    sums = torch.empty(5, tiles.n * tiles.splits, tiles.c, dtype=torch.float32, device=x.device)
    tensors = x, dy, weight, v, images, batch, sums
    launch(_evonorm_sums_kernel, tiles.grid, *tensors, *shape, **layout_flags(x=x, dy=dy), **tiles.constants)
    if rows:
        dbias, dweight, dv, q_rqs = *(torch.empty_like(t) for t in (bias, weight, v)), sums
    else:
        dbias, dweight, dv, q_rqs = column_sums(sums, (bias.dtype, weight.dtype, v.dtype, torch.float32))
    launch(
        _evonorm_gradient_kernel,
        tiles.grid, *tensors, q_rqs, dx, dweight, dbias, dv, *shape, RUNNING=running_var is not None,
        ROWS=rows, **layout_flags(x=x, dy=dy, out=dx), **tiles.constants,
    )  # fmt: skip
    return dv, dweight, dbias


def _shape(tiles: Tiles) -> tuple[int, ...]:
    """Returns the sizes that every kernel takes."""
    return tiles.n, tiles.c, tiles.size, tiles.part, tiles.splits, tiles.all_parts
