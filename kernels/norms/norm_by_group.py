"""Norms of contiguous images: each group is one program's. A group that is small stays in registers: in one tile, or, where
groups are few and their channels no power of two, in two (40 channels: 32 and 8)."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.image_tiles import multiple
from fx_fusion.kernels.lib.launch import cdiv, launch, multiprocessors, next_power_of_2
from fx_fusion.kernels.lib.moments import STEPS, merge, rebased, rounds, seen, shifted
from fx_fusion.kernels.norms.group_norm_math import (
    EVONORM_S0,
    GROUP_NORM,
    Norm,
    gradients,
    of_input,
    parameters,
    result,
    store_sums,
)

_RESIDENT = 32768  # elements of a (padded) group that one program keeps in registers, at most


@triton.jit
def _tile(first, per_group, size, ROWS: tl.constexpr, BS: tl.constexpr):
    """Channels of a group from ``first`` on, positions, and what there is of them."""
    c = first + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, BS)[None, :]
    return c, s, (c < per_group) & (s < size)


@triton.jit
def _group_fwd_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, y_ptr, stats_ptr, groups, all_groups, per_group, size, freedom, eps,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, UNIT: tl.constexpr,
    ROUNDED: tl.constexpr, BC: tl.constexpr, REST: tl.constexpr, BS: tl.constexpr, RESIDENT: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    freedom = tl.cast(freedom, tl.float32)
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    pid = tl.program_id(0).to(tl.int64)
    first = (pid % groups) * per_group
    size = multiple(size, UNIT)
    length = per_group * size
    base = pid * length
    if RESIDENT:
        c, s, mask = _tile(0, per_group, size, BC, BS)
        x = tl.load(x_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        total = tl.sum(x)
        if REST:
            c_rest, s, mask_rest = _tile(BC, per_group, size, REST, BS)
            rest = tl.load(x_ptr + base + c_rest * size + s, mask_rest, 0.0).to(tl.float32)
            total += tl.sum(rest)
        count = tl.cast(length, tl.float32)
        mean = tl.div_rn(total, count)
        if ROUNDED:  # ``corrected`` afterwards takes more registers
            off = tl.sum(tl.where(mask, x - mean, 0.0))
            if REST:
                off += tl.sum(tl.where(mask_rest, rest - mean, 0.0))
            mean += tl.div_rn(off, count)
        apart = tl.where(mask, x - mean, 0.0)
        m2 = tl.sum(apart * apart)
        if REST:
            apart = tl.where(mask_rest, rest - mean, 0.0)
            m2 += tl.sum(apart * apart)
        rstd = 1.0 / tl.sqrt_rn(m2 / freedom + eps)
        w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
        y = result(x, mean, rstd * w, b, v, KIND, EXACT)
        tl.store(y_ptr + base + c * size + s, y.to(y_ptr.dtype.element_ty), mask)
        if REST:
            w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c_rest, c_rest < per_group, KIND, HAS_W, HAS_B)
            y = result(rest, mean, rstd * w, b, v, KIND, EXACT)
            tl.store(y_ptr + base + c_rest * size + s, y.to(y_ptr.dtype.element_ty), mask_rest)
    else:
        lanes = tl.arange(0, LANES)
        sums = tl.zeros((LANES,), tl.float32)
        squares = tl.zeros((LANES,), tl.float32)
        shift = tl.load(x_ptr + base + lanes, lanes < length, 0.0, eviction_policy="evict_last").to(tl.float32)
        for first_step in range(LANES, length, STEPS * LANES):
            stop = tl.minimum(length, first_step + STEPS * LANES)
            for start in tl.range(first_step, stop, LANES, num_stages=3):
                live = start + lanes < length
                x = tl.load(x_ptr + base + start + lanes, live, 0.0, eviction_policy="evict_last").to(tl.float32)
                sums, squares = shifted(sums, squares, x, shift, live)
            sums, squares, shift = rebased(sums, squares, shift, seen(stop, LANES))
        _, mean, m2 = merge(shift, squares, seen(length, LANES), 0)
        rstd = 1.0 / tl.sqrt_rn(m2 / freedom + eps)
        # Backwards: what was read last is still in the cache.
        blocks = tl.cdiv(per_group, BC)
        for block in range(0, blocks):
            c = (blocks - 1 - block) * BC + tl.arange(0, BC)[:, None]
            w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                y = result(x, mean, rstd * w, b, v, KIND, EXACT)
                tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask, eviction_policy="evict_first")
    tl.store(stats_ptr + pid, mean)
    tl.store(stats_ptr + all_groups + pid, rstd)


@triton.jit
def _terms(
    x, dy, mean, rstd, w, b, v, c, sums_ptr, pid, per_group, all_channels, length, freedom,
    KIND: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What ``of_input`` takes of some channels of a group, their shares in its sums too. Stores the sums of each channel."""
    scale = rstd * w
    db, dw, dv, direct, apart = gradients(x, dy, mean, scale, b, v, KIND, EXACT)
    dbs = tl.sum(db, 1)[:, None]
    dws = tl.sum(dw, 1)[:, None] * rstd
    dvs = tl.sum(dv, 1)[:, None] * scale
    store_sums(sums_ptr, pid * per_group + c, all_channels, dbs, dws, dvs, c < per_group, KIND)
    across = 0.0
    if KIND != 2:
        across = tl.sum(dbs * w) / length
    return direct, apart, scale, across, tl.sum(dws * w) / freedom


