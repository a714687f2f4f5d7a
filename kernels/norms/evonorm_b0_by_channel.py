"""EvoNorm-B0 of contiguous images that fit a tile each: a program owns a channel of all images. One launch each way; the
second read of x (and dy) comes out of the cache.

In the code: rq = r q and q_rq = (1 − r) q, both without the factor −w until they are summed."""

import math

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.device import multiprocessors
from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.moments import joined, merge, rounds
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.plan_table import first_row
from fx_fusion.kernels.norms.evonorm_b0_math import denominator, gradients
from fx_fusion.ops.launch import launch

# Facts by which the numbers are chosen (the first row whose facts all hold):
#
#     backward        the pass
#     4_bytes         x is float32
#     channels<SMs    a program has a multiprocessor for itself
#     length<=16384   elements of a channel, of all images

# Elements of a channel up to which a program owns it.
OWNED = (
    ("backward 4_bytes", 8192),
    ("backward", 16384),
    ("channels<SMs", 16384),
    ("", 32768),
)

# Elements of a tile, elements of a lane, and where it is limited the images of a tile.
TILES = (
    ("channels<SMs backward", (8192, 16)),
    ("channels<SMs", (16384, 16)),
    ("backward length<=16384", (1024, 8)),
    ("backward", (4096, 8)),
    ("", (4096, 32, 16)),
)

STEPS = 16  # tiles of a program, at most: each waits for its loads and sums


@triton.jit
def _step(step, images, channels, c, size, ROWS: tl.constexpr, BS: tl.constexpr):
    """Returns, for the ROWS images of a step: which exist, the indices of their statistics, which elements exist, the first
    elements, and the positions. The positions are added last, in 32 bits: otherwise the backward takes 83 registers instead
    of 64 (14 x 14) and occupancy halves."""
    row = (step * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live, at = row < images, row * channels + c
    s = tl.arange(0, BS)[None, :]
    return live, at, live[:, None] & (s < size), at[:, None] * size, s


@triton.jit
def _evonorm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, running_ptr, y_ptr, var_ptr, images_ptr, batch_ptr, images, channels, size, steps, eps,
    RUNNING: tl.constexpr, ROUNDED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store y and the statistics of one channel. ROUNDED: the sum of equal values can be rounded, so the moments are
    those of distances from an image's first value."""
    eps = tl.cast(eps, tl.float32)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    c = tl.program_id(0)
    size = multiple(size, UNIT)
    length = tl.cast(size, tl.float32)
    I_ptr = images_ptr + tl.cast(images, tl.int64) * channels
    total = 0.0
    mean = 0.0
    m2 = 0.0
    for step in range(0, steps):
        live, at, mask, first, s = _step(step, images, channels, c, size, ROWS, BS)
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        if ROUNDED:
            shift = tl.load(x_ptr + at * size, live, 0.0)
            x = tl.where(mask, x - shift[:, None], 0.0)
        means = tl.div_rn(tl.sum(x, 1), length)
        centered = tl.where(mask, x - means[:, None], 0.0)
        m2s = tl.sum(centered * centered, 1)
        if ROUNDED:
            means += shift
        tl.store(images_ptr + at, means, live)
        tl.store(I_ptr + at, tl.sqrt_rn(m2s / length + eps), live)
        count_b, mean_b, m2_b = merge(means, m2s, tl.where(live, length, 0.0), 0)
        total, mean, m2 = joined(total, mean, m2, count_b, mean_b, m2_b)
    var = m2 / total
    tl.store(var_ptr + c, var)
    if RUNNING:
        var = tl.load(running_ptr + c).to(tl.float32)
    L_c = tl.sqrt_rn(var + eps)
    tl.store(batch_ptr + c, mean)
    tl.store(batch_ptr + channels + c, L_c)
    w = tl.load(w_ptr + c).to(tl.float32)
    b = tl.load(b_ptr + c).to(tl.float32)
    v = tl.load(v_ptr + c).to(tl.float32)
    tl.debug_barrier()  # other threads have stored the statistics of images
    for step in range(0, steps):  # backwards: what was read last is still in the cache
        live, at, mask, first, s = _step(steps - 1 - step, images, channels, c, size, ROWS, BS)
        I_nc = tl.load(I_ptr + at, live, 1.0)[:, None]
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        _, inv_d = denominator(x, v, I_nc, L_c, EXACT)
        y = (x * inv_d * w + b).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + first + s, y, mask, eviction_policy="evict_first")


