"""Normalisation of rows, forward and backward: RMSNorm and LayerNorm, optionally behind a residual add.

    h    = x                                  (with a residual: h = round(x + residual))
    c    = h − mean(h)                        LayerNorm;  c = h for RMSNorm
    rstd = 1 / sqrt(mean(c²) + eps)
    x̂    = c · rstd
    y    = round(x̂) · w + b                   round_first (Llama: the cast comes before the weight)
    y    = x̂ · (offset + w) + b               otherwise (Gemma: offset 1; no weight: w = 1, offset 0)

    g    = dy · (offset + w)
    dh   = rstd · (g − x̂ · mean(g · x̂) − mean(g)) + dh_out          the last mean for LayerNorm only
    dw   = Σ_rows dy · x̂          db = Σ_rows dy

Shapes     h, x, residual, y: (..., n); weight, bias: (n). Any strides; results in the layout of x.
Dtypes     bf16 | fp16 | fp32, mixed; arithmetic and statistics in fp32, one rounding per store.
Saved      h, weight, stats: fp32, one row of rstd and, for LayerNorm, one of means.
Traffic    forward 2·m·n elements (4·m·n with the residual), backward 3·m·n (4·m·n), plus programs·n floats for dw.
Source     Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; Ba et al. 2016, arXiv:1607.06450. Weight gradient as
           per-program partial sums in registers, a number of programs that does not grow with m, and one final sum.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.launch import (
    as_rows,
    cdiv,
    column_sums,
    launch,
    multiprocessors,
    next_power_of_2,
    row_order,
    stages_ahead,
    write_back,
)
from fx_fusion.kernels.lib.moments import corrected, rounds

_WHOLE_ROW = 16384  # columns that one program keeps in registers; wider rows are read again, in blocks


@triton.jit
def _load_h(
    x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES: tl.constexpr, STORE: tl.constexpr
):  # fmt: skip
    """A tile of h in fp32; with a residual, the sum, rounded and (once) stored."""
    h = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask, 0.0)
    if HAS_RES:
        h = h.to(tl.float32) + tl.load(res_ptr + rows[:, None] * res_stride + cols, mask, 0.0).to(tl.float32)
        h = h.to(h_ptr.dtype.element_ty)
        if STORE:
            tl.store(h_ptr + rows[:, None] * n + cols, h, mask)
    return h.to(tl.float32)


@triton.jit
def _store_y(
    y_ptr, h_ptr, w_ptr, b_ptr, c, rstd, rows, cols, mask, n, offset,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    y = c * rstd[:, None]
    if ROUND_FIRST:
        y = y.to(h_ptr.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        y *= offset + tl.load(w_ptr + cols, cols < n, 0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(b_ptr + cols, cols < n, 0.0).to(tl.float32)
    tl.store(y_ptr + rows[:, None] * n + cols, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _fwd_kernel(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, h_ptr, stats_ptr, m, n, x_stride, res_stride, eps, offset,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CENTER: tl.constexpr, HAS_RES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND_FIRST: tl.constexpr, WIDE: tl.constexpr, ROUNDED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    n, x_stride, res_stride = multiple(n, UNIT), multiple(x_stride, UNIT), multiple(res_stride, UNIT)
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows[:, None] < m
    count = tl.cast(n, tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if not WIDE:
        cols = tl.arange(0, BLOCK_N)[None, :]
        mask = live & (cols < n)
        c = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES, True)
        if CENTER:
            mean = tl.div_rn(tl.sum(c, 1), count)
            c = tl.where(mask, c - mean[:, None], 0.0)
        m2 = tl.sum(c * c, 1)
        if ROUNDED:
            m2, off = corrected(m2, tl.sum(c, 1), count)
            mean += off
            c -= off[:, None]
        rstd = 1.0 / tl.sqrt_rn(m2 / n + eps)
        _store_y(y_ptr, h_ptr, w_ptr, b_ptr, c, rstd, rows, cols, mask, n, offset, HAS_WEIGHT, HAS_BIAS, ROUND_FIRST)
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
            m2, off = corrected(m2, tl.sum(total, 1), count)
            mean += off
        rstd = 1.0 / tl.sqrt_rn(m2 / n + eps)
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            mask = live & (cols < n)
            c = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES, True)
            _store_y(
                y_ptr, h_ptr, w_ptr, b_ptr, c - mean[:, None], rstd, rows, cols, mask, n, offset,
                HAS_WEIGHT, HAS_BIAS, ROUND_FIRST,
            )  # fmt: skip
    tl.store(stats_ptr + rows, rstd, rows < m)
    if CENTER:
        tl.store(stats_ptr + m + rows, mean, rows < m)


@triton.jit
def _bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, stats_ptr, dx_ptr, parts_ptr,
    m, n, dy_stride, dh_stride, h_stride, offset, rows_each,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CENTER: tl.constexpr, HAS_DH: tl.constexpr,
    HAS_DY: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEEDS_DW: tl.constexpr, NEEDS_DB: tl.constexpr,
    ROUND_FIRST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: one read of dy and h, one write of dx; dw in registers over all rows of the program."""
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
                # A select, so that g - mean(g) takes the rounded product on both sides: 0 where all g are equal and their
                # sum is exact. And both sums at once: the warps wait for each other once.
                g = tl.where(mask, g, 0.0)
                along, across = tl.split(tl.sum(tl.join(g * xhat, g), 1))
                dx = g - xhat * (along / n)[:, None] - tl.div_rn(across, tl.cast(n, tl.float32))[:, None]
            else:
                dx = g - xhat * (tl.sum(g * xhat, 1) / n)[:, None]
            dx *= rstd
        if HAS_DH:
            dx += tl.load(dh_ptr + rows[:, None] * dh_stride + cols, mask, 0.0).to(tl.float32)
        tl.store(dx_ptr + rows[:, None] * n + cols, dx.to(dx_ptr.dtype.element_ty), mask)
    part = tl.program_id(0).to(tl.int64) * n + cols
    if NEEDS_DW:
        tl.store(parts_ptr + part, tl.sum(dw, 0)[None, :], cols < n)
        part += tl.num_programs(0).to(tl.int64) * n
    if NEEDS_DB:
        tl.store(parts_ptr + part, tl.sum(db, 0)[None, :], cols < n)


