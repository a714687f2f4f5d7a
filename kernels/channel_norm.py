"""Normalisation of images by statistics of groups of channels: GroupNorm, GroupNorm + SiLU, EvoNorm-S0.

    L     = elements of a group: C/G channels of one image, all positions
    mean, var over a group,  rstd = 1 / sqrt(var + eps),  x̂ = (x − mean) · rstd

    group_norm     y = x̂ · w + b
    + silu         y = z σ(z),                    z = x̂ · w + b
    evonorm_s0     y = x σ(v x) · rstd · w + b        (rstd with var · L / (L − correction))

    dz            = dy,                           with silu:  dy · σ(z) (1 + z (1 − σ(z)))
    B             = Σ_group w · dz · x̂            evonorm_s0: Σ_group w · dy · x σ(v x) · rstd
    A             = Σ_group w · dz                evonorm_s0: 0
    dx            = rstd · (dz · w · J − A / L − x̂ · B / (L − correction))      J = 1;  evonorm_s0: σ(v x) + v x σ (1 − σ)
    dw, db, dv    = sums over images and positions of dz · x̂ (or dy · x σ · rstd), dz, dy · w · rstd · x² σ (1 − σ)

Shapes     x: (n, c, ...), contiguous or channels last (no copy; anything else is copied); weight, bias, v: (c).
Dtypes     bf16 | fp16 | fp32, parameters in any of them; arithmetic in fp32, one rounding per store.
Statistics per-lane Welford, lanes merged with Chan's formula: no difference of large sums.
Saved      x, weight, bias, v, stats: mean and rstd, one of each a group.
Traffic    A group that fits one tile is read once: forward 2, backward 3 elements an element. Larger groups are read
           twice by the program that owns them, the second time out of the cache. Channels last, or too few groups to
           fill the GPU: partial sums by tiles, one small kernel, then the elements; 3 and 5 elements an element.
Source     Wu and He 2018, arXiv:1803.08494; Liu et al. 2020, arXiv:2004.02967, table 2 (S0).
"""

import math

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.launch import cdiv, column_sums, launch, multiprocessors, next_power_of_2
from fx_fusion.layouts import is_channels_last

GROUP_NORM, GROUP_NORM_SWISH, EVONORM_S0 = 0, 1, 2
_RESIDENT = 16384  # elements of a (padded) group that one program keeps in registers
_TILE = 4096  # elements of a tile that is one step of a loop


@triton.jit
def _channels(ptr, c, live, other, HAS: tl.constexpr):
    """One parameter of each channel in fp32; ``other`` where there is none."""
    if HAS:
        value = tl.load(ptr + c, live, other).to(tl.float32)
    else:
        value = tl.where(live, other, other) + tl.zeros_like(c).to(tl.float32)
    return value


@triton.jit
def _result(x, mean, rstd, w, b, v, KIND: tl.constexpr):
    if KIND == 2:
        y = x * tl.sigmoid(v * x) * (rstd * w) + b
    else:
        y = (x - mean) * rstd * w + b
        if KIND == 1:
            y = y * tl.sigmoid(y)
    return y


@triton.jit
def _gradients(x, dy, mean, rstd, w, b, v, KIND: tl.constexpr):
    """Terms of ``(db, dw, dv, dx without the group's part)`` at every element."""
    xhat = (x - mean) * rstd
    if KIND == 2:
        s = tl.sigmoid(v * x)
        bent = x * s * (1.0 - s)
        dw = dy * x * s * rstd
        dv = dy * w * rstd * x * bent
        direct = dy * w * (s + v * bent)
        db = dy
    else:
        db = dy
        if KIND == 1:
            z = xhat * w + b
            s = tl.sigmoid(z)
            db = dy * s * (1.0 + z * (1.0 - s))
        dw = db * xhat
        dv = dw
        direct = db * w
    return db, dw, dv, direct, xhat


@triton.jit
def _welford(mean, m2, x, k, live):
    """One more value in each live lane; ``k`` counts the steps, this one included."""
    delta = x - mean
    mean += tl.where(live, delta * (1.0 / k), 0.0)
    m2 += tl.where(live, delta * (x - mean), 0.0)
    return mean, m2


