"""EvoNorm-B0, forward and backward.

    I_nc  = sqrt(var of a channel of an image + eps)           L_c = sqrt(var of a channel over the batch + eps)
    d     = max(L_c, v x + I_nc)                                in evaluation L_c = sqrt(running_var + eps)
    y     = x / d · w + b

    q     = −dy · w · x / d²,   r = 1 where v x + I > L, 1/2 where they are equal, else 0
    dx    = dy · w / d + r q v + (x − mean_nc) Σ_nc(r q) / (I S) + (x − mean_c) Σ_c((1 − r) q) / (L N S)
    dw, db, dv = sums over images and positions of dy · x / d, dy, r q x           S positions, N images

Shapes     x: (n, c, ...), contiguous or channels last; weight, bias, v, running_var: (c). ``var``: (c), biased, for the
           update of the running statistics.
Dtypes     bf16 | fp16 | fp32, parameters in any of them; arithmetic and statistics in fp32, one rounding per store.
Saved      x, v, weight, stats of images (mean, I) and of channels (mean, L).
Traffic    forward x twice and y once, backward x and dy twice and dx once: the batch statistics need all of x first.
Source     Liu et al. 2020, arXiv:2004.02967, table 2 (B0).
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.fast_math import reciprocal
from fx_fusion.kernels.images import Tiles, as_images, empty_images, lie_last, merge, multiple, offset, place
from fx_fusion.kernels.launch import cdiv, column_sums, launch
from fx_fusion.op import fused_op


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
        right = v * x + deviation
        inverse = reciprocal(tl.maximum(least, right, propagate_nan=tl.PropagateNan.ALL), EXACT)
        y = x * inverse
        out = out_ptr + base + offset(c, s, channels, size, OUT_LAST)
        if STEP == 0:
            tl.store(out, (y * w + b).to(out_ptr.dtype.element_ty), mask)
        else:
            dy = tl.load(dy_ptr + base + offset(c, s, channels, size, DY_LAST), mask, 0.0).to(tl.float32)
            dw = dy * y
            q = dw * inverse  # by -w what it is above, which waits for the sums
            won = tl.where(right > least, q, tl.where(right == least, 0.5 * q, 0.0))  # a tie: half to each, as max
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


def _fwd(x, v, weight, bias, running_var, eps):
    y, var, images, batch = _fake(x, v, weight, bias, running_var, eps)
    if not x.numel():
        return y, var.fill_(float("nan")), images, batch
    x = as_images(x)
    tiles = Tiles(x)
    parts = tiles.moments(x)
    shape = tiles.n, tiles.c, tiles.size, tiles.part, tiles.splits, tiles.all_parts
    running = var if running_var is None else running_var.contiguous()
    launch(
        _statistics_kernel, (cdiv(tiles.c, 8),), parts, running, var, images, batch, *shape, float(eps),
        RUNNING=running_var is not None, ROWS=64, BC=8,
    )  # fmt: skip
    launch(
        _tile_kernel, tiles.grid, x, x, weight.contiguous(), bias.contiguous(), v.contiguous(), images, batch, y, var, var,
        *shape, RUNNING=running_var is not None, STEP=0, **lie_last(x, x, y), **tiles.options,
    )  # fmt: skip
    return y, var, images, batch


def _bwd(dy, x, v, weight, bias, running_var, images, batch, eps, needs):
    dx = empty_images(x)
    if not x.numel():
        return dx, *(torch.zeros_like(t) for t in (v, weight, bias))
    x, dy = as_images(x), as_images(dy)
    tiles = Tiles(x)
    shape = tiles.n, tiles.c, tiles.size, tiles.part, tiles.splits, tiles.all_parts
    sums = torch.empty(5, tiles.n * tiles.splits, tiles.c, dtype=torch.float32, device=x.device)
    tensors = x, dy, weight.contiguous(), bias.contiguous(), v.contiguous(), images, batch, dx, sums
    fixed = {"RUNNING": running_var is not None, **lie_last(x, dy, dx), **tiles.options}
    launch(_tile_kernel, tiles.grid, *tensors, sums, *shape, STEP=1, **fixed)
    dbias, dweight, dv, losses = column_sums(sums, (bias.dtype, weight.dtype, v.dtype, torch.float32))
    launch(_tile_kernel, tiles.grid, *tensors, losses, *shape, STEP=2, **fixed)
    return dx, dv, dweight, dbias


def _fake(x, v, weight, bias, running_var, eps):
    n, c = x.shape[:2]
    var, images, batch = (torch.empty(s, dtype=torch.float32, device=x.device) for s in ((c,), (2, n, c), (2, c)))
    return empty_images(x), var, images, batch


evonorm_b0 = fused_op(
    "evonorm_b0",
    (
        "(Tensor x, Tensor v, Tensor weight, Tensor bias, Tensor? running_var, float eps)"
        " -> (Tensor y, Tensor var, Tensor images, Tensor batch)",
        _fwd,
    ),
    (
        "(Tensor dy, Tensor x, Tensor v, Tensor weight, Tensor bias, Tensor? running_var, Tensor images, Tensor batch,"
        " float eps, bool[] needs) -> (Tensor dx, Tensor dv, Tensor dweight, Tensor dbias)",
        _bwd,
    ),
    fake=_fake,
    stats=("images", "batch"),
    constants=("var",),
    grads=("x", "v", "weight", "bias"),
)