@triton.jit
def _bwd_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, stats_ptr, dx_ptr, parts_ptr,
    m, n, dy_stride, dh_stride, h_stride, offset, rows_each,
    BLOCK_N: tl.constexpr, CENTER: tl.constexpr, HAS_DH: tl.constexpr, HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEEDS_DW: tl.constexpr, NEEDS_DB: tl.constexpr, ROUND_FIRST: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Rows wider than the registers: two passes over each; dw is summed in this program's own row of the buffer."""
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
        dot = tl.zeros((BLOCK_N,), tl.float32)
        total = tl.zeros((BLOCK_N,), tl.float32)
        if HAS_DY:
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                live = cols < n
                xhat = tl.where(live, tl.load(h_ptr + row * h_stride + cols, live, 0.0).to(tl.float32) - mean, 0.0) * rstd
                g = tl.load(dy_ptr + row * dy_stride + cols, live, 0.0).to(tl.float32)
                at = pid * n + cols
                if NEEDS_DW:
                    seen = tl.load(parts_ptr + at, live, 0.0)
                    if ROUND_FIRST:
                        tl.store(parts_ptr + at, seen + g * xhat.to(h_ptr.dtype.element_ty).to(tl.float32), live)
                    else:
                        tl.store(parts_ptr + at, seen + g * xhat, live)
                if NEEDS_DB:
                    tl.store(db_ptr + at, tl.load(db_ptr + at, live, 0.0) + g, live)
                if HAS_WEIGHT:
                    g *= offset + tl.load(w_ptr + cols, live, 0.0).to(tl.float32)
                dot += g * xhat
                total += g
        along = tl.sum(dot, 0) / n
        across = 0.0
        if CENTER:
            across = tl.sum(total, 0) / n
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            live = cols < n
            dx = tl.zeros((BLOCK_N,), tl.float32)
            if HAS_DY:
                xhat = (tl.load(h_ptr + row * h_stride + cols, live, 0.0).to(tl.float32) - mean) * rstd
                g = tl.load(dy_ptr + row * dy_stride + cols, live, 0.0).to(tl.float32)
                if HAS_WEIGHT:
                    g *= offset + tl.load(w_ptr + cols, live, 0.0).to(tl.float32)
                dx = rstd * (g - xhat * along - across)
            if HAS_DH:
                dx += tl.load(dh_ptr + row * dh_stride + cols, live, 0.0).to(tl.float32)
            tl.store(dx_ptr + row * n + cols, dx.to(dx_ptr.dtype.element_ty), live)


