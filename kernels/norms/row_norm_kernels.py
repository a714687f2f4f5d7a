"""Kernels of ``row_norm``; its docstring has their formulas."""

import triton
import triton.language as tl

from fx_fusion.kernels.lib.divisibility import multiple
from fx_fusion.kernels.lib.e4m3 import store_rows
from fx_fusion.kernels.lib.moments import corrected


@triton.jit
def _load_h(
    x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES: tl.constexpr, STORE: tl.constexpr
):  # fmt: skip
    """Returns a tile of h in fp32: x, or round(x + residual), which STORE writes to ``h_ptr``."""
    h = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask, 0.0)
    if HAS_RES:
        h = h.to(tl.float32) + tl.load(res_ptr + rows[:, None] * res_stride + cols, mask, 0.0).to(tl.float32)
        h = h.to(h_ptr.dtype.element_ty)
        if STORE:
            tl.store(h_ptr + rows[:, None] * n + cols, h, mask)
    return h.to(tl.float32)


@triton.jit
def _y(
    y_ptr, like_h_ptr, w_ptr, b_ptr, xhat, cols, n, offset,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Returns y of a tile of xhat, as it is stored in ``y_ptr``. ``like_h_ptr``: of the dtype of h."""
    y = xhat
    if ROUND_FIRST:
        y = y.to(like_h_ptr.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        y *= offset + tl.load(w_ptr + cols, cols < n, 0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(b_ptr + cols, cols < n, 0.0).to(tl.float32)
    return y.to(y_ptr.dtype.element_ty)


@triton.jit
def row_norm_fwd_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, stats_ptr, q_ptr, scale_ptr, m, n, x_stride, res_stride, eps, offset,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CENTER: tl.constexpr, HAS_RES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND_FIRST: tl.constexpr, WIDE: tl.constexpr, ROUNDED: tl.constexpr,
    STORE_Y: tl.constexpr, STORE_Q: tl.constexpr, POWER_OF_TWO: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store y, h and the statistics of ROWS rows. WIDE: rows of more than BLOCK_N columns are read again for each of mean,
    m2 and y. ROUNDED: the sum of equal values can be rounded, so the mean is corrected. STORE_Q: y in e4m3 and a scale a row
    as well, not of WIDE rows; STORE_Y: y itself."""
    n, x_stride, res_stride = multiple(n, UNIT), multiple(x_stride, UNIT), multiple(res_stride, UNIT)
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows[:, None] < m
    count = tl.cast(n, tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    like_h_ptr = x_ptr
    if HAS_RES:
        like_h_ptr = h_ptr
    if not WIDE:
        cols = tl.arange(0, BLOCK_N)[None, :]
        mask = live & (cols < n)
        c = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES, True)
        if CENTER:
            mean = tl.div_rn(tl.sum(c, 1), count)
            c = tl.where(mask, c - mean[:, None], 0.0)
        m2 = tl.sum(c * c, 1)
        if ROUNDED:
            m2, error = corrected(m2, tl.sum(c, 1), count)
            mean += error
            c -= error[:, None]
        rstd = 1.0 / tl.sqrt_rn(m2 / n + eps)
        y = _y(y_ptr, like_h_ptr, w_ptr, b_ptr, c * rstd[:, None], cols, n, offset, HAS_WEIGHT, HAS_BIAS, ROUND_FIRST)
        if STORE_Y:
            tl.store(y_ptr + rows[:, None] * n + cols, y, mask)
        if STORE_Q:
            store_rows(q_ptr, scale_ptr, y, rows, cols, mask, m, n, POWER_OF_TWO)
    else:
        if CENTER:
            total = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)[None, :]
                mask = live & (cols < n)
                total += _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES, False)
            mean = tl.div_rn(tl.sum(total, 1), count)
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        square = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            mask = live & (cols < n)
            c = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES, False)
            c = tl.where(mask, c - mean[:, None], 0.0)
            square += c * c
            if ROUNDED:
                total += c
        m2 = tl.sum(square, 1)
        if ROUNDED:
            m2, error = corrected(m2, tl.sum(total, 1), count)
            mean += error
        rstd = 1.0 / tl.sqrt_rn(m2 / n + eps)
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            mask = live & (cols < n)
            c = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES, True)
            xhat = (c - mean[:, None]) * rstd[:, None]
            y = _y(y_ptr, like_h_ptr, w_ptr, b_ptr, xhat, cols, n, offset, HAS_WEIGHT, HAS_BIAS, ROUND_FIRST)
            tl.store(y_ptr + rows[:, None] * n + cols, y, mask)
    tl.store(stats_ptr + rows, rstd, rows < m)
    if CENTER:
        tl.store(stats_ptr + m + rows, mean, rows < m)


