"""Norms of images by tiles, in any layout, with small kernels between: channels last, and where groups are too few or too
large for one program each."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.image_tiles import Tiles, lie_last, multiple, offset, place
from fx_fusion.kernels.lib.launch import launch, next_power_of_2
from fx_fusion.kernels.lib.moments import joined, merge
from fx_fusion.kernels.norms.group_norm_math import Norm, gradients, of_channels, of_input, parameters, result, store_sums


@triton.jit
def _group_moments_kernel(
    parts_ptr, stats_ptr, groups, all_groups, per_group, size, part, splits, all_parts, freedom, eps, LANES: tl.constexpr
):  # fmt: skip
    """Parts of a group -> its mean and rstd. A part is a channel of a split; all have ``part`` positions but the last."""
    pid = tl.program_id(0).to(tl.int64)
    eps = tl.cast(eps, tl.float32)
    freedom = tl.cast(freedom, tl.float32)
    image = pid // groups
    channels = groups * per_group
    lanes = tl.arange(0, LANES)
    total = 0.0
    mean = 0.0
    m2 = 0.0
    for start in range(0, per_group * splits, LANES):
        i = start + lanes
        live = i < per_group * splits
        split = i // per_group
        at = (image * splits + split) * channels + (pid % groups) * per_group + i % per_group
        count = tl.where(live, tl.minimum(part, size - split * part), 0).to(tl.float32)
        n, middle, spread = merge(
            tl.load(parts_ptr + at, live, 0.0), tl.load(parts_ptr + all_parts + at, live, 0.0), count, 0
        )
        total, mean, m2 = joined(total, mean, m2, n, middle, spread)
    tl.store(stats_ptr + pid, mean)
    tl.store(stats_ptr + all_groups + pid, 1.0 / tl.sqrt_rn(m2 / freedom + eps))


@triton.jit
def _tile_kernel(
    x_ptr, dy_ptr, w_ptr, b_ptr, v_ptr, stats_ptr, out_ptr, sums_ptr, group_sums_ptr,
    channels, groups, all_groups, per_group, size, part, splits, all_parts, length, freedom,
    X_LAST: tl.constexpr, DY_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, STEP: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """STEP 0: y. STEP 1: sums of the gradient terms of each channel over a split. STEP 2: dx from the groups' sums."""
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    freedom = tl.cast(freedom, tl.float32)
    block, split, image = place(channels, splits, BC)
    c_row = block * BC + tl.arange(0, BC)
    c = c_row[None, :]
    live_c = c < channels
    group = image * groups + c // per_group
    mean = tl.load(stats_ptr + group, live_c, 0.0)
    rstd = tl.load(stats_ptr + all_groups + group, live_c, 0.0)
    w, b, v = parameters(w_ptr, b_ptr, v_ptr, c, live_c, KIND, HAS_W, HAS_B)
    scale = rstd * w
    if STEP == 2:
        across = tl.load(group_sums_ptr + group, live_c, 0.0) / length
        along = tl.load(group_sums_ptr + all_groups + group, live_c, 0.0) / freedom
    base = image * channels * size
    c = c.to(OFFSET)
    dbs = tl.zeros((BS, BC), tl.float32)
    dws = tl.zeros((BS, BC), tl.float32)
    dvs = tl.zeros((BS, BC), tl.float32)
    end = tl.minimum(size, (split + 1) * part)
    for s0 in tl.range(split * part, end, BS, num_stages=3):
        s = (s0 + tl.arange(0, BS)[:, None]).to(OFFSET)
        mask = live_c & (s < end)
        out = out_ptr + base + offset(c, s, channels, size, OUT_LAST)
        x = tl.load(x_ptr + base + offset(c, s, channels, size, X_LAST), mask, 0.0).to(tl.float32)
        if STEP == 0:
            y = result(x, mean, scale, b, v, KIND, EXACT)
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask)
        else:
            dy = tl.load(dy_ptr + base + offset(c, s, channels, size, DY_LAST), mask, 0.0).to(tl.float32)
            db, dw, dv, direct, apart = gradients(x, dy, mean, scale, b, v, KIND, EXACT)
            if STEP == 1:
                dbs += db
                dws += dw
                if KIND == 2:
                    dvs += dv
            else:
                dx = of_input(direct, apart, scale, rstd, across, along)
                tl.store(out, dx.to(out_ptr.dtype.element_ty), mask)
    if STEP == 1:
        at = (image * splits + split) * channels + c_row
        store_sums(
            sums_ptr, at[None, :], all_parts, tl.sum(dbs, 0)[None, :], tl.sum(dws, 0)[None, :] * rstd,
            tl.sum(dvs, 0)[None, :] * scale, live_c, KIND,
        )  # fmt: skip


