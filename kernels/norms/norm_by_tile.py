"""Norms of images of any layout, in tiles: moments, statistics, results; channel sums, group sums, gradients. For channels
last, and where groups are too few or too large for one program each."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.divisibility import multiple
from fx_fusion.kernels.lib.image_tiles import Tiles, layout_flags, offset, tile_of_program
from fx_fusion.kernels.lib.integers import next_power_of_2
from fx_fusion.kernels.lib.moments import joined, merge
from fx_fusion.kernels.norms.group_norm_math import (
    EVONORM_S0,
    Norm,
    gradients,
    input_gradient,
    of_channels,
    parameters,
    result,
    store_sums,
)
from fx_fusion.ops.launch import launch

# STEP of ``_group_norm_tile_kernel``
Y = tl.constexpr(0)
CHANNEL_SUMS = tl.constexpr(1)
DX = tl.constexpr(2)


@triton.jit
def _group_norm_moments_kernel(
    parts_ptr, stats_ptr, groups, all_groups, per_group, size, part, splits, all_parts, dof, eps, LANES: tl.constexpr
):  # fmt: skip
    """Store mean and rstd of one group, merged from the moments of its channels in each split. A split has ``part``
    positions, the last one may have fewer."""
    pid = tl.program_id(0).to(tl.int64)
    eps = tl.cast(eps, tl.float32)
    dof = tl.cast(dof, tl.float32)
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
        count_b, mean_b, m2_b = merge(
            tl.load(parts_ptr + at, live, 0.0), tl.load(parts_ptr + all_parts + at, live, 0.0), count, 0
        )
        total, mean, m2 = joined(total, mean, m2, count_b, mean_b, m2_b)
    tl.store(stats_ptr + pid, mean)
    tl.store(stats_ptr + all_groups + pid, 1.0 / tl.sqrt_rn(m2 / dof + eps))


@triton.jit
def _group_norm_tile_kernel(
    x_ptr, dy_ptr, w_ptr, b_ptr, v_ptr, stats_ptr, out_ptr, sums_ptr, group_sums_ptr,
    channels, groups, all_groups, per_group, size, part, splits, all_parts, length, dof,
    X_LAST: tl.constexpr, DY_LAST: tl.constexpr, OUT_LAST: tl.constexpr,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, STEP: tl.constexpr,
    UNIT_C: tl.constexpr, UNIT_S: tl.constexpr, OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store, by STEP, Y, the sums db, dw (and dv) of each channel over a split, or DX from A and B of the groups."""
    channels, size = multiple(channels, UNIT_C), multiple(size, UNIT_S)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    dof = tl.cast(dof, tl.float32)
    block, split, image = tile_of_program(channels, splits, BC)
    c_row = block * BC + tl.arange(0, BC)
    c = c_row[None, :]
    live_c = c < channels
    group = image * groups + c // per_group
    mean = tl.load(stats_ptr + group, live_c, 0.0)
    rstd = tl.load(stats_ptr + all_groups + group, live_c, 0.0)
    w, b, v = parameters(w_ptr, b_ptr, v_ptr, c, live_c, KIND, HAS_W, HAS_B)
    scale = rstd * w
    if STEP == DX:
        mean_A = tl.load(group_sums_ptr + group, live_c, 0.0) / length
        mean_B = tl.load(group_sums_ptr + all_groups + group, live_c, 0.0) / dof
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
        if STEP == Y:
            y = result(x, mean, scale, b, v, KIND, EXACT)
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask)
        else:
            dy = tl.load(dy_ptr + base + offset(c, s, channels, size, DY_LAST), mask, 0.0).to(tl.float32)
            db, dw, dv, dz_J, centered = gradients(x, dy, mean, scale, b, v, KIND, EXACT)
            if STEP == CHANNEL_SUMS:
                dbs += db
                dws += dw
                if KIND == EVONORM_S0:
                    dvs += dv
            else:
                dx = input_gradient(dz_J, centered, scale, rstd, mean_A, mean_B)
                tl.store(out, dx.to(out_ptr.dtype.element_ty), mask)
    if STEP == CHANNEL_SUMS:
        at = (image * splits + split) * channels + c_row
        store_sums(
            sums_ptr, at[None, :], all_parts, tl.sum(dbs, 0)[None, :], tl.sum(dws, 0)[None, :] * rstd,
            tl.sum(dvs, 0)[None, :] * scale, live_c, KIND,
        )  # fmt: skip


