"""EvoNorm-B0 of images of any size and layout, in tiles: moments, statistics, results; partial sums, their sums, gradients.
Where the parts of a channel are few, every program merges them itself: two launches each way instead of three."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.image_tiles import Tiles, lie_last, multiple, offset, place
from fx_fusion.kernels.lib.launch import cdiv, column_sums, launch, next_power_of_2
from fx_fusion.kernels.lib.moments import joined, merge
from fx_fusion.kernels.norms.evonorm_b0_math import gradients, over_larger

_FEW = 512  # parts of the channels of a tile: 128 images of 8 channels (1024) cost 5 %


@triton.jit
def _of_images(parts_ptr, image, c, live, channels, size, part, splits, all_parts):
    """Mean and m2 of channels of images, from those of their splits."""
    at = image * splits * channels + c
    means = tl.load(parts_ptr + at, live, 0.0)
    m2s = tl.load(parts_ptr + all_parts + at, live, 0.0)
    count = tl.minimum(part, size).to(tl.float32)
    for split in range(1, splits):
        n = tl.minimum(part, size - split * part).to(tl.float32)
        at += channels
        middle, spread = tl.load(parts_ptr + at, live, 0.0), tl.load(parts_ptr + all_parts + at, live, 0.0)
        count, means, m2s = joined(count, means, m2s, n, middle, spread)
    return means, m2s


@triton.jit
def _of_batch(parts_ptr, c, images, channels, size, part, splits, all_parts, ROWS: tl.constexpr):
    """Mean and variance of channels ``c``, (1, BC), over the batch, from at most ROWS parts."""
    row = tl.arange(0, ROWS)[:, None]
    live = (row < images * splits) & (c < channels)
    count = tl.where(live, tl.minimum(part, size - row % splits * part), 0).to(tl.float32)
    at = row * channels + c
    n, mean, m2 = merge(tl.load(parts_ptr + at, live, 0.0), tl.load(parts_ptr + all_parts + at, live, 0.0), count, 0)
    return mean[None, :], (m2 / tl.maximum(n, 1.0))[None, :]


@triton.jit
def _column(sums_ptr, c, rows, channels, ROWS: tl.constexpr):
    """The sum over ``rows`` of columns ``c``, (1, BC)."""
    row = tl.arange(0, ROWS)[:, None]
    return tl.sum(tl.load(sums_ptr + row * channels + c, (row < rows) & (c < channels), 0.0), 0)[None, :]


@triton.jit
def _statistics_kernel(
    parts_ptr, running_ptr, var_ptr, images_ptr, batch_ptr, images, channels, size, part, splits, all_parts, eps,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean and standard deviation of each channel, in each image and over the batch."""
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
        n, middle, spread = merge(means, m2s, tl.where(live, length, 0.0), 0)
        total, mean, m2 = joined(total, mean, m2, n, middle, spread)
    var = m2 / tl.maximum(total, 1.0)
    tl.store(var_ptr + c, var, live_c)
    if RUNNING:
        var = tl.load(running_ptr + c, live_c, 1.0).to(tl.float32)
    tl.store(batch_ptr + c, mean, live_c)
    tl.store(batch_ptr + channels + c, tl.sqrt_rn(var + eps), live_c)


