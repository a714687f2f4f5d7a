"""EvoNorm-B0 of contiguous images that fit a tile each: a program owns a channel of all images. One launch each way; what
is read twice is read out of the cache the second time."""

import math

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.image_tiles import multiple
from fx_fusion.kernels.lib.launch import cdiv, launch, multiprocessors, next_power_of_2
from fx_fusion.kernels.lib.moments import joined, merge, rounds
from fx_fusion.kernels.norms.evonorm_b0_math import gradients, over_larger

_STEPS = 16  # of a program, one after the other, at most


@triton.jit
def _images(step, images, channels, c, size, ROWS: tl.constexpr, BS: tl.constexpr):
    """Of the images of a step: which there are, where their statistics are, which elements there are, where an image begins
    and its positions: added last, in 32 bits, or the backward takes 83 registers for 64 (14 x 14), one program for two."""
    row = (step * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live, at = row < images, row * channels + c
    s = tl.arange(0, BS)[None, :]
    return live, at, live[:, None] & (s < size), at[:, None] * size, s


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, running_ptr, y_ptr, var_ptr, images_ptr, batch_ptr, images, channels, size, steps, eps,
    RUNNING: tl.constexpr, ROUNDED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    c = tl.program_id(0)
    size = multiple(size, UNIT)
    length = tl.cast(size, tl.float32)
    deviations_ptr = images_ptr + tl.cast(images, tl.int64) * channels
    total = 0.0
    mean = 0.0
    m2 = 0.0
    for step in range(0, steps):
        live, at, mask, first, s = _images(step, images, channels, c, size, ROWS, BS)
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        if ROUNDED:  # equal values have no distance from the first one
            shift = tl.load(x_ptr + at * size, live, 0.0)
            x = tl.where(mask, x - shift[:, None], 0.0)
        means = tl.div_rn(tl.sum(x, 1), length)
        apart = tl.where(mask, x - means[:, None], 0.0)
        m2s = tl.sum(apart * apart, 1)
        if ROUNDED:
            means += shift
        tl.store(images_ptr + at, means, live)
        tl.store(deviations_ptr + at, tl.sqrt_rn(m2s / length + eps), live)
        n, middle, spread = merge(means, m2s, tl.where(live, length, 0.0), 0)
        total, mean, m2 = joined(total, mean, m2, n, middle, spread)
    var = m2 / total
    tl.store(var_ptr + c, var)
    if RUNNING:
        var = tl.load(running_ptr + c).to(tl.float32)
    least = tl.sqrt_rn(var + eps)
    tl.store(batch_ptr + c, mean)
    tl.store(batch_ptr + channels + c, least)
    w = tl.load(w_ptr + c).to(tl.float32)
    b = tl.load(b_ptr + c).to(tl.float32)
    v = tl.load(v_ptr + c).to(tl.float32)
    tl.debug_barrier()  # other threads have stored the statistics of images
    for step in range(0, steps):  # backwards: what was read last is still in the cache
        live, at, mask, first, s = _images(steps - 1 - step, images, channels, c, size, ROWS, BS)
        deviation = tl.load(deviations_ptr + at, live, 1.0)[:, None]
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        _, inverse = over_larger(x, v, deviation, least, EXACT)
        y = (x * inverse * w + b).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + first + s, y, mask, eviction_policy="evict_first")


