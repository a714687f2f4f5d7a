"""RMSNorm, forward and backward, optionally behind a residual add.

    h    = x                                  (add_rms_norm: h = round(x + residual))
    rstd = 1 / sqrt(mean(h²) + eps)
    x̂    = h · rstd
    y    = round(x̂) · w                       round_first (Llama: the cast comes before the weight)
    y    = x̂ · (offset + w)                   otherwise (Gemma: offset 1; no weight: w = 1, offset 0)

    g    = dy · (offset + w)
    dh   = rstd · (g − x̂ · mean(g · x̂)) + dh_out
    dw   = Σ_rows dy · x̂

Shapes     h, x, residual, y: (..., n); weight: (n). Any strides; results in the layout of x.
Dtypes     bf16 | fp16 | fp32, mixed; arithmetic and statistics in fp32, one rounding per store.
Saved      h, weight, rstd (fp32, one number a row).
Traffic    forward 2·m·n elements (4·m·n with the residual), backward 3·m·n (4·m·n), plus programs·n floats for dw.
Source     Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; weight gradient as per-program partial sums in registers,
           a number of programs that does not grow with m, and one final sum.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fx_fusion.kernels.launch import as_rows, cdiv, multiprocessors, next_power_of_2, row_order, write_back
from fx_fusion.op import fused_op

_WHOLE_ROW = 16384  # columns that one program keeps in registers; wider rows are read twice, in blocks


@triton.jit
def _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES: tl.constexpr):
    """A tile of h in fp32; with a residual, the sum, rounded and stored."""
    h = tl.load(x_ptr + rows[:, None] * x_stride + cols, mask, 0.0)
    if HAS_RES:
        h = h.to(tl.float32) + tl.load(res_ptr + rows[:, None] * res_stride + cols, mask, 0.0).to(tl.float32)
        h = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + rows[:, None] * n + cols, h, mask)
    return h.to(tl.float32)


@triton.jit
def _store_y(y_ptr, h_ptr, w_ptr, h, rstd, rows, cols, mask, n, offset, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr):
    y = h * rstd[:, None]
    if ROUND_FIRST:
        y = y.to(h_ptr.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        y *= offset + tl.load(w_ptr + cols, cols < n, 0.0).to(tl.float32)
    tl.store(y_ptr + rows[:, None] * n + cols, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _fwd_kernel(
    x_ptr, res_ptr, w_ptr, y_ptr, h_ptr, rstd_ptr, m, n, x_stride, res_stride, eps, offset,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_RES: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows[:, None] < m
    if not WIDE:
        cols = tl.arange(0, BLOCK_N)[None, :]
        mask = live & (cols < n)
        h = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(h * h, 1) / n + eps)
        _store_y(y_ptr, h_ptr, w_ptr, h, rstd, rows, cols, mask, n, offset, HAS_WEIGHT, ROUND_FIRST)
    else:
        square = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            mask = live & (cols < n)
            h = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES)
            square += h * h
        rstd = 1.0 / tl.sqrt_rn(tl.sum(square, 1) / n + eps)
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            mask = live & (cols < n)
            h = _load_h(x_ptr, res_ptr, h_ptr, rows, cols, mask, n, x_stride, res_stride, HAS_RES)
            _store_y(y_ptr, h_ptr, w_ptr, h, rstd, rows, cols, mask, n, offset, HAS_WEIGHT, ROUND_FIRST)
    tl.store(rstd_ptr + rows, rstd, rows < m)


@triton.jit
def _bwd_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, m, n, dy_stride, dh_stride, h_stride, offset, rows_each,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_DH: tl.constexpr, HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEEDS_DW: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: one read of dy and h, one write of dx; dw in registers over all rows of the program."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    if HAS_WEIGHT:
        w = offset + tl.load(w_ptr + cols, cols < n, 0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_each
    for start in range(0, rows_each, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        live = (rows < m) & (start + tl.arange(0, ROWS) < rows_each)
        mask = live[:, None] & (cols < n)
        h = tl.load(h_ptr + rows[:, None] * h_stride + cols, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, live, 0.0)[:, None]
        xhat = h * rstd
        dx = tl.zeros((ROWS, BLOCK_N), tl.float32)
        if HAS_DY:
            g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols, mask, 0.0).to(tl.float32)
            if NEEDS_DW:
                if ROUND_FIRST:
                    dw += g * xhat.to(h_ptr.dtype.element_ty).to(tl.float32)
                else:
                    dw += g * xhat
            if HAS_WEIGHT:
                g *= w
            dx = rstd * (g - xhat * (tl.sum(g * xhat, 1) / n)[:, None])
        if HAS_DH:
            dx += tl.load(dh_ptr + rows[:, None] * dh_stride + cols, mask, 0.0).to(tl.float32)
        tl.store(dx_ptr + rows[:, None] * n + cols, dx.to(dx_ptr.dtype.element_ty), mask)
    if NEEDS_DW:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * n + cols, tl.sum(dw, 0)[None, :], cols < n)


@triton.jit
def _bwd_wide_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, m, n, dy_stride, dh_stride, h_stride, offset, rows_each,
    BLOCK_N: tl.constexpr, HAS_DH: tl.constexpr, HAS_DY: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEEDS_DW: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Rows wider than the registers: two passes over each; dw is summed in this program's own row of the buffer."""
    pid = tl.program_id(0).to(tl.int64)
    for row in range(pid * rows_each, tl.minimum(m, (pid + 1) * rows_each)):
        rstd = tl.load(rstd_ptr + row)
        dot = tl.zeros((BLOCK_N,), tl.float32)
        if HAS_DY:
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                xhat = tl.load(h_ptr + row * h_stride + cols, cols < n, 0.0).to(tl.float32) * rstd
                g = tl.load(dy_ptr + row * dy_stride + cols, cols < n, 0.0).to(tl.float32)
                if NEEDS_DW:
                    at = dw_ptr + pid * n + cols
                    seen = tl.load(at, cols < n, 0.0)
                    if ROUND_FIRST:
                        tl.store(at, seen + g * xhat.to(h_ptr.dtype.element_ty).to(tl.float32), cols < n)
                    else:
                        tl.store(at, seen + g * xhat, cols < n)
                if HAS_WEIGHT:
                    g *= offset + tl.load(w_ptr + cols, cols < n, 0.0).to(tl.float32)
                dot += g * xhat
        mean = tl.sum(dot, 0) / n
        for start in range(0, n, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            dx = tl.zeros((BLOCK_N,), tl.float32)
            if HAS_DY:
                xhat = tl.load(h_ptr + row * h_stride + cols, cols < n, 0.0).to(tl.float32) * rstd
                g = tl.load(dy_ptr + row * dy_stride + cols, cols < n, 0.0).to(tl.float32)
                if HAS_WEIGHT:
                    g *= offset + tl.load(w_ptr + cols, cols < n, 0.0).to(tl.float32)
                dx = rstd * (g - xhat * mean)
            if HAS_DH:
                dx += tl.load(dh_ptr + row * dh_stride + cols, cols < n, 0.0).to(tl.float32)
            tl.store(dx_ptr + row * n + cols, dx.to(dx_ptr.dtype.element_ty), cols < n)


def _tile(n: int) -> tuple[int, int, int]:
    """Rows, columns and warps of one program: small rows share a program, so that it has some 2048 elements."""
    block = min(next_power_of_2(n), _WHOLE_ROW)
    rows = max(1, min(16, 2048 // block))
    return rows, block, 4 if block <= 2048 else 8 if block <= 8192 else 16


def norm_fwd(x, residual, weight, eps: float, offset: float, round_first: bool):
    """``-> (y, h, rstd)`` in the layout of x; ``h`` is ``x`` itself without a residual."""
    dtype = sum_dtype(x, residual)
    order = row_order(x)
    rows = as_rows(x.permute(order))
    m, n = rows.shape
    y = torch.empty_like(x, dtype=result_dtype(dtype, weight, round_first))
    h = x if residual is None else torch.empty_like(x, dtype=dtype)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    if m and n:
        res, h_rows, y_rows = (rows if t is None else as_rows(t.permute(order)) for t in (residual, h, y))
        tile_rows, block, warps = _tile(n)
        _fwd_kernel[(cdiv(m, tile_rows),)](
            rows, res, y_rows if weight is None else weight.contiguous(), y_rows, h_rows, rstd, m, n, rows.stride(0),
            res.stride(0), float(eps), float(offset), ROWS=tile_rows, BLOCK_N=block, HAS_RES=residual is not None,
            HAS_WEIGHT=weight is not None, ROUND_FIRST=round_first, WIDE=block < n, num_warps=warps,
        )  # fmt: skip
        write_back(y, y_rows, order)
        if residual is not None:
            write_back(h, h_rows, order)
    return y, h, rstd


def norm_bwd(dy, dh, h, weight, rstd, offset: float, round_first: bool, needs: list[bool]):
    """``-> (dx, dweight)``; ``dy`` or ``dh`` may be None: no gradient came that way."""
    order = row_order(h)
    rows = as_rows(h.permute(order))
    m, n = rows.shape
    dx = torch.empty_like(h)
    needs_dw = weight is not None and needs[1] and dy is not None
    if not (m and n):
        return dx, torch.zeros_like(weight) if weight is not None and needs[1] else dx.new_empty(0)
    wide = n > _WHOLE_ROW // 2
    tile_rows, block, warps = _tile(n)
    # As many programs as fit the registers of a multiprocessor at once, each over its share of the rows.
    programs = min(cdiv(m, tile_rows), multiprocessors(h) * (16 // warps))
    rows_each = cdiv(cdiv(m, programs), tile_rows) * tile_rows
    programs = cdiv(m, rows_each)
    dw = torch.empty((programs if needs_dw else 0, n), dtype=torch.float32, device=h.device)
    dys, dhs = (rows if g is None else as_rows(g.permute(order)) for g in (dy, dh))
    dx_rows = as_rows(dx.permute(order))
    arguments = (
        dys, dhs, rows, rows if weight is None else weight.contiguous(), rstd, dx_rows, dw, m, n,
        dys.stride(0), dhs.stride(0), rows.stride(0), float(offset), rows_each,
    )  # fmt: skip
    flags = {
        "HAS_DH": dh is not None, "HAS_DY": dy is not None, "HAS_WEIGHT": weight is not None, "NEEDS_DW": needs_dw,
        "ROUND_FIRST": round_first,
    }  # fmt: skip
    if wide:
        dw.zero_()
        _bwd_wide_kernel[(programs,)](*arguments, BLOCK_N=8192, num_warps=16, **flags)
    else:
        _bwd_kernel[(programs,)](*arguments, ROWS=tile_rows, BLOCK_N=block, num_warps=warps, **flags)
    write_back(dx, dx_rows, order)
    if needs_dw:
        dweight = dw.sum(0).to(weight.dtype)
    else:  # no gradient wanted, or none came: an unread placeholder, or zeros
        dweight = torch.zeros_like(weight) if weight is not None and needs[1] else dx.new_empty(0)
    return dx, dweight


def sum_dtype(x: Tensor, residual) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def result_dtype(dtype: torch.dtype, weight, round_first: bool) -> torch.dtype:
    """The weight multiplies after the cast (and may promote), or before it."""
    return torch.promote_types(dtype, weight.dtype) if round_first and weight is not None else dtype


def _fwd(x, weight, eps, offset, round_first):
    y, _, rstd = norm_fwd(x, None, weight, eps, offset, round_first)
    return y, rstd


def _bwd(dy, x, weight, rstd, eps, offset, round_first, needs):
    return norm_bwd(dy, None, x, weight, rstd, offset, round_first, needs)


def _fake(x, weight, eps, offset, round_first):
    y = torch.empty_like(x, dtype=result_dtype(x.dtype, weight, round_first))
    return y, torch.empty(math.prod(x.shape[:-1]), dtype=torch.float32, device=x.device)


rms_norm = fused_op(
    "rms_norm",
    ("(Tensor x, Tensor? weight, float eps, float offset, bool round_first) -> (Tensor y, Tensor rstd)", _fwd),
    (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float eps, float offset, bool round_first, bool[] needs)"
        " -> (Tensor dx, Tensor dweight)",
        _bwd,
    ),
    fake=_fake,
    stats=("rstd",),
    grads=("x", "weight"),
)