@triton.jit
def merge(mean, m2, count, axis: tl.constexpr):
    """Chan's formula along an axis: lanes that have seen ``count`` values each -> total count, mean and m2."""
    total = tl.sum(count, axis)
    at_least_one = tl.maximum(total, 1.0)
    middle = tl.div_rn(tl.sum(mean * count, axis), at_least_one)
    apart = mean - tl.expand_dims(middle, axis)
    return total, middle, tl.sum(m2 + apart * apart * count, axis)


# -- one program a group (contiguous images) -----------------------------------------------------------------------------
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
        w = _channels(w_ptr, first + c, c < per_group, 1.0, HAS_W)
        b = _channels(b_ptr, first + c, c < per_group, 0.0, HAS_B)
        v = _channels(v_ptr, first + c, c < per_group, 0.0, KIND == 2)
        y = _result(x, mean, rstd, w, b, v, KIND)
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
            means, m2s = _welford(means, m2s, x, k, live)
        seen = (length - lanes + LANES - 1) // LANES
        _, mean, m2 = merge(means, m2s, tl.maximum(seen, 0).to(tl.float32), 0)
        rstd = 1.0 / tl.sqrt_rn(m2 / freedom + eps)
        # Backwards: what was read last is still in the cache.
        blocks = tl.cdiv(per_group, BC)
        for block in range(0, blocks):
            c = (blocks - 1 - block) * BC + tl.arange(0, BC)[:, None]
            w = _channels(w_ptr, first + c, c < per_group, 1.0, HAS_W)
            b = _channels(b_ptr, first + c, c < per_group, 0.0, HAS_B)
            v = _channels(v_ptr, first + c, c < per_group, 0.0, KIND == 2)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c.to(OFFSET) * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                y = _result(x, mean, rstd, w, b, v, KIND)
                tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask, eviction_policy="evict_first")
    tl.store(stats_ptr + pid, mean)
    tl.store(stats_ptr + all_groups + pid, rstd)


@triton.jit
def _store_sums(sums_ptr, at, all_channels, db, dw, dv, live, KIND: tl.constexpr):
    tl.store(sums_ptr + at, db, live)
    tl.store(sums_ptr + all_channels + at, dw, live)
    if KIND == 2:
        tl.store(sums_ptr + 2 * all_channels + at, dv, live)


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
        w = _channels(w_ptr, first + c, c < per_group, 1.0, HAS_W)
        b = _channels(b_ptr, first + c, c < per_group, 0.0, HAS_B)
        v = _channels(v_ptr, first + c, c < per_group, 0.0, KIND == 2)
        x = tl.load(x_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + base + c * size + s, mask, 0.0).to(tl.float32)
        db, dw, dv, direct, xhat = _gradients(x, dy, mean, rstd, w, b, v, KIND)
        dbs = tl.sum(db, 1)[:, None]
        dws = tl.sum(dw, 1)[:, None]
        _store_sums(sums_ptr, pid * per_group + c, all_channels, dbs, dws, tl.sum(dv, 1)[:, None], c < per_group, KIND)
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
            w = _channels(w_ptr, first + c, c < per_group, 1.0, HAS_W)
            b = _channels(b_ptr, first + c, c < per_group, 0.0, HAS_B)
            v = _channels(v_ptr, first + c, c < per_group, 0.0, KIND == 2)
            dbs = tl.zeros((BC, BS), tl.float32)
            dws = tl.zeros((BC, BS), tl.float32)
            dvs = tl.zeros((BC, BS), tl.float32)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c.to(OFFSET) * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
                dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
                db, dw, dv, _, _ = _gradients(x, dy, mean, rstd, w, b, v, KIND)
                dbs += db
                dws += dw
                if KIND == 2:
                    dvs += dv
            db_c = tl.sum(dbs, 1)[:, None]
            dw_c = tl.sum(dws, 1)[:, None]
            _store_sums(
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
            w = _channels(w_ptr, first + c, c < per_group, 1.0, HAS_W)
            b = _channels(b_ptr, first + c, c < per_group, 0.0, HAS_B)
            v = _channels(v_ptr, first + c, c < per_group, 0.0, KIND == 2)
            for s0 in tl.range(0, size, BS, num_stages=3):
                s = s0 + tl.arange(0, BS)[None, :]
                mask = (c < per_group) & (s < size)
                at = base + c.to(OFFSET) * size + s
                x = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                _, _, _, direct, xhat = _gradients(x, dy, mean, rstd, w, b, v, KIND)
                dx = rstd * (direct - across - xhat * along)
                tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask, eviction_policy="evict_first")


