"""Normalization of rows, forward and backward: RMSNorm and LayerNorm, optionally behind a residual add.

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
Traffic    forward 2·m·n elements (4·m·n with the residual), backward 3·m·n (4·m·n), plus programs·n floats for dw, and
           m·n more where the backward hands out y because it was not saved (``fx_fusion/memory/norms.py``).
Source     Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; Ba et al. 2016, arXiv:1607.06450. Weight gradient as
           per-program partial sums in registers, a number of programs that does not grow with m, and one final sum.
"""

import math

import torch
from torch import Tensor

from fx_fusion.kernels.lib.column_sums import column_sums
from fx_fusion.kernels.lib.device import multiprocessors, stages_ahead
from fx_fusion.kernels.lib.divisibility import unit_of
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.moments import rounds
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.rows import as_rows, row_order, write_back
from fx_fusion.kernels.norms.row_norm_kernels import row_norm_bwd_kernel, row_norm_bwd_wide_kernel, row_norm_fwd_kernel
from fx_fusion.ops.launch import launch, refuse_symbols

_WHOLE_ROW = 16384  # columns that one program keeps in registers; wider rows are read again, in blocks


@planner
def row_norm_fwd_plan(n: int) -> Plan:
    """Choose by the columns ``n`` of a row. Numbers: a rule of thumb, as the forward is bound by memory: tiles of 2048
    elements or of one row, at most 1024 elements per warp. Rows of more than BLOCK_N columns are walked in blocks.

    Returns ROWS x BLOCK_N of a tile and ``num_warps``."""
    block = min(next_power_of_2(n), _WHOLE_ROW)
    rows = max(1, min(32, 2048 // block))
    return Plan(ROWS=rows, BLOCK_N=block, num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16)


@planner
def row_norm_bwd_plan(n: int, bytes_per_element: int, center: bool, x) -> Plan:
    """Choose by the columns ``n`` of a row, by the ``bytes_per_element`` of all tensors that are loaded, by the norm
    (``center``: LayerNorm) and by the shared memory of x's device. Numbers: the fastest of ``python -m bench.tune norms``
    on an H200.

    Large tiles and loads that run up to two tiles ahead (through shared memory) instead of many programs: 16384 x 4096
    takes 0.111 ms so, 0.15 ms with 2 programs of one row at a time. Rows of more than BLOCK_N columns are walked in blocks.

    Returns ROWS x BLOCK_N of a tile, STAGES of the loop over the tiles, ``num_warps``, and ``programs_per_sm``, the
    persistent programs of one multiprocessor."""
    if n > _WHOLE_ROW // 2:
        return Plan(ROWS=1, BLOCK_N=_WHOLE_ROW // 2, STAGES=1, num_warps=16, programs_per_sm=1)
    block = next_power_of_2(n)
    short = bytes_per_element <= 6  # up to three tensors of 16 bits
    if short and 1024 <= block <= 2048:
        stages = stages_ahead(4096 * bytes_per_element, x)
        return Plan(ROWS=4096 // block, BLOCK_N=block, STAGES=stages, num_warps=4, programs_per_sm=2)
    rows = max(1, min(64, 8192 // block))
    warps = 8 if block < 4096 or (short and center) else 16
    stages = stages_ahead(rows * block * bytes_per_element, x)
    return Plan(ROWS=rows, BLOCK_N=block, STAGES=stages, num_warps=warps, programs_per_sm=1)


def norm_fwd(x, residual, weight, bias, eps: float, offset: float, round_first: bool, *, center: bool):
    """Returns y, h and stats; y and h in the layout of x, and ``h`` is ``x`` itself without a residual."""
    dtype = sum_dtype(x, residual)
    h = x if residual is None else torch.empty_like(x, dtype=dtype)
    order = row_order(h)  # the backward's, which has no x: one that is expanded lies in another order than its sum
    rows = as_rows(x.permute(order))
    m, n = rows.shape
    refuse_symbols(n, rows.stride(0))
    y = torch.empty_like(x, dtype=result_dtype(dtype, weight, round_first))
    stats = empty_stats(x, center)
    if m and n:
        y_rows = as_rows(y.permute(order))
        res, h_rows = (y_rows if residual is None else as_rows(t.permute(order)) for t in (residual, h))
        refuse_symbols(res.stride(0))
        plan = row_norm_fwd_plan(n)
        # y is also stored in e4m3, or only so, where the launch is changed for a product in float8 (``float8/norms.py``)
        launch(row_norm_fwd_kernel, (cdiv(m, plan.ROWS),),
            rows, res, y_rows if weight is None else weight.contiguous(), y_rows if bias is None else bias.contiguous(),
            y_rows, h_rows, stats, y_rows, y_rows, m, n, rows.stride(0), res.stride(0), float(eps), float(offset),
            CENTER=center, HAS_RES=residual is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            ROUND_FIRST=round_first, WIDE=n > plan.BLOCK_N, ROUNDED=center and rounds(dtype, n),
            STORE_Y=True, STORE_Q=False, POWER_OF_TWO=False,
            UNIT=unit_of(n, rows.stride(0), res.stride(0)), **plan.meta(),
        )  # fmt: skip
        write_back(y, y_rows, order)
        if residual is not None:
            write_back(h, h_rows, order)
    return y, h, stats


def norm_bwd(dy, dh, h, weight, bias, stats, offset: float, round_first: bool, needs: list[bool], *, center: bool):
    """Returns dx, dweight and dbias. ``dy`` or ``dh`` is None where y or h has no gradient."""
    order = row_order(h)
    rows = as_rows(h.permute(order))
    m, n = rows.shape
    refuse_symbols(n, rows.stride(0))
    dx = torch.empty_like(h)
    wanted = [t is not None and need for t, need in zip((weight, bias), needs[1:], strict=False)]
    wanted += [False] * (2 - len(wanted))
    needs_dw, needs_db = (w and dy is not None and m > 0 and n > 0 for w in wanted)
    sums: list = [None, None]
    if m and n:
        plan = row_norm_bwd_plan(n, sum(t.element_size() for t in (dy, dh, h) if t is not None), center, h)
        programs = multiprocessors(h) * plan.programs_per_sm
        if isinstance(m, int):
            programs = min(cdiv(m, plan.ROWS), programs)
        rows_each = cdiv(cdiv(m, programs), plan.ROWS) * plan.ROWS
        if isinstance(m, int):  # the last ones of a symbolic number of rows may find none
            programs = cdiv(m, rows_each)
        parts = torch.empty((needs_dw + needs_db, programs, n), dtype=torch.float32, device=h.device)
        dx_rows = as_rows(dx.permute(order))
        dys, dhs = (dx_rows if g is None else as_rows(g.permute(order)) for g in (dy, dh))
        refuse_symbols(dys.stride(0), dhs.stride(0))
        w = dx_rows if weight is None else weight.contiguous()
        sizes = (m, n, dys.stride(0), dhs.stride(0), rows.stride(0), float(offset), rows_each)
        flags = {
            "CENTER": center, "HAS_DH": dh is not None, "HAS_DY": dy is not None, "HAS_WEIGHT": weight is not None,
            "NEEDS_DW": needs_dw, "NEEDS_DB": needs_db, "ROUND_FIRST": round_first,
            "UNIT": unit_of(n, dys.stride(0), dhs.stride(0), rows.stride(0)),
        }  # fmt: skip
        if n > plan.BLOCK_N:
            parts.zero_()
            launch(row_norm_bwd_wide_kernel, (programs,),
                dys, dhs, rows, w, stats, dx_rows, parts, *sizes,
                BLOCK_N=plan.BLOCK_N, num_warps=plan.num_warps, **flags,
            )  # fmt: skip
        else:  # y is stored where the memory pass has changed the launch, q where a product in float8 reads dx
            launch(row_norm_bwd_kernel, (programs,),
                dys, dhs, rows, w, dx_rows, stats, dx_rows, dx_rows, parts, dx_rows, dx_rows, *sizes,
                HAS_BIAS=False, STORE_Y=False, STORE_Q=False, POWER_OF_TWO=False, **plan.meta(), **flags,
            )  # fmt: skip
        write_back(dx, dx_rows, order)
        if needs_dw or needs_db:
            wanted_dtypes = [t.dtype for t, needed in ((weight, needs_dw), (bias, needs_db)) if needed]
            made = column_sums(parts, wanted_dtypes)
            sums = [made[0] if needs_dw else None, made[-1] if needs_db else None]
    # A gradient that is not wanted is an empty tensor; one that is wanted but was not summed is zeros.
    grads = (
        s if s is not None else torch.zeros_like(t) if want else dx.new_empty(0)
        for t, s, want in zip((weight, bias), sums, wanted, strict=True)
    )  # fmt: skip
    return dx, *grads


def empty_stats(x: Tensor, center: bool) -> Tensor:
    """Returns room for rstd of every row and, for LayerNorm, the means behind them."""
    m = math.prod(x.shape[:-1])
    return torch.empty((2, m) if center else (m,), dtype=torch.float32, device=x.device)


def sum_dtype(x: Tensor, residual) -> torch.dtype:
    """Returns the dtype of h."""
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def result_dtype(dtype: torch.dtype, weight, round_first: bool) -> torch.dtype:
    """Returns the dtype of y: the weight multiplies after the rounding (and may promote), or before it."""
    return torch.promote_types(dtype, weight.dtype) if round_first and weight is not None else dtype