@triton.jit
def _result_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, running_ptr, parts_ptr, y_ptr, var_ptr, images_ptr, batch_ptr,
    images, channels, size, part, splits, all_parts, eps,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, X_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """ROWS: how many parts to merge for the statistics; 0 where they are there."""
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    block, split, image = place(channels, splits, BC)
    c = block * BC + tl.arange(0, BC)[None, :]
    live_c = c < channels
    at = image * channels + c
    if ROWS:
        eps = tl.cast(eps, tl.float32)
        mean, m2 = _of_images(parts_ptr, image, c, live_c, channels, size, part, splits, all_parts)
        deviation = tl.sqrt_rn(m2 / tl.cast(size, tl.float32) + eps)
        mean_of_batch, var = _of_batch(parts_ptr, c, images, channels, size, part, splits, all_parts, ROWS)
        used = tl.load(running_ptr + c, live_c, 1.0).to(tl.float32) if RUNNING else var
        least = tl.sqrt_rn(used + eps)
        if split == 0:
            tl.store(images_ptr + at, mean, live_c)
            tl.store(images_ptr + (images + image) * channels + c, deviation, live_c)
            if image == 0:
                tl.store(var_ptr + c, var, live_c)
                tl.store(batch_ptr + c, mean_of_batch, live_c)
                tl.store(batch_ptr + channels + c, least, live_c)
    else:
        deviation = tl.load(images_ptr + (images + image) * channels + c, live_c, 1.0)
        least = tl.load(batch_ptr + channels + c, live_c, 1.0)
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
        _, inverse = over_larger(x, v, deviation, least, EXACT)
        y = (x * inverse * w + b).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + base + offset(c, s, channels, size, OUT_LAST), y, mask)


