"""Norms of contiguous images, one program a group. A small group stays in registers: in one tile, or in two where groups are
few and their channels are no power of two (40 channels: 32 and 8)."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.divisibility import multiple
from fx_fusion.kernels.lib.moments import STEPS, merge, rebased, rounds, seen, shifted
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.kernels.norms.group_norm_math import (
    EVONORM_S0,
    Norm,
    gradients,
    input_gradient,
    parameters,
    result,
    store_sums,
)
from fx_fusion.ops.launch import launch


@triton.jit
def _tile(first, per_group, size, ROWS: tl.constexpr, BS: tl.constexpr):
    """Returns ROWS channels of a group from ``first`` on, BS positions, and which of these elements exist."""
    c = first + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, BS)[None, :]
    return c, s, (c < per_group) & (s < size)


@triton.jit
def _group_norm_fwd_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, y_ptr, stats_ptr, groups, all_groups, per_group, size, dof, eps,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, UNIT: tl.constexpr,
    ROUNDED: tl.constexpr, BC: tl.constexpr, REST: tl.constexpr, BS: tl.constexpr, RESIDENT: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Store y and the statistics of one group. ROUNDED: the sum of equal values can be rounded, so the mean is corrected."""
    eps = tl.cast(eps, tl.float32)
    dof = tl.cast(dof, tl.float32)
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
        if ROUNDED:  # before m2: ``corrected`` behind it takes more registers
            error = tl.sum(tl.where(mask, x - mean, 0.0))
            if REST:
                error += tl.sum(tl.where(mask_rest, rest - mean, 0.0))
            mean += tl.div_rn(error, count)
        centered = tl.where(mask, x - mean, 0.0)
        m2 = tl.sum(centered * centered)
        if REST:
            centered = tl.where(mask_rest, rest - mean, 0.0)
            m2 += tl.sum(centered * centered)
        rstd = 1.0 / tl.sqrt_rn(m2 / dof + eps)
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
        rstd = 1.0 / tl.sqrt_rn(m2 / dof + eps)
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
    x, dy, mean, rstd, w, b, v, c, sums_ptr, pid, per_group, all_channels, length, dof,
    KIND: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Returns the arguments of ``input_gradient`` for a block of channels: dz_J, centered, scale, and the block's shares
    in mean_A and mean_B. Stores db, dw (and dv) of each channel."""
    scale = rstd * w
    db, dw, dv, dz_J, centered = gradients(x, dy, mean, scale, b, v, KIND, EXACT)
    dbs = tl.sum(db, 1)[:, None]
    dws = tl.sum(dw, 1)[:, None] * rstd
    dvs = tl.sum(dv, 1)[:, None] * scale
    store_sums(sums_ptr, pid * per_group + c, all_channels, dbs, dws, dvs, c < per_group, KIND)
    mean_A = 0.0
    if KIND != EVONORM_S0:
        mean_A = tl.sum(dbs * w) / length
    return dz_J, centered, scale, mean_A, tl.sum(dws * w) / dof


@triton.jit
def _group_norm_bwd_kernel(
    x_ptr, dy_ptr, w_ptr, b_ptr, v_ptr, stats_ptr, dx_ptr, sums_ptr, groups, all_groups, per_group, size, dof,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, UNIT: tl.constexpr,
    BC: tl.constexpr, REST: tl.constexpr, BS: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """Store dx of one group and, in ``sums``, db, dw (and dv) of each of its channels."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    pid = tl.program_id(0).to(tl.int64)
    first = (pid % groups) * per_group
    size = multiple(size, UNIT)
    length = per_group * size
    base = pid * length
    dof = tl.cast(dof, tl.float32)
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
        dz_J, centered, scale, mean_A, mean_B = _terms(
            x, dy, mean, rstd, w, b, v, c, sums_ptr, pid, per_group, all_channels, length, dof, KIND, EXACT
        )
        if REST:
            dz_J_rest, centered_rest, scale_rest, mean_A_rest, mean_B_rest = _terms(
                x_rest, dy_rest, mean, rstd, w_rest, b_rest, v_rest, c_rest, sums_ptr, pid, per_group, all_channels,
                length, dof, KIND, EXACT,
            )  # fmt: skip
            mean_A += mean_A_rest
            mean_B += mean_B_rest
        dx = input_gradient(dz_J, centered, scale, rstd, mean_A, mean_B)
        tl.store(dx_ptr + base + c * size + s, dx.to(dx_ptr.dtype.element_ty), mask)
        if REST:
            dx = input_gradient(dz_J_rest, centered_rest, scale_rest, rstd, mean_A, mean_B)
            tl.store(dx_ptr + base + c_rest * size + s, dx.to(dx_ptr.dtype.element_ty), mask_rest)
    else:
        mean_A = 0.0
        mean_B = 0.0
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
                if KIND == EVONORM_S0:
                    dvs += dv
            db_c = tl.sum(dbs, 1)[:, None]
            dw_c = tl.sum(dws, 1)[:, None] * rstd
            dv_c = tl.sum(dvs, 1)[:, None] * (rstd * w)
            store_sums(sums_ptr, pid * per_group + c, all_channels, db_c, dw_c, dv_c, c < per_group, KIND)
            if KIND != EVONORM_S0:
                mean_A += tl.sum(tl.where(c < per_group, db_c * w, 0.0))
            mean_B += tl.sum(tl.where(c < per_group, dw_c * w, 0.0))
        mean_A = mean_A / length
        mean_B = mean_B / dof
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
                _, _, _, dz_J, centered = gradients(x, dy, mean, rstd * w, b, v, KIND, EXACT)
                dx = input_gradient(dz_J, centered, rstd * w, rstd, mean_A, mean_B)
                tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask, eviction_policy="evict_first")


def forward(norm: Norm, x, y, stats, eps: float, plan: Plan) -> None:
    """Fill y and stats."""
    launch(
        _group_norm_fwd_kernel,
        (norm.all_groups,), x, *norm.parameters(stats), y, stats, norm.groups, norm.all_groups, norm.per_group,
        norm.size, norm.dof, eps, UNIT=norm.unit, ROUNDED=rounds(x.dtype, norm.length), **plan.meta(), **norm.flags,
    )  # fmt: skip


def backward(norm: Norm, dy, x, stats, dx, plan: Plan):
    """Fill dx; returns db, dw (and dv) of each channel of each image: (2 or 3, n, c)."""
    sums = torch.empty(norm.sums, norm.n, norm.c, dtype=torch.float32, device=x.device)
    launch(
        _group_norm_bwd_kernel, (norm.all_groups,), x, dy, *norm.parameters(dx), stats, dx, sums, norm.groups,
        norm.all_groups, norm.per_group, norm.size, norm.dof, UNIT=norm.unit, **plan.meta(), **norm.flags,
    )  # fmt: skip
    return sums
