"""Norms of contiguous images: each group is one program's. A group that fits one tile stays in registers."""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.images import merge, offset_type, welford
from fx_fusion.kernels.launch import cdiv, launch, multiprocessors, next_power_of_2
from fx_fusion.kernels.norm_formulas import Norm, gradients, parameters, result, store_sums

_RESIDENT = 16384  # elements of a (padded) group that one program keeps in registers
_TILE = 4096  # elements of a tile that is one step of a loop


@triton.jit
def _group_fwd_kernel(
    x_ptr, w_ptr, b_ptr, v_ptr, y_ptr, stats_ptr, groups, all_groups, per_group, size, freedom, eps,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, RESIDENT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    freedom = tl.cast(freedom, tl.float32)
    pid = tl.program_id(0).to(tl.int64)
    first = (pid % groups) * per_group
    length = per_group * size
    base = pid * length
    if RESIDENT:
        c = tl.arange(0, BC)[:, None]
        s = tl.arange(0, BS)[None, :]
        mask = (c < per_group) & (s < size)
        x = tl.load(x_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        mean = tl.div_rn(tl.sum(tl.sum(x, 1), 0), tl.cast(length, tl.float32))  # exact where all are equal
        apart = tl.where(mask, x - mean, 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(tl.sum(apart * apart, 1), 0) / freedom + eps)
        w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
        y = result(x, mean, rstd, w, b, v, KIND)
        tl.store(y_ptr + base + c * size + s, y.to(y_ptr.dtype.element_ty), mask)
    else:
        lanes = tl.arange(0, LANES)
        means = tl.zeros((LANES,), tl.float32)
        m2s = tl.zeros((LANES,), tl.float32)
        k = 0.0
        for start in tl.range(0, length, LANES, num_stages=3):
            k += 1.0
            live = start + lanes < length
            x = tl.load(x_ptr + base + start + lanes, live, 0.0, eviction_policy="evict_last").to(tl.float32)
            means, m2s = welford(means, m2s, x, k, live)
        seen = (length - lanes + LANES - 1) // LANES
        _, mean, m2 = merge(means, m2s, tl.maximum(seen, 0).to(tl.float32), 0)
        rstd = 1.0 / tl.sqrt_rn(m2 / freedom + eps)
        # Backwards: what was read last is still in the cache.
        blocks = tl.cdiv(per_group, BC)
        for block in range(0, blocks):
            c = (blocks - 1 - block) * BC + tl.arange(0, BC)[:, None]
            w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c.to(OFFSET) * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                y = result(x, mean, rstd, w, b, v, KIND)
                tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask, eviction_policy="evict_first")
    tl.store(stats_ptr + pid, mean)
    tl.store(stats_ptr + all_groups + pid, rstd)


@triton.jit
def _group_bwd_kernel(
    x_ptr, dy_ptr, w_ptr, b_ptr, v_ptr, stats_ptr, dx_ptr, sums_ptr, groups, all_groups, per_group, size, freedom,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """``sums_ptr``: db, dw (and dv) of each channel of each image."""
    pid = tl.program_id(0).to(tl.int64)
    first = (pid % groups) * per_group
    length = per_group * size
    base = pid * length
    freedom = tl.cast(freedom, tl.float32)
    all_channels = tl.cast(all_groups, tl.int64) * per_group
    mean = tl.load(stats_ptr + pid)
    rstd = tl.load(stats_ptr + all_groups + pid)
    if RESIDENT:
        c = tl.arange(0, BC)[:, None]
        s = tl.arange(0, BS)[None, :]
        mask = (c < per_group) & (s < size)
        w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
        x = tl.load(x_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        db, dw, dv, direct, xhat = gradients(x, dy, mean, rstd, w, b, v, KIND)
        dbs = tl.sum(db, 1)[:, None]
        dws = tl.sum(dw, 1)[:, None]
        store_sums(sums_ptr, pid * per_group + c, all_channels, dbs, dws, tl.sum(dv, 1)[:, None], c < per_group, KIND)
        across = 0.0
        if KIND != 2:
            across = tl.sum(tl.sum(dbs * w, 1), 0) / length
        along = tl.sum(tl.sum(dws * w, 1), 0) / freedom
        dx = rstd * (direct - across - xhat * along)
        tl.store(dx_ptr + base + c * size + s, dx.to(dx_ptr.dtype.element_ty), mask)
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
                at = base + c.to(OFFSET) * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
                dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
                db, dw, dv, _, _ = gradients(x, dy, mean, rstd, w, b, v, KIND)
                dbs += db
                dws += dw
                if KIND == 2:
                    dvs += dv
            db_c = tl.sum(dbs, 1)[:, None]
            dw_c = tl.sum(dws, 1)[:, None]
            store_sums(
                sums_ptr, pid * per_group + c, all_channels, db_c, dw_c, tl.sum(dvs, 1)[:, None], c < per_group, KIND
            )
            if KIND != 2:
                across += tl.sum(tl.sum(tl.where(c < per_group, db_c * w, 0.0), 1), 0)
            along += tl.sum(tl.sum(tl.where(c < per_group, dw_c * w, 0.0), 1), 0)
        across = across / length
        along = along / freedom
        blocks = tl.cdiv(per_group, BC)
        for block in range(0, blocks):
            c = (blocks - 1 - block) * BC + tl.arange(0, BC)[:, None]
            w, b, v = parameters(w_ptr, b_ptr, v_ptr, first + c, c < per_group, KIND, HAS_W, HAS_B)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c.to(OFFSET) * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                _, _, _, direct, xhat = gradients(x, dy, mean, rstd, w, b, v, KIND)
                dx = rstd * (direct - across - xhat * along)
                tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask, eviction_policy="evict_first")


def options(norm: Norm, x, other, *, backward: bool) -> dict | None:
    """None where this is not the way. Tiles and warps by what was fastest on an H200 (``bench.tune``)."""
    if not (x.is_contiguous() and other.is_contiguous()):
        return None
    many, bf16 = norm.all_groups > 4 * multiprocessors(x), x.element_size() == 2
    if norm.all_groups < multiprocessors(x) and norm.length > _RESIDENT:
        return None
    bc, bs, offset = next_power_of_2(norm.per_group), next_power_of_2(norm.size), offset_type(norm.length)
    # Where groups are many, a padded tile costs more than reading a group again out of the cache.
    dense = 3 * bc * bs <= 4 * norm.length and (bf16 or backward)
    if bc * bs <= (_RESIDENT if dense or not many else _RESIDENT // 4):
        most = (16 if bf16 else 32) if backward else 8 if many else 16
        warps = 4 if bc * bs <= 2048 else 8 if bc * bs <= 8192 else most
        return {"BC": bc, "BS": bs, "RESIDENT": True, "OFFSET": offset, "num_warps": warps}
    # Few channels at once, so that no block of them is mostly padding; a warp stays in a channel.
    bc = next(b for b in (8, 4, 2, 1) if b <= bc and 4 * cdiv(norm.per_group, b) * b <= 5 * norm.per_group)
    wide = norm.size >= 2048
    if (backward and bf16 and norm.size >= 1024) or not (backward or bf16 or wide):
        tile, warps = min(bs, 512) * 8, 8
    else:
        tile = 8 * min(bs, (1024 if wide else 512) // x.element_size())
        warps = 16 if wide and not bf16 else 8 if wide and bc < 8 else 4
    return {"BC": bc, "BS": tile // bc, "RESIDENT": False, "OFFSET": offset, "num_warps": warps}


def forward(norm: Norm, x, y, stats, eps: float, given: dict) -> None:
    launch(
        _group_fwd_kernel, (norm.all_groups,), x, *norm.parameters, y, stats, norm.groups, norm.all_groups, norm.per_group,
        norm.size, norm.freedom, eps, LANES=_TILE, **given, **norm.flags,
    )  # fmt: skip


def backward(norm: Norm, dy, x, stats, dx, given: dict):
    sums = torch.empty(norm.sums, norm.n, norm.c, dtype=torch.float32, device=x.device)
    launch(
        _group_bwd_kernel, (norm.all_groups,), x, dy, *norm.parameters, stats, dx, sums, norm.groups, norm.all_groups,
        norm.per_group, norm.size, norm.freedom, **given, **norm.flags,
    )  # fmt: skip
    return sums