@triton.jit
def _group_norm_sums_kernel(
    sums_ptr, w_ptr, out_ptr, groups, all_groups, per_group, splits, all_parts,
    KIND: tl.constexpr, HAS_W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store A and B of one group, from the sums of its channels and splits."""
    pid = tl.program_id(0).to(tl.int64)
    image = pid // groups
    lanes = tl.arange(0, LANES)
    A = tl.zeros((LANES,), tl.float32)
    B = tl.zeros((LANES,), tl.float32)
    for start in range(0, per_group * splits, LANES):
        i = start + lanes
        live = i < per_group * splits
        c = (pid % groups) * per_group + i % per_group
        at = (image * splits + i // per_group) * groups * per_group + c
        w = of_channels(w_ptr, c, live, 1.0, HAS_W)
        if KIND != EVONORM_S0:
            A += tl.load(sums_ptr + at, live, 0.0) * w
        B += tl.load(sums_ptr + all_parts + at, live, 0.0) * w
    tl.store(out_ptr + pid, tl.sum(A, 0))
    tl.store(out_ptr + all_groups + pid, tl.sum(B, 0))


def forward(norm: Norm, x, y, stats, eps: float) -> None:
    """Fill y and stats."""
    tiles = Tiles(x)
    launch(
        _group_norm_moments_kernel,
        (norm.all_groups,), tiles.moments(x), stats, norm.groups, norm.all_groups, norm.per_group,
        norm.size, tiles.part, tiles.splits, tiles.all_parts, norm.dof, eps, LANES=_lanes(norm, tiles),
    )  # fmt: skip
    # STEP Y reads no dy and no sums: y and stats take their places.
    _launch_tiles(norm, tiles, x, y, stats, y, stats, stats, Y)


def backward(norm: Norm, dy, x, stats, dx):
    """Fill dx; returns db, dw (and dv) of each channel in each split of each image: (2 or 3, n · splits, c)."""
    tiles = Tiles(x)
    sums = torch.empty(norm.sums, norm.n * tiles.splits, norm.c, dtype=torch.float32, device=x.device)
    group_sums = torch.empty(2, norm.all_groups, dtype=torch.float32, device=x.device)
    _launch_tiles(norm, tiles, x, dy, stats, dx, sums, group_sums, CHANNEL_SUMS)
    launch(
        _group_norm_sums_kernel, (norm.all_groups,), sums, norm.parameters(sums)[0], group_sums, norm.groups,
        norm.all_groups, norm.per_group, tiles.splits, tiles.all_parts, KIND=norm.kind, HAS_W=norm.flags["HAS_W"],
        LANES=_lanes(norm, tiles),
    )  # fmt: skip
    _launch_tiles(norm, tiles, x, dy, stats, dx, sums, group_sums, DX)
    return sums


def _launch_tiles(norm: Norm, tiles: Tiles, x, dy, stats, out, sums, group_sums, step: tl.constexpr) -> None:
    """Launch ``_group_norm_tile_kernel`` over all tiles."""
    launch(
        _group_norm_tile_kernel, tiles.grid, x, dy, *norm.parameters(out), stats, out, sums, group_sums, norm.c, norm.groups,
        norm.all_groups, norm.per_group, norm.size, tiles.part, tiles.splits, tiles.all_parts, norm.length, norm.dof,
        STEP=step.value, **layout_flags(x=x, dy=dy, out=out), **tiles.constants, **norm.flags,
    )  # fmt: skip


def _lanes(norm: Norm, tiles: Tiles) -> int:
    """Returns how many parts of a group a program merges at once."""
    return min(1024, next_power_of_2(norm.per_group * tiles.splits))