@triton.jit
def _backward_kernel(
    x_ptr, dy_ptr, w_ptr, v_ptr, images_ptr, batch_ptr, pulls_ptr, dx_ptr, dw_ptr, db_ptr, dv_ptr,
    images, channels, size, steps, RUNNING: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """``pulls_ptr``: what the deviation of each image passes on to its elements, written and read by the same program."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    c = tl.program_id(0)
    size = multiple(size, UNIT)
    length = tl.cast(size, tl.float32)
    deviations_ptr = images_ptr + tl.cast(images, tl.int64) * channels
    w = tl.load(w_ptr + c).to(tl.float32)
    v = tl.load(v_ptr + c).to(tl.float32)
    least = tl.load(batch_ptr + channels + c)
    dbs = tl.zeros((ROWS, BS), tl.float32)
    dws = tl.zeros((ROWS, BS), tl.float32)
    dvs = tl.zeros((ROWS, BS), tl.float32)
    losses = tl.zeros((ROWS, BS), tl.float32)
    for step in range(0, steps):
        live, at, mask, first, s = _images(step, images, channels, c, size, ROWS, BS)
        deviation = tl.load(deviations_ptr + at, live, 1.0)
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + first + s, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        _, dw, q, won = gradients(x, dy, v, deviation[:, None], least, EXACT)
        dbs += dy
        dws += dw
        dvs += won * x
        losses += q - won
        tl.store(pulls_ptr + at, -w * tl.sum(won, 1) / (deviation * length), live)
    tl.store(db_ptr + c, tl.sum(dbs).to(db_ptr.dtype.element_ty))
    tl.store(dw_ptr + c, tl.sum(dws).to(dw_ptr.dtype.element_ty))
    tl.store(dv_ptr + c, (-w * tl.sum(dvs)).to(dv_ptr.dtype.element_ty))
    mean_of_batch = tl.load(batch_ptr + c)
    push = -w * tl.sum(losses) / (least * length * images)
    tl.debug_barrier()  # other threads have stored the pulls
    for step in range(0, steps):  # backwards: what was read last is still in the cache
        live, at, mask, first, s = _images(steps - 1 - step, images, channels, c, size, ROWS, BS)
        mean = tl.load(images_ptr + at, live, 0.0)[:, None]
        deviation = tl.load(deviations_ptr + at, live, 1.0)[:, None]
        pull = tl.load(pulls_ptr + at, live, 0.0)[:, None]
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + first + s, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        inverse, _, _, won = gradients(x, dy, v, deviation, least, EXACT)
        dx = w * (dy * inverse - won * v) + (x - mean) * pull
        if not RUNNING:
            dx += (x - mean_of_batch) * push
        tl.store(dx_ptr + first + s, dx.to(dx_ptr.dtype.element_ty), mask, eviction_policy="evict_first")


def options(x, *others, backward: bool) -> dict | None:
    """None where this is not the way. It is where a channel is short, and in 16 bits where the rows of small images begin
    anywhere (7 x 7, 14 x 14): by what was fastest on an H200 (``bench.tune channels``), tiles too. A step waits for its
    loads and sums, so there are few of them."""
    if not all(t.is_contiguous() for t in (x, *others)):
        return None
    n, c, *positions = x.shape
    size = math.prod(positions)
    few, wide = c < multiprocessors(x), x.element_size() == 4
    short = (8192 if wide else 16384) if backward else 16384 if few else 32768
    bs, broken = next_power_of_2(size), size % 8 != 0 and size < 1024 and not (few or wide)
    if not 32 < bs <= (1024 if backward else 4096) or (n * size > short and not broken):
        return None
    if few:
        tile, lane = (8192, 16) if backward else (16384, 16)
    elif backward:
        tile, lane = (1024 if n * size <= 16384 else 4096), 8
    else:
        tile, lane = min(4096, 16 * bs), 32
    found = tile_of(x, tile, lane)
    return found if cdiv(n, found["ROWS"]) <= _STEPS else None


def tile_of(x, elements: int, lane: int) -> dict:
    """Whole images of x, some ``elements`` in all, and some ``lane`` of them in a lane."""
    size = math.prod(x.shape[2:])
    bs = next_power_of_2(size)
    rows = min(next_power_of_2(x.shape[0]), max(1, elements // bs))
    return {"UNIT": math.gcd(16, size), "ROWS": rows, "BS": bs, "num_warps": max(4, rows * bs // (32 * lane))}


def forward(x, v, weight, bias, running_var, y, var, images, batch, eps: float, given: dict) -> None:
    running = var if running_var is None else running_var.contiguous()
    launch(
        _forward_kernel, (x.shape[1],), x, weight, bias, v, running, y, var, images, batch, *_shape(x, given), eps,
        RUNNING=running_var is not None, ROUNDED=rounds(x.dtype, math.prod(x.shape[2:])), **given,
    )  # fmt: skip


def backward(dy, x, v, weight, bias, running_var, images, batch, dx, given: dict):
    """``-> (dv, dweight, dbias)``."""
    dv, dweight, dbias = (torch.empty_like(t) for t in (v, weight, bias))
    pulls = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    launch(
        _backward_kernel, (x.shape[1],), x, dy, weight, v, images, batch, pulls, dx, dweight, dbias, dv, *_shape(x, given),
        RUNNING=running_var is not None, **given,
    )  # fmt: skip
    return dv, dweight, dbias


def _shape(x, given: dict) -> tuple[int, ...]:
    n, c, *positions = x.shape
    return n, c, math.prod(positions), cdiv(n, given["ROWS"])