@triton.jit
def row_norm_bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, b_ptr, stats_ptr, dx_ptr, y_ptr, parts_ptr, q_ptr, scale_ptr,
    m, n, dy_stride, dh_stride, h_stride, offset, rows_each,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CENTER: tl.constexpr, HAS_DH: tl.constexpr,
    HAS_DY: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr, ROUND_FIRST: tl.constexpr, STORE_Y: tl.constexpr, STORE_Q: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store dx of ``rows_each`` rows and their sums dw and db. Whole rows are in registers, and so are dw and db: dy and h
    are read once. STORE_Y: and y, which was not saved; HAS_BIAS says then whether it has a bias. STORE_Q: and dx in e4m3
    with a scale a row."""
    n, dy_stride = multiple(n, UNIT), multiple(dy_stride, UNIT)
    dh_stride, h_stride = multiple(dh_stride, UNIT), multiple(h_stride, UNIT)
    offset = tl.cast(offset, tl.float32)
    cols = tl.arange(0, BLOCK_N)[None, :]
    if HAS_WEIGHT:
        w = offset + tl.load(w_ptr + cols, cols < n, 0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_each
    for start in tl.range(0, rows_each, ROWS, num_stages=STAGES):
        rows = first + start + tl.arange(0, ROWS)
        live = (rows < m) & (start + tl.arange(0, ROWS) < rows_each)
        mask = live[:, None] & (cols < n)
        xhat = tl.load(h_ptr + rows[:, None] * h_stride + cols, mask, 0.0).to(tl.float32)
        rstd = tl.load(stats_ptr + rows, live, 0.0)[:, None]
        if CENTER:
            xhat -= tl.load(stats_ptr + m + rows, live, 0.0)[:, None]
            xhat = tl.where(mask, xhat, 0.0)
        xhat *= rstd
        if STORE_Y:
            y = _y(y_ptr, h_ptr, w_ptr, b_ptr, xhat, cols, n, offset, HAS_WEIGHT, HAS_BIAS, ROUND_FIRST)
            tl.store(y_ptr + rows[:, None] * n + cols, y, mask)
        dx = tl.zeros((ROWS, BLOCK_N), tl.float32)
        if HAS_DY:
            g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols, mask, 0.0).to(tl.float32)
            if NEEDS_DW:
                if ROUND_FIRST:
                    dw += g * xhat.to(h_ptr.dtype.element_ty).to(tl.float32)
                else:
                    dw += g * xhat
            if NEEDS_DB:
                db += g
            if HAS_WEIGHT:
                g *= w
            if CENTER:
                # The select keeps g - mean(g) from being contracted into an fma of an unrounded g: it is exactly 0 where all
                # g are equal and their sum is exact. One reduction for both sums: the warps synchronize once.
                g = tl.where(mask, g, 0.0)
                sum_g_xhat, sum_g = tl.split(tl.sum(tl.join(g * xhat, g), 1))
                dx = g - xhat * (sum_g_xhat / n)[:, None] - tl.div_rn(sum_g, tl.cast(n, tl.float32))[:, None]
            else:
                dx = g - xhat * (tl.sum(g * xhat, 1) / n)[:, None]
            dx *= rstd
        if HAS_DH:
            dx += tl.load(dh_ptr + rows[:, None] * dh_stride + cols, mask, 0.0).to(tl.float32)
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + rows[:, None] * n + cols, dx, mask)
        if STORE_Q:
            store_rows(q_ptr, scale_ptr, dx, tl.where(live, rows, m), cols, mask, m, n, POWER_OF_TWO)
    part = tl.program_id(0).to(tl.int64) * n + cols
    if NEEDS_DW:
        tl.store(parts_ptr + part, tl.sum(dw, 0)[None, :], cols < n)
        part += tl.num_programs(0).to(tl.int64) * n
    if NEEDS_DB:
        tl.store(parts_ptr + part, tl.sum(db, 0)[None, :], cols < n)


@triton.jit
def row_norm_bwd_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, stats_ptr, dx_ptr, parts_ptr,
    m, n, dy_stride, dh_stride, h_stride, offset, rows_each,
    BLOCK_N: tl.constexpr, CENTER: tl.constexpr, HAS_DH: tl.constexpr, HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEEDS_DW: tl.constexpr, NEEDS_DB: tl.constexpr, ROUND_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Store dx of ``rows_each`` rows that are wider than the registers: two passes over each row. The program sums dw and db
    in its own row of ``parts``, which starts as zeros."""
    n, dy_stride = multiple(n, UNIT), multiple(dy_stride, UNIT)
    dh_stride, h_stride = multiple(dh_stride, UNIT), multiple(h_stride, UNIT)
    offset = tl.cast(offset, tl.float32)
    pid = tl.program_id(0).to(tl.int64)
    db_ptr = parts_ptr
    if NEEDS_DW:
        db_ptr += tl.num_programs(0).to(tl.int64) * n
    for row in range(pid * rows_each, tl.minimum(m, (pid + 1) * rows_each)):
        rstd = tl.load(stats_ptr + row)
        mean = 0.0
        if CENTER:
            mean = tl.load(stats_ptr + m + row)
        sum_g_xhat = tl.zeros((BLOCK_N,), tl.float32)
        sum_g = tl.zeros((BLOCK_N,), tl.float32)
        if HAS_DY:
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                live = cols < n
                xhat = tl.where(live, tl.load(h_ptr + row * h_stride + cols, live, 0.0).to(tl.float32) - mean, 0.0) * rstd
                g = tl.load(dy_ptr + row * dy_stride + cols, live, 0.0).to(tl.float32)
                at = pid * n + cols
                if NEEDS_DW:
                    dw = tl.load(parts_ptr + at, live, 0.0)
                    if ROUND_FIRST:
                        tl.store(parts_ptr + at, dw + g * xhat.to(h_ptr.dtype.element_ty).to(tl.float32), live)
                    else:
                        tl.store(parts_ptr + at, dw + g * xhat, live)
                if NEEDS_DB:
                    tl.store(db_ptr + at, tl.load(db_ptr + at, live, 0.0) + g, live)
                if HAS_WEIGHT:
                    g *= offset + tl.load(w_ptr + cols, live, 0.0).to(tl.float32)
                sum_g_xhat += g * xhat
                sum_g += g
        mean_g_xhat = tl.sum(sum_g_xhat, 0) / n
        mean_g = 0.0
        if CENTER:
            mean_g = tl.sum(sum_g, 0) / n
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            live = cols < n
            dx = tl.zeros((BLOCK_N,), tl.float32)
            if HAS_DY:
                xhat = (tl.load(h_ptr + row * h_stride + cols, live, 0.0).to(tl.float32) - mean) * rstd
                g = tl.load(dy_ptr + row * dy_stride + cols, live, 0.0).to(tl.float32)
                if HAS_WEIGHT:
                    g *= offset + tl.load(w_ptr + cols, live, 0.0).to(tl.float32)
                dx = rstd * (g - xhat * mean_g_xhat - mean_g)
            if HAS_DH:
                dx += tl.load(dh_ptr + row * dh_stride + cols, live, 0.0).to(tl.float32)
            tl.store(dx_ptr + row * n + cols, dx.to(dx_ptr.dtype.element_ty), live)