# -- tiles of any layout, and small kernels between ------------------------------------------------------------------------
@triton.jit
def moments_kernel(
    x_ptr, parts_ptr, channels, size, part, stride_c, stride_s, splits, all_parts,
    OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Mean and m2 of each channel over ``part`` positions of one image: ``parts`` is (2, n, splits, channels)."""
    image = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    base = x_ptr + image * channels * size + c.to(OFFSET) * stride_c
    means = tl.zeros((BS, BC), tl.float32)
    m2s = tl.zeros((BS, BC), tl.float32)
    end = tl.minimum(size, (split + 1) * part)
    k = 0.0
    for s0 in tl.range(split * part, end, BS, num_stages=3):
        k += 1.0
        s = s0 + tl.arange(0, BS)[:, None]
        live = (c < channels) & (s < end)
        x = tl.load(base + s.to(OFFSET) * stride_s, live, 0.0).to(tl.float32)
        means, m2s = _welford(means, m2s, x, k, live)
    seen = tl.maximum((end - split * part - tl.arange(0, BS)[:, None] + BS - 1) // BS, 0).to(tl.float32)
    _, mean, m2 = merge(means, m2s, seen + tl.zeros((BS, BC), tl.float32), 0)
    at = (image * splits + split) * channels + tl.program_id(0) * BC + tl.arange(0, BC)
    live = tl.program_id(0) * BC + tl.arange(0, BC) < channels
    tl.store(parts_ptr + at, mean, live)
    tl.store(parts_ptr + all_parts + at, m2, live)


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
        apart = middle - mean
        both = total + n
        mean += apart * n / both
        m2 += spread + apart * apart * total * n / both
        total = both
    tl.store(stats_ptr + pid, mean)
    tl.store(stats_ptr + all_groups + pid, 1.0 / tl.sqrt_rn(m2 / freedom + eps))


@triton.jit
def _tile_kernel(
    x_ptr, dy_ptr, w_ptr, b_ptr, v_ptr, stats_ptr, out_ptr, sums_ptr, group_sums_ptr,
    channels, groups, all_groups, per_group, size, part, splits, all_parts, length, freedom,
    x_c, x_s, dy_c, dy_s, out_c, out_s,
    KIND: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, STEP: tl.constexpr,
    OFFSET: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """STEP 0: y. STEP 1: sums of the gradient terms of each channel over a split. STEP 2: dx from the groups' sums."""
    freedom = tl.cast(freedom, tl.float32)
    image = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    c_row = tl.program_id(0) * BC + tl.arange(0, BC)
    c = c_row[None, :]
    live_c = c < channels
    group = image * groups + c // per_group
    mean = tl.load(stats_ptr + group, live_c, 0.0)
    rstd = tl.load(stats_ptr + all_groups + group, live_c, 0.0)
    w = _channels(w_ptr, c, live_c, 1.0, HAS_W)
    b = _channels(b_ptr, c, live_c, 0.0, HAS_B)
    v = _channels(v_ptr, c, live_c, 0.0, KIND == 2)
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
        out = out_ptr + base + c * out_c + s * out_s
        x = tl.load(x_ptr + base + c * x_c + s * x_s, mask, 0.0).to(tl.float32)
        if STEP == 0:
            y = _result(x, mean, rstd, w, b, v, KIND)
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask)
        else:
            dy = tl.load(dy_ptr + base + c * dy_c + s * dy_s, mask, 0.0).to(tl.float32)
            db, dw, dv, direct, xhat = _gradients(x, dy, mean, rstd, w, b, v, KIND)
            if STEP == 1:
                dbs += db
                dws += dw
                if KIND == 2:
                    dvs += dv
            else:
                dx = rstd * (direct - across - xhat * along)
                tl.store(out, dx.to(out_ptr.dtype.element_ty), mask)
    if STEP == 1:
        at = (image * splits + split) * channels + c_row
        _store_sums(sums_ptr, at, all_parts, tl.sum(dbs, 0), tl.sum(dws, 0), tl.sum(dvs, 0), c_row < channels, KIND)


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
        w = _channels(w_ptr, c, live, 1.0, HAS_W)
        if KIND != 2:
            across += tl.load(sums_ptr + at, live, 0.0) * w
        along += tl.load(sums_ptr + all_parts + at, live, 0.0) * w
    tl.store(out_ptr + pid, tl.sum(across, 0))
    tl.store(out_ptr + all_groups + pid, tl.sum(along, 0))