@triton.jit
def _evonorm_bwd_kernel(
    x_ptr, dy_ptr, w_ptr, v_ptr, images_ptr, batch_ptr, P_ptr, dx_ptr, dw_ptr, db_ptr, dv_ptr,
    images, channels, size, steps, RUNNING: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store dx of one channel, and its dw, db and dv. ``P_ptr``: room for P_nc of each image, read by this
    program only."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    c = tl.program_id(0)
    size = multiple(size, UNIT)
    length = tl.cast(size, tl.float32)
    I_ptr = images_ptr + tl.cast(images, tl.int64) * channels
    w = tl.load(w_ptr + c).to(tl.float32)
    v = tl.load(v_ptr + c).to(tl.float32)
    L_c = tl.load(batch_ptr + channels + c)
    dbs = tl.zeros((ROWS, BS), tl.float32)
    dws = tl.zeros((ROWS, BS), tl.float32)
    dvs = tl.zeros((ROWS, BS), tl.float32)
    q_rqs = tl.zeros((ROWS, BS), tl.float32)
    for step in range(0, steps):
        live, at, mask, first, s = _step(step, images, channels, c, size, ROWS, BS)
        I_nc = tl.load(I_ptr + at, live, 1.0)
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + first + s, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        _, dw, q, rq = gradients(x, dy, v, I_nc[:, None], L_c, EXACT)
        dbs += dy
        dws += dw
        dvs += rq * x
        q_rqs += q - rq
        tl.store(P_ptr + at, -w * tl.sum(rq, 1) / (I_nc * length), live)
    tl.store(db_ptr + c, tl.sum(dbs).to(db_ptr.dtype.element_ty))
    tl.store(dw_ptr + c, tl.sum(dws).to(dw_ptr.dtype.element_ty))
    tl.store(dv_ptr + c, (-w * tl.sum(dvs)).to(dv_ptr.dtype.element_ty))
    mean_c = tl.load(batch_ptr + c)
    Q_c = -w * tl.sum(q_rqs) / (L_c * length * images)
    tl.debug_barrier()  # other threads have stored P_nc
    for step in range(0, steps):  # backwards: what was read last is still in the cache
        live, at, mask, first, s = _step(steps - 1 - step, images, channels, c, size, ROWS, BS)
        mean_nc = tl.load(images_ptr + at, live, 0.0)[:, None]
        I_nc = tl.load(I_ptr + at, live, 1.0)[:, None]
        P_nc = tl.load(P_ptr + at, live, 0.0)[:, None]
        x = tl.load(x_ptr + first + s, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + first + s, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        inv_d, _, _, rq = gradients(x, dy, v, I_nc, L_c, EXACT)
        dx = w * (dy * inv_d - rq * v) + (x - mean_nc) * P_nc
        if not RUNNING:
            dx += (x - mean_c) * Q_c
        tl.store(dx_ptr + first + s, dx.to(dx_ptr.dtype.element_ty), mask, eviction_policy="evict_first")


@planner
def channel_plan(x, *others, backward: bool) -> Plan | None:
    """Choose by the shape, dtype and device of the images x and by the pass. None where a program cannot own a channel
    (images that are not contiguous, ``others`` too) or where tiles are faster: for long channels, unless 16-bit rows of
    small images are unaligned (7 x 7, 14 x 14). Numbers: the fastest of ``python -m bench.tune channels`` on an H200.

    Returns ROWS images x BS positions of a tile, and ``num_warps``."""
    if not all(t.is_contiguous() for t in (x, *others)):
        return None
    n, c, *positions = x.shape
    size = math.prod(positions)
    bs, few, wide = next_power_of_2(size), c < multiprocessors(x), x.element_size() == 4
    facts = {"backward": backward, "4_bytes": wide, "channels<SMs": few, "length<=16384": n * size <= 16384}
    unaligned = size % 8 != 0 and size < 1024 and not (few or wide)
    if not 32 < bs <= (1024 if backward else 4096) or (n * size > first_row(OWNED, facts) and not unaligned):
        return None
    plan = channel_tile(x, *first_row(TILES, facts))
    return plan if cdiv(n, plan.ROWS) <= STEPS else None


def channel_tile(x, elements: int, lane: int, most: int | None = None) -> Plan:
    """Returns the plan of tiles of about ``elements``, ``lane`` of them a lane: whole images of x, at most ``most``."""
    bs = next_power_of_2(math.prod(x.shape[2:]))
    rows = max(1, elements // bs)
    rows = min(next_power_of_2(x.shape[0]), rows if most is None else min(rows, most))
    return Plan(ROWS=rows, BS=bs, num_warps=max(4, rows * bs // (32 * lane)))


def forward(x, v, weight, bias, running_var, y, var, images, batch, eps: float, plan: Plan) -> None:
    """Fill y, var, images and batch."""
    running = var if running_var is None else running_var.contiguous()
    launch(
        _evonorm_fwd_kernel, (x.shape[1],), x, weight, bias, v, running, y, var, images, batch, *_shape(x, plan), eps,
        RUNNING=running_var is not None, ROUNDED=rounds(x.dtype, math.prod(x.shape[2:])),
        UNIT=_unit(x), **plan.meta(),
    )  # fmt: skip


def backward(dy, x, v, weight, bias, running_var, images, batch, dx, plan: Plan):
    """Fill dx; returns dv, dweight and dbias."""
    dv, dweight, dbias = (torch.empty_like(t) for t in (v, weight, bias))
    P = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    launch(
        _evonorm_bwd_kernel, (x.shape[1],), x, dy, weight, v, images, batch, P, dx, dweight, dbias, dv, *_shape(x, plan),
        RUNNING=running_var is not None, UNIT=_unit(x), **plan.meta(),
    )  # fmt: skip
    return dv, dweight, dbias


def _unit(x) -> int:
    """Returns the largest power of two up to 16 that divides the number of positions."""
    return unit_of(math.prod(x.shape[2:]))


def _shape(x, plan: Plan) -> tuple[int, ...]:
    """Returns the numbers of images, channels, positions and steps."""
    n, c, *positions = x.shape
    return n, c, math.prod(positions), cdiv(n, plan.ROWS)