@triton.jit
def _sums_kernel(
    x_ptr, dy_ptr, w_ptr, v_ptr, images_ptr, batch_ptr, sums_ptr, images, channels, size, part, splits, all_parts,
    X_LAST: tl.constexpr, DY_LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """``sums_ptr``: db, dw, dv, (1 − r) q and r q of each channel over a split."""
    all_parts = tl.cast(all_parts, tl.int64)  # times four
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    block, split, image = place(channels, splits, BC)
    c_row = block * BC + tl.arange(0, BC)
    c = c_row[None, :]
    live_c = c < channels
    v = tl.load(v_ptr + c, live_c, 0.0).to(tl.float32)
    deviation = tl.load(images_ptr + (images + image) * channels + c, live_c, 1.0)
    least = tl.load(batch_ptr + channels + c, live_c, 1.0)
    base = image * channels * size
    c = c.to(OFFSET)
    dbs = tl.zeros((BS, BC), tl.float32)
    dws = tl.zeros((BS, BC), tl.float32)
    dvs = tl.zeros((BS, BC), tl.float32)
    wins = tl.zeros((BS, BC), tl.float32)
    losses = tl.zeros((BS, BC), tl.float32)
    end = tl.minimum(size, (split + 1) * part)
    for s0 in tl.range(split * part, end, BS, num_stages=3):
        s = (s0 + tl.arange(0, BS)[:, None]).to(OFFSET)
        mask = live_c & (s < end)
        x = tl.load(x_ptr + base + offset(c, s, channels, size, X_LAST), mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + base + offset(c, s, channels, size, DY_LAST), mask, 0.0).to(tl.float32)
        _, dw, q, won = gradients(x, dy, v, deviation, least, EXACT)
        dbs += dy
        dws += dw
        dvs += won * x
        wins += won
        losses += q - won
    at = sums_ptr + (image * splits + split) * channels + c_row
    live = c_row < channels
    less = -tl.load(w_ptr + c_row, live, 0.0).to(tl.float32)
    tl.store(at, tl.sum(dbs, 0), live)
    tl.store(at + all_parts, tl.sum(dws, 0), live)
    tl.store(at + 2 * all_parts, tl.sum(dvs, 0) * less, live)
    tl.store(at + 3 * all_parts, tl.sum(losses, 0) * less, live)
    tl.store(at + 4 * all_parts, tl.sum(wins, 0) * less, live)


@triton.jit
def _gradient_kernel(
    x_ptr, dy_ptr, w_ptr, v_ptr, images_ptr, batch_ptr, sums_ptr, losses_ptr, dx_ptr, dw_ptr, db_ptr, dv_ptr,
    images, channels, size, part, splits, all_parts,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, X_LAST: tl.constexpr, DY_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """ROWS: how many parts to add up for dw, db, dv and ``losses_ptr``; 0 where that is done."""
    all_parts = tl.cast(all_parts, tl.int64)  # times four
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    block, split, image = place(channels, splits, BC)
    c = block * BC + tl.arange(0, BC)[None, :]
    live_c = c < channels
    w = tl.load(w_ptr + c, live_c, 0.0).to(tl.float32)
    v = tl.load(v_ptr + c, live_c, 0.0).to(tl.float32)
    mean = tl.load(images_ptr + image * channels + c, live_c, 0.0)
    deviation = tl.load(images_ptr + (images + image) * channels + c, live_c, 1.0)
    least = tl.load(batch_ptr + channels + c, live_c, 1.0)
    pull = tl.zeros_like(mean)
    for i in range(splits):
        pull += tl.load(sums_ptr + 4 * all_parts + (image * splits + i) * channels + c, live_c, 0.0)
    pull = pull / (deviation * size)
    if not RUNNING:
        mean_of_batch = tl.load(batch_ptr + c, live_c, 0.0)
        if ROWS:
            losses = _column(sums_ptr + 3 * all_parts, c, images * splits, channels, ROWS)
        else:
            losses = tl.load(losses_ptr + c, live_c, 0.0)
        push = losses / (least * size * images)
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
        inverse, _, _, won = gradients(x, dy, v, deviation, least, EXACT)
        dx = w * (dy * inverse - won * v) + (x - mean) * pull
        if not RUNNING:
            dx += (x - mean_of_batch) * push
        tl.store(dx_ptr + base + offset(c, s, channels, size, OUT_LAST), dx.to(dx_ptr.dtype.element_ty), mask)


def forward(x, v, weight, bias, running_var, y, var, images, batch, eps: float) -> None:
    tiles = Tiles(x)
    parts, rows, shape = tiles.moments(x), _few(tiles), _shape(tiles)
    running, use = var if running_var is None else running_var.contiguous(), {"RUNNING": running_var is not None}
    if not rows:
        launch(
            _statistics_kernel, (cdiv(tiles.c, 8),), parts, running, var, images, batch, *shape, eps, ROWS=64, BC=8, **use
        )  # fmt: skip
    launch(
        _result_kernel, tiles.grid, x, weight, bias, v, running, parts, y, var, images, batch, *shape, eps, ROWS=rows,
        **use, **lie_last(x=x, out=y), **tiles.options,
    )  # fmt: skip


def backward(dy, x, v, weight, bias, running_var, images, batch, dx):
    """``-> (dv, dweight, dbias)``."""
    tiles = Tiles(x)
    rows, shape = _few(tiles), _shape(tiles)
    sums = torch.empty(5, tiles.n * tiles.splits, tiles.c, dtype=torch.float32, device=x.device)
    tensors = x, dy, weight, v, images, batch, sums
    launch(_sums_kernel, tiles.grid, *tensors, *shape, **lie_last(x=x, dy=dy), **tiles.options)
    if rows:
        dbias, dweight, dv, losses = *(torch.empty_like(t) for t in (bias, weight, v)), sums
    else:
        dbias, dweight, dv, losses = column_sums(sums, (bias.dtype, weight.dtype, v.dtype, torch.float32))
    launch(
        _gradient_kernel, tiles.grid, *tensors, losses, dx, dweight, dbias, dv, *shape, RUNNING=running_var is not None,
        ROWS=rows, **lie_last(x=x, dy=dy, out=dx), **tiles.options,
    )  # fmt: skip
    return dv, dweight, dbias


def _few(tiles: Tiles) -> int:
    """How many parts of a channel a program merges itself; 0 where there are too many."""
    rows = next_power_of_2(tiles.n * tiles.splits)
    return rows if rows * tiles.bc <= _FEW else 0


def _shape(tiles: Tiles) -> tuple[int, ...]:
    return tiles.n, tiles.c, tiles.size, tiles.part, tiles.splits, tiles.all_parts