# -- launchers --------------------------------------------------------------------------------------------------------
def as_images(x):
    """x itself if it lies in memory as images or channels last; else a contiguous copy."""
    return x if x.is_contiguous() or is_channels_last(x) else x.contiguous()


def image_strides(x) -> tuple[int, int]:
    """From channel to channel and from position to position."""
    return (1, x.shape[1]) if is_channels_last(x) else (math.prod(x.shape[2:]), 1)


def empty_images(x):
    """A result for x: channels last where x is, else contiguous."""
    if not is_channels_last(x):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


class Tiles:
    """How a tensor of images is cut into tiles: channel blocks x splits of the positions x images."""

    def __init__(self, x):
        self.n, self.c = x.shape[0], x.shape[1]
        self.size = math.prod(x.shape[2:])
        self.strides = image_strides(x)
        warp = 512 // x.element_size()  # elements that a warp loads at once
        if is_channels_last(x):
            self.bc = min(64, next_power_of_2(self.c))
            self.bs = min(next_power_of_2(self.size), max(1, 8 * warp // self.bc))
        else:  # a warp walks along a channel: sums over positions stay inside it
            self.bs = min(next_power_of_2(self.size), warp)
            self.bc = min(next_power_of_2(self.c), 8 * warp // self.bs)
        blocks = cdiv(self.c, self.bc)
        splits = max(1, min(cdiv(8 * multiprocessors(x), max(1, blocks * self.n)), cdiv(self.size, 4 * self.bs)))
        self.part = cdiv(cdiv(self.size, splits), self.bs) * self.bs
        self.splits = cdiv(self.size, self.part)
        self.grid = (blocks, self.splits, self.n)
        self.all_parts = self.n * self.splits * self.c
        self.options = {"OFFSET": offset_type(self.c * self.size), "BC": self.bc, "BS": self.bs, "num_warps": 4}

    def moments(self, x):
        """(2, n, splits, c): mean and m2 of each channel in each split."""
        parts = torch.empty(2, self.n, self.splits, self.c, dtype=torch.float32, device=x.device)
        launch(
            moments_kernel, self.grid, x, parts, self.c, self.size, self.part, *self.strides, self.splits,
            self.all_parts, **self.options,
        )  # fmt: skip
        return parts


def offset_type(elements: int):
    """Offsets inside an image: 64 bits only where they are needed."""
    return tl.int64 if elements >= 2**31 else tl.int32


def _by_group(x, other, groups: int) -> dict | None:
    """Options of the kernels that give each group to one program; None: cut into tiles."""
    n, c = x.shape[:2]
    size, per_group = math.prod(x.shape[2:]), c // groups
    if not (x.is_contiguous() and other.is_contiguous()):
        return None
    if n * groups < multiprocessors(x) and per_group * size > _RESIDENT:
        return None
    bc, bs, offset = next_power_of_2(per_group), next_power_of_2(size), offset_type(per_group * size)
    # Where groups are many, a padded tile costs more than reading a group again out of the cache.
    if bc * bs <= (_RESIDENT if n * groups <= 4 * multiprocessors(x) else _RESIDENT // 4):
        return {"BC": bc, "BS": bs, "RESIDENT": True, "OFFSET": offset, "num_warps": _warps(bc * bs)}
    # Few channels at once, so that no block of them is mostly padding; a warp stays in a channel.
    bc = next(b for b in (8, 4, 2, 1) if b <= bc and 4 * cdiv(per_group, b) * b <= 5 * per_group)
    wide = size >= 2048
    bs = min(bs, (1024 if wide else 512) // x.element_size())
    warps = 16 if wide and x.element_size() == 4 else 8 if wide and bc < 8 else 4
    return {"BC": bc, "BS": bs * (8 // bc), "RESIDENT": False, "OFFSET": offset, "num_warps": warps}


def norm_fwd(x, y, groups: int, weight, bias, v, eps: float, kind: int, correction: int = 0):
    """Fill y; ``-> stats``: (2, n·groups) fp32, means and rstds."""
    x = as_images(x)
    n, c = x.shape[:2]
    stats = torch.empty(2, n * groups, dtype=torch.float32, device=x.device)
    if not x.numel():
        return stats
    w, b, v_ = (y if t is None else t.contiguous() for t in (weight, bias, v))
    has = {"KIND": kind, "HAS_W": weight is not None, "HAS_B": bias is not None}
    size, all_groups, per_group = math.prod(x.shape[2:]), n * groups, c // groups
    freedom = float(per_group * size - correction)
    if (options := _by_group(x, y, groups)) is not None:
        launch(
            _group_fwd_kernel, (all_groups,), x, w, b, v_, y, stats, groups, all_groups, per_group, size, freedom,
            float(eps), LANES=_TILE, **options, **has,
        )  # fmt: skip
    else:
        tiles = Tiles(x)
        launch(
            _group_moments_kernel, (all_groups,), tiles.moments(x), stats, groups, all_groups, per_group, size, tiles.part,
            tiles.splits, tiles.all_parts, freedom, float(eps),
            LANES=min(1024, next_power_of_2(per_group * tiles.splits)),
        )  # fmt: skip
        launch(
            _tile_kernel, tiles.grid, x, x, w, b, v_, stats, y, stats, stats, c, groups, all_groups, per_group, size,
            tiles.part, tiles.splits, tiles.all_parts, per_group * size, freedom, *tiles.strides, *tiles.strides,
            *image_strides(y), STEP=0, **tiles.options, **has,
        )  # fmt: skip
    return stats


def norm_bwd(dy, x, groups: int, weight, bias, v, stats, kind: int, correction: int = 0):
    """``-> (dx, [dweight, dbias, dv])``: those of the parameters that there are."""
    dx = empty_images(x)
    x, dy = as_images(x), as_images(dy)
    n, c = x.shape[:2]
    rows = 3 if kind == EVONORM_S0 else 2
    dtypes = [t.dtype if t is not None else None for t in (bias, weight, v)[:rows]]
    if not x.numel():
        grads = [None if d is None else torch.zeros(c, dtype=d, device=x.device) for d in dtypes]
        return dx, [grads[1], grads[0], *grads[2:]]
    w, b, v_ = (dx if t is None else t.contiguous() for t in (weight, bias, v))
    has = {"KIND": kind, "HAS_W": weight is not None, "HAS_B": bias is not None}
    size, all_groups, per_group = math.prod(x.shape[2:]), n * groups, c // groups
    freedom = float(per_group * size - correction)
    if (options := _by_group(x, dy, groups)) is not None:
        sums = torch.empty(rows, n, c, dtype=torch.float32, device=x.device)
        launch(
            _group_bwd_kernel, (all_groups,), x, dy, w, b, v_, stats, dx, sums, groups, all_groups, per_group, size,
            freedom, **options, **has,
        )  # fmt: skip
    else:
        tiles = Tiles(x)
        sums = torch.empty(rows, n * tiles.splits, c, dtype=torch.float32, device=x.device)
        group_sums = torch.empty(2, all_groups, dtype=torch.float32, device=x.device)
        tensors = x, dy, w, b, v_, stats, dx, sums, group_sums
        numbers = (
            c, groups, all_groups, per_group, size, tiles.part, tiles.splits, tiles.all_parts, per_group * size, freedom,
            *tiles.strides, *image_strides(dy), *image_strides(dx),
        )  # fmt: skip
        launch(_tile_kernel, tiles.grid, *tensors, *numbers, STEP=1, **tiles.options, **has)
        launch(
            _group_sums_kernel, (all_groups,), sums, w, group_sums, groups, all_groups, per_group, tiles.splits,
            tiles.all_parts, KIND=kind, HAS_W=weight is not None, LANES=min(1024, next_power_of_2(per_group * tiles.splits)),
        )  # fmt: skip
        launch(_tile_kernel, tiles.grid, *tensors, *numbers, STEP=2, **tiles.options, **has)
    dbias, dweight, *dv = column_sums(sums, dtypes)
    return dx, [dweight, dbias, *dv]


def _warps(tile: int) -> int:
    return 4 if tile <= 2048 else 8 if tile <= 8192 else 16