def _tile(n: int) -> tuple[int, int, int]:
    """Rows, columns and warps of one program: small rows share a program, so that it has some 2048 elements."""
    block = min(next_power_of_2(n), _WHOLE_ROW)
    rows = max(1, min(32, 2048 // block))
    return rows, block, 4 if block <= 2048 else 8 if block <= 8192 else 16


def _bwd_tile(n: int, bytes_an_element: int, center: bool, x) -> tuple[int, int, int, int, int]:
    """Rows, columns, warps, programs a multiprocessor and stages of the backward, by what was fastest on an H200
    (``bench.tune norms``).

    Large tiles and loads that run up to two tiles ahead (through shared memory) instead of many programs: 16384 x 4096
    takes 0.111 ms so, 0.15 ms with 2 programs of one row at a time.
    """
    block = next_power_of_2(n)
    short = bytes_an_element <= 6  # up to three tensors of 16 bits
    if short and 1024 <= block <= 2048:
        return 4096 // block, block, 4, 2, stages_ahead(4096 * bytes_an_element, x)
    rows = max(1, min(64, 8192 // block))
    warps = 8 if block < 4096 or (short and center) else 16
    return rows, block, warps, 1, stages_ahead(rows * block * bytes_an_element, x)


def norm_fwd(x, residual, weight, bias, eps: float, offset: float, round_first: bool, *, center: bool):
    """``-> (y, h, stats)`` in the layout of x; ``h`` is ``x`` itself without a residual."""
    dtype = sum_dtype(x, residual)
    order = row_order(x)
    rows = as_rows(x.permute(order))
    m, n = rows.shape
    y = torch.empty_like(x, dtype=result_dtype(dtype, weight, round_first))
    h = x if residual is None else torch.empty_like(x, dtype=dtype)
    stats = empty_stats(x, center)
    if m and n:
        res, h_rows, y_rows = (rows if t is None else as_rows(t.permute(order)) for t in (residual, h, y))
        tile_rows, block, warps = _tile(n)
        launch(_fwd_kernel, (cdiv(m, tile_rows),),
            rows, res, y_rows if weight is None else weight.contiguous(), y_rows if bias is None else bias.contiguous(),
            y_rows, h_rows, stats, m, n, rows.stride(0), res.stride(0), float(eps), float(offset),
            ROWS=tile_rows, BLOCK_N=block, CENTER=center, HAS_RES=residual is not None, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, ROUND_FIRST=round_first, WIDE=block < n, ROUNDED=center and rounds(dtype, n),
            UNIT=unit_of(n, rows.stride(0), res.stride(0)), num_warps=warps,
        )  # fmt: skip
        write_back(y, y_rows, order)
        if residual is not None:
            write_back(h, h_rows, order)
    return y, h, stats


def norm_bwd(dy, dh, h, weight, bias, stats, offset: float, round_first: bool, needs: list[bool], *, center: bool):
    """``-> (dx, dweight, dbias)``; ``dy`` or ``dh`` may be None: no gradient came that way."""
    order = row_order(h)
    rows = as_rows(h.permute(order))
    m, n = rows.shape
    dx = torch.empty_like(h)
    wanted = [t is not None and need for t, need in zip((weight, bias), needs[1:], strict=False)]
    wanted += [False] * (2 - len(wanted))
    needs_dw, needs_db = (w and dy is not None and m > 0 and n > 0 for w in wanted)
    sums: list = [None, None]
    if m and n:
        wide = n > _WHOLE_ROW // 2
        loaded = sum(t.element_size() for t in (dy, dh, h) if t is not None)
        tile_rows, block, warps, per_sm, stages = (1, 0, 16, 1, 1) if wide else _bwd_tile(n, loaded, center, h)
        programs = min(cdiv(m, tile_rows), multiprocessors(h) * per_sm)
        rows_each = cdiv(cdiv(m, programs), tile_rows) * tile_rows
        programs = cdiv(m, rows_each)
        parts = torch.empty((needs_dw + needs_db, programs, n), dtype=torch.float32, device=h.device)
        dys, dhs = (rows if g is None else as_rows(g.permute(order)) for g in (dy, dh))
        dx_rows = as_rows(dx.permute(order))
        arguments = (
            dys, dhs, rows, rows if weight is None else weight.contiguous(), stats, dx_rows, parts, m, n,
            dys.stride(0), dhs.stride(0), rows.stride(0), float(offset), rows_each,
        )  # fmt: skip
        flags = {
            "CENTER": center, "HAS_DH": dh is not None, "HAS_DY": dy is not None, "HAS_WEIGHT": weight is not None,
            "NEEDS_DW": needs_dw, "NEEDS_DB": needs_db, "ROUND_FIRST": round_first,
            "UNIT": unit_of(n, dys.stride(0), dhs.stride(0), rows.stride(0)),
        }  # fmt: skip
        if wide:
            parts.zero_()
            launch(_bwd_wide_kernel, (programs,), *arguments, BLOCK_N=8192, num_warps=16, **flags)
        else:
            launch(_bwd_kernel, (programs,),
                *arguments, ROWS=tile_rows, BLOCK_N=block, STAGES=stages, num_warps=warps, **flags
            )  # fmt: skip
        write_back(dx, dx_rows, order)
        if needs_dw or needs_db:
            wanted_dtypes = [t.dtype for t, needed in ((weight, needs_dw), (bias, needs_db)) if needed]
            made = column_sums(parts, wanted_dtypes)
            sums = [made[0] if needs_dw else None, made[-1] if needs_db else None]
    # Where no gradient is wanted, or none came: an unread placeholder, or zeros.
    grads = (
        s if s is not None else torch.zeros_like(t) if want else dx.new_empty(0)
        for t, s, want in zip((weight, bias), sums, wanted, strict=True)
    )  # fmt: skip
    return dx, *grads


def empty_stats(x: Tensor, center: bool) -> Tensor:
    """rstd a row and, for LayerNorm, behind them the means."""
    m = math.prod(x.shape[:-1])
    return torch.empty((2, m) if center else (m,), dtype=torch.float32, device=x.device)


def sum_dtype(x: Tensor, residual) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def result_dtype(dtype: torch.dtype, weight, round_first: bool) -> torch.dtype:
    """The weight multiplies after the cast (and may promote), or before it."""
    return torch.promote_types(dtype, weight.dtype) if round_first and weight is not None else dtype