@triton.jit
def _group_sums_kernel(
    sums_ptr, w_ptr, out_ptr, groups, all_groups, per_group, splits, all_parts,
    KIND: tl.constexpr, HAS_W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A and B of every group, from the sums of its channels and splits."""
    pid = tl.program_id(0).to(tl.int64)
    image = pid // groups
    lanes = tl.arange(0, LANES)
    across = tl.zeros((LANES,), tl.float32)
    along = tl.zeros((LANES,), tl.float32)
    for start in range(0, per_group * splits, LANES):
        i = start + lanes
        live = i < per_group * splits
        c = (pid % groups) * per_group + i % per_group
        at = (image * splits + i // per_group) * groups * per_group + c
        w = of_channels(w_ptr, c, live, 1.0, HAS_W)
        if KIND != 2:
            across += tl.load(sums_ptr + at, live, 0.0) * w
        along += tl.load(sums_ptr + all_parts + at, live, 0.0) * w
    tl.store(out_ptr + pid, tl.sum(across, 0))
    tl.store(out_ptr + all_groups + pid, tl.sum(along, 0))


def options(norm: Norm, x, other, *, backward: bool) -> Tiles:
    return Tiles(x)


def forward(norm: Norm, x, y, stats, eps: float, tiles: Tiles) -> None:
    launch(
        _group_moments_kernel, (norm.all_groups,), tiles.moments(x), stats, norm.groups, norm.all_groups, norm.per_group,
        norm.size, tiles.part, tiles.splits, tiles.all_parts, norm.freedom, eps, LANES=_lanes(norm, tiles),
    )  # fmt: skip
    # Gradients and sums are not touched: any tensor stands for them.
    _tile(norm, tiles, x, x, stats, y, stats, stats, STEP=0)


def backward(norm: Norm, dy, x, stats, dx, tiles: Tiles):
    sums = torch.empty(norm.sums, norm.n * tiles.splits, norm.c, dtype=torch.float32, device=x.device)
    group_sums = torch.empty(2, norm.all_groups, dtype=torch.float32, device=x.device)
    _tile(norm, tiles, x, dy, stats, dx, sums, group_sums, STEP=1)
    launch(
        _group_sums_kernel, (norm.all_groups,), sums, norm.parameters[0], group_sums, norm.groups, norm.all_groups,
        norm.per_group, tiles.splits, tiles.all_parts, KIND=norm.kind, HAS_W=norm.flags["HAS_W"], LANES=_lanes(norm, tiles),
    )  # fmt: skip
    _tile(norm, tiles, x, dy, stats, dx, sums, group_sums, STEP=2)
    return sums


def _tile(norm: Norm, tiles: Tiles, x, dy, stats, out, sums, group_sums, **step) -> None:
    launch(
        _tile_kernel, tiles.grid, x, dy, *norm.parameters, stats, out, sums, group_sums, norm.c, norm.groups,
        norm.all_groups, norm.per_group, norm.size, tiles.part, tiles.splits, tiles.all_parts, norm.length, norm.freedom,
        **step, **lie_last(x=x, dy=dy, out=out), **tiles.options, **norm.flags,
    )  # fmt: skip


def _lanes(norm: Norm, tiles: Tiles) -> int:
    return min(1024, next_power_of_2(norm.per_group * tiles.splits))