@triton.jit
def _group_bwd_kernel(
    x_ptr, dy_ptr, w_ptr, b_ptr, v_ptr, stats_ptr, dx_ptr, sums_ptr, groups, all_groups, per_group, size, freedom,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, UNIT: tl.constexpr,
    BC: tl.constexpr, REST: tl.constexpr, BS: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """``sums_ptr``: db, dw (and dv) of each channel of each image."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    pid = tl.program_id(0).to(tl.int64)
    first = (pid % groups) * per_group
    size = multiple(size, UNIT)
    length = per_group * size
    base = pid * length
    freedom = tl.cast(freedom, tl.float32)
    all_channels = tl.cast(all_groups, tl.int64) * per_group
    mean = tl.load(stats_ptr + pid)
    rstd = tl.load(stats_ptr + all_groups + pid)
    if RESIDENT:
        c, s, mask = _tile(0, per_group, size, BC, BS)
        w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
        x = tl.load(x_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        if REST:
            c_rest, s, mask_rest = _tile(BC, per_group, size, REST, BS)
            w_rest, b_rest, v_rest = parameters(w_ptr, b_ptr, v_ptr, first + c_rest, c_rest < per_group, KIND, HAS_W, HAS_B)
            x_rest = tl.load(x_ptr + base + c_rest * size + s, mask_rest, 0.0).to(tl.float32)
            dy_rest = tl.load(dy_ptr + base + c_rest * size + s, mask_rest, 0.0).to(tl.float32)
        direct, apart, scale, across, along = _terms(
            x, dy, mean, rstd, w, b, v, c, sums_ptr, pid, per_group, all_channels, length, freedom, KIND, EXACT
        )
        if REST:
            direct_rest, apart_rest, scale_rest, across_rest, along_rest = _terms(
                x_rest, dy_rest, mean, rstd, w_rest, b_rest, v_rest, c_rest, sums_ptr, pid, per_group, all_channels,
                length, freedom, KIND, EXACT,
            )  # fmt: skip
            across += across_rest
            along += along_rest
        dx = of_input(direct, apart, scale, rstd, across, along)
        tl.store(dx_ptr + base + c * size + s, dx.to(dx_ptr.dtype.element_ty), mask)
        if REST:
            dx = of_input(direct_rest, apart_rest, scale_rest, rstd, across, along)
            tl.store(dx_ptr + base + c_rest * size + s, dx.to(dx_ptr.dtype.element_ty), mask_rest)
    else:
        across = 0.0
        along = 0.0
        for c0 in range(0, per_group, BC):
            c = c0 + tl.arange(0, BC)[:, None]
            w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
            dbs = tl.zeros((BC, BS), tl.float32)
            dws = tl.zeros((BC, BS), tl.float32)
            dvs = tl.zeros((BC, BS), tl.float32)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
                dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
                db, dw, dv, _, _ = gradients(x, dy, mean, rstd * w, b, v, KIND, EXACT)
                dbs += db
                dws += dw
                if KIND == 2:
                    dvs += dv
            db_c = tl.sum(dbs, 1)[:, None]
            dw_c = tl.sum(dws, 1)[:, None] * rstd
            dv_c = tl.sum(dvs, 1)[:, None] * (rstd * w)
            store_sums(sums_ptr, pid * per_group + c, all_channels, db_c, dw_c, dv_c, c < per_group, KIND)
            if KIND != 2:
                across += tl.sum(tl.where(c < per_group, db_c * w, 0.0))
            along += tl.sum(tl.where(c < per_group, dw_c * w, 0.0))
        across = across / length
        along = along / freedom
        blocks = tl.cdiv(per_group, BC)
        for block in range(0, blocks):
            c = (blocks - 1 - block) * BC + tl.arange(0, BC)[:, None]
            w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                _, _, _, direct, apart = gradients(x, dy, mean, rstd * w, b, v, KIND, EXACT)
                dx = of_input(direct, apart, rstd * w, rstd, across, along)
                tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask, eviction_policy="evict_first")


def options(norm: Norm, x, other, *, backward: bool) -> dict | None:
    """None where this is not the way. Tiles and warps by what was fastest on an H200 (``bench.tune``)."""
    if not (x.is_contiguous() and other.is_contiguous()):
        return None
    if norm.length >= 2**31 or (norm.all_groups < multiprocessors(x) and norm.length > 16384):
        return None
    bc, bs = next_power_of_2(norm.per_group), next_power_of_2(norm.size)
    return _resident(norm, x, bc, bs, backward) or _steps(norm, x, bc, backward)


def in_two(channels: int) -> tuple[int, int]:
    """Channels of two tiles that hold so many, powers of two; of one and 0 where two are no less padding."""
    whole = next_power_of_2(channels)
    parts = whole // 2, next_power_of_2(channels - whole // 2)
    return parts if sum(parts) < whole else (whole, 0)


def _resident(norm: Norm, x, bc: int, bs: int, backward: bool) -> dict | None:
    """For a group that stays in registers, as one tile or two. Where groups are many, tiles that are mostly padding cost
    more than reading a group again out of the cache."""
    wide, few, rest = x.element_size() == 4, norm.all_groups <= 4 * multiprocessors(x), 0
    plain = norm.kind == GROUP_NORM
    if few and bc * bs > 8192 and ((plain or not wide) if backward else (wide or not plain)):
        bc, rest = in_two(norm.per_group)
    padded = (bc + rest) * bs
    if few and backward:
        most = 16384 if wide else 20480
    elif few:
        most = 16384 if plain or rest else 8192
    elif 3 * padded > 4 * norm.length or norm.kind == EVONORM_S0:
        most = 4096
    elif wide and not backward:
        most = 32768
    else:
        most = 16384 if plain else 8192
    if padded > min(most, _RESIDENT):
        return None
    if backward:
        warps = 4 if padded <= 4096 else 8 if padded <= 10240 else 32 if wide else 16
    else:
        warps = 2 if padded <= 2048 else max(4, next_power_of_2(padded) // 2048)
    return {"RESIDENT": True, "BC": bc, "REST": rest, "BS": bs, "LANES": 1024, "num_warps": warps}


def _steps(norm: Norm, x, bc: int, backward: bool) -> dict:
    """For a group that is read twice: few channels at once, so that no block of them is mostly padding; a warp stays in a
    channel. ``LANES``: of the forward's first pass."""
    bc = next(b for b in (8, 4, 2, 1) if b <= bc and 4 * cdiv(norm.per_group, b) * b <= 5 * norm.per_group)
    few, wide = norm.all_groups <= 2 * multiprocessors(x), x.element_size() == 4
    if backward:
        small = norm.size < (2048 if wide else 1024)
        tile, warps, lanes = (4096, 8, 0) if not small else (2048, 4, 0) if wide else (1024, 4, 0)
    elif norm.size < 1024:
        tile, warps, lanes = (4096, 8, 2048) if wide else (2048, 4, 1024)
    else:
        tile, warps, lanes = (8192, 8, 4096) if few and norm.size >= 2048 else (4096, 8, 2048)
    bs = min(next_power_of_2(norm.size), tile // bc)
    return {"RESIDENT": False, "BC": bc, "REST": 0, "BS": bs, "LANES": lanes, "num_warps": warps}


def forward(norm: Norm, x, y, stats, eps: float, given: dict) -> None:
    launch(
        _group_fwd_kernel, (norm.all_groups,), x, *norm.parameters, y, stats, norm.groups, norm.all_groups, norm.per_group,
        norm.size, norm.freedom, eps, UNIT=norm.unit, ROUNDED=rounds(x.dtype, norm.length), **given, **norm.flags,
    )  # fmt: skip


def backward(norm: Norm, dy, x, stats, dx, given: dict):
    sums = torch.empty(norm.sums, norm.n, norm.c, dtype=torch.float32, device=x.device)
    given = {name: option for name, option in given.items() if name != "LANES"}
    launch(
        _group_bwd_kernel, (norm.all_groups,), x, dy, *norm.parameters, stats, dx, sums, norm.groups, norm.all_groups,
        norm.per_group, norm.size, norm.freedom, UNIT=norm.unit, **given, **norm.flags,
    )  # fmt: skip
    return sums
