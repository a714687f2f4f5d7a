"""EvoNorm-B0 of images of any size and layout, in tiles: moments, statistics, results; partial sums, their sums, gradients."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.images import Tiles, lie_last, merge, multiple, offset, place
from fx_fusion.kernels.larger_deviation import gradients, over_larger
from fx_fusion.kernels.launch import cdiv, column_sums, launch


@triton.jit
def _statistics_kernel(
    parts_ptr, running_ptr, var_ptr, images_ptr, batch_ptr, images, channels, size, part, splits, all_parts, eps,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean and standard deviation of each channel, in each image and over the batch."""
    eps = tl.cast(eps, tl.float32)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    live_c = c < channels
    total = tl.zeros((BC,), tl.float32)
    mean = tl.zeros((BC,), tl.float32)
    m2 = tl.zeros((BC,), tl.float32)
    for first in range(0, images, ROWS):
        image = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        live = (image < images) & live_c[None, :]
        count = tl.zeros((ROWS, BC), tl.float32)
        means = tl.zeros((ROWS, BC), tl.float32)
        m2s = tl.zeros((ROWS, BC), tl.float32)
        for split in range(splits):
            n = tl.minimum(part, size - split * part).to(tl.float32)
            at = (image * splits + split) * channels + c[None, :]
            apart = tl.load(parts_ptr + at, live, 0.0) - means
            both = count + n
            means += apart * n / both
            m2s += tl.load(parts_ptr + all_parts + at, live, 0.0) + apart * apart * count * n / both
            count = both
        at = image * channels + c[None, :]
        tl.store(images_ptr + at, means, live)
        tl.store(images_ptr + images * channels + at, tl.sqrt_rn(m2s / count + eps), live)
        n, middle, spread = merge(means, m2s, tl.where(live, count, 0.0), 0)
        apart = middle - mean
        both = tl.maximum(total + n, 1.0)
        mean += apart * n / both
        m2 += spread + apart * apart * total * n / both
        total += n
    var = m2 / tl.maximum(total, 1.0)
    tl.store(var_ptr + c, var, live_c)
    if RUNNING:
        var = tl.load(running_ptr + c, live_c, 1.0).to(tl.float32)
    tl.store(batch_ptr + c, mean, live_c)
    tl.store(batch_ptr + channels + c, tl.sqrt_rn(var + eps), live_c)


@triton.jit
def _tile_kernel(
    x_ptr, dy_ptr, w_ptr, b_ptr, v_ptr, images_ptr, batch_ptr, out_ptr, sums_ptr, totals_ptr,
    images, channels, size, part, splits, all_parts,
    RUNNING: tl.constexpr, STEP: tl.constexpr, X_LAST: tl.constexpr, DY_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """STEP 0: y. STEP 1: db, dw, dv, (1 − r) q and r q of each channel over a split. STEP 2: dx from their sums."""
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    block, split, image = place(channels, splits, BC)
    c_row = block * BC + tl.arange(0, BC)
    c = c_row[None, :]
    live_c = c < channels
    w = tl.load(w_ptr + c, live_c, 0.0).to(tl.float32)
    b = tl.load(b_ptr + c, live_c, 0.0).to(tl.float32)
    v = tl.load(v_ptr + c, live_c, 0.0).to(tl.float32)
    of_image = image * channels + c
    deviation = tl.load(images_ptr + images * channels + of_image, live_c, 1.0)
    least = tl.load(batch_ptr + channels + c, live_c, 1.0)
    if STEP == 2:
        mean = tl.load(images_ptr + of_image, live_c, 0.0)
        pull = tl.zeros_like(mean)
        for i in range(splits):
            pull += tl.load(sums_ptr + 4 * all_parts + (image * splits + i) * channels + c, live_c, 0.0)
        pull = pull / (deviation * size)
        if not RUNNING:
            mean_of_batch = tl.load(batch_ptr + c, live_c, 0.0)
            push = tl.load(totals_ptr + c, live_c, 0.0) / (least * size * images)
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
        out = out_ptr + base + offset(c, s, channels, size, OUT_LAST)
        if STEP == 0:
            _, inverse = over_larger(x, v, deviation, least, EXACT)
            tl.store(out, (x * inverse * w + b).to(out_ptr.dtype.element_ty), mask)
        else:
            dy = tl.load(dy_ptr + base + offset(c, s, channels, size, DY_LAST), mask, 0.0).to(tl.float32)
            inverse, dw, q, won = gradients(x, dy, v, deviation, least, EXACT)
            if STEP == 1:
                dbs += dy
                dws += dw
                dvs += won * x
                wins += won
                losses += q - won
            else:
                dx = w * (dy * inverse - won * v) + (x - mean) * pull
                if not RUNNING:
                    dx += (x - mean_of_batch) * push
                tl.store(out, dx.to(out_ptr.dtype.element_ty), mask)
    if STEP == 1:
        at = sums_ptr + (image * splits + split) * channels + c_row
        live = c_row < channels
        tl.store(at, tl.sum(dbs, 0), live)
        tl.store(at + all_parts, tl.sum(dws, 0), live)
        less = -tl.load(w_ptr + c_row, live, 0.0).to(tl.float32)
        tl.store(at + 2 * all_parts, tl.sum(dvs, 0) * less, live)
        tl.store(at + 3 * all_parts, tl.sum(losses, 0) * less, live)
        tl.store(at + 4 * all_parts, tl.sum(wins, 0) * less, live)


def forward(x, v, weight, bias, running_var, y, var, images, batch, eps: float) -> None:
    tiles = Tiles(x)
    parts = tiles.moments(x)
    shape = tiles.n, tiles.c, tiles.size, tiles.part, tiles.splits, tiles.all_parts
    launch(
        _statistics_kernel, (cdiv(tiles.c, 8),), parts, var if running_var is None else running_var, var, images, batch,
        *shape, eps, RUNNING=running_var is not None, ROWS=64, BC=8,
    )  # fmt: skip
    launch(
        _tile_kernel, tiles.grid, x, x, weight, bias, v, images, batch, y, var, var, *shape,
        RUNNING=running_var is not None, STEP=0, **lie_last(x, x, y), **tiles.options,
    )  # fmt: skip


def backward(dy, x, v, weight, bias, running_var, images, batch, dx):
    """``-> (dv, dweight, dbias)``."""
    tiles = Tiles(x)
    shape = tiles.n, tiles.c, tiles.size, tiles.part, tiles.splits, tiles.all_parts
    sums = torch.empty(5, tiles.n * tiles.splits, tiles.c, dtype=torch.float32, device=x.device)
    tensors = x, dy, weight, bias, v, images, batch, dx, sums
    fixed = {"RUNNING": running_var is not None, **lie_last(x, dy, dx), **tiles.options}
    launch(_tile_kernel, tiles.grid, *tensors, sums, *shape, STEP=1, **fixed)
    dbias, dweight, dv, losses = column_sums(sums, (bias.dtype, weight.dtype, v.dtype, torch.float32))
    launch(_tile_kernel, tiles.grid, *tensors, losses, *shape, STEP=2, **fixed)
    return dv, dweight, dbias
