"""Matrices in e4m3 with a scale for each row, which ``_scaled_mm`` multiplies: of x itself, or of x transposed.

    s_i    = max(max_j |x_ij|, SMALLEST) / 448            q_ij = e4m3(x_ij / s_i)          quantize_rows
    s_j    = max(max_i |x_ij|, SMALLEST) / 448            q_ji = e4m3(x_ij / s_j)          quantize_columns

A row of x is one of the matrix that is multiplied; 448 is the largest number of e4m3. Columns may be given one maximum for
all of x instead, which the scales of its rows know already. Rows may have the next power of two as their scale: then q times
another power of two is exact as long as it does not underflow. NaN stays NaN, and a row that holds an infinity becomes NaN.

Shapes     x: (m, n); rows: q (m, n), s (m, 1); columns: q (n, m), s (n, 1); the maximum: one element.
Dtypes     x bf16 | fp16 | fp32; arithmetic in fp32; q float8_e4m3fn, s fp32.
Traffic    rows: x once, q once, up to WIDEST columns (beyond: x twice); columns: x twice, q once, or with a maximum x once.
Source     Micikevicius et al. 2022, arXiv:2209.05433 (e4m3); a scale a row, and powers of two: torchao's "rowwise" recipes.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.e4m3 import in_e4m3, row_scale
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op, trace_launches
from fx_fusion.ops.on_cpu import interpreting

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 1e-30  # an amax below it is taken for it: its reciprocal is finite
WIDEST = 16384  # columns of a row that one program holds
_TILE, _ROWS = 128, 256
_EXPONENT, _FRACTION = 0x7F800000, 0x7FFFFF  # of the bits of a float32


def quantize_rows_inline(
    x: torch.Tensor, largest: torch.Tensor | None = None, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and s of the rows of x, made of torch's ops: Inductor computes them in the kernel that makes x. With one
    maximum for all of x, s has one element."""
    cast = torch.ops.prims.convert_element_type
    wide = cast(x, torch.float32)
    largest = (wide.abs().amax(1, keepdim=True) if largest is None else largest).clamp(min=SMALLEST)
    scale = largest * (1 / LARGEST)
    if power_of_two:
        scale = ((scale.view(torch.int32) + _FRACTION) & _EXPONENT).view(torch.float32)
    q = cast((wide * (1 / scale if power_of_two else LARGEST / largest)).clamp(-LARGEST, LARGEST), E4M3)
    return q, scale


@triton.jit
def quantize_rows_kernel(
    x_ptr, q_ptr, scale_ptr, m, n, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Store q and s of ROWS rows. WIDE: rows of more than BLOCK columns are read twice."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    live = (rows < m)[:, None] & (cols < n)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], live, 0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    if WIDE:
        for start in range(BLOCK, n, BLOCK):
            inside = (rows < m)[:, None] & (start + cols < n)[None, :]
            more = tl.load(x_ptr + rows[:, None] * stride + start + cols[None, :], inside, 0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(more), 1))
    scale, factor = row_scale(largest, POWER_OF_TWO)
    factor = factor[:, None]
    tl.store(scale_ptr + rows, scale, rows < m)
    tl.store(q_ptr + rows[:, None] * n + cols[None, :], in_e4m3(x, factor).to(q_ptr.dtype.element_ty), live)
    if WIDE:
        for start in range(BLOCK, n, BLOCK):
            inside = (rows < m)[:, None] & (start + cols < n)[None, :]
            more = tl.load(x_ptr + rows[:, None] * stride + start + cols[None, :], inside, 0.0).to(tl.float32)
            q = in_e4m3(more, factor).to(q_ptr.dtype.element_ty)
            tl.store(q_ptr + rows[:, None] * n + start + cols[None, :], q, inside)


@triton.jit
def quantize_amax_kernel(x_ptr, bits_ptr, m, n, stride, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Raise ``bits`` to the largest |x| of ROWS rows of TILE columns, as integers: those of numbers that are not negative
    are in the order of the numbers, so the result does not depend on the order of the programs."""
    cols = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.program_id(1).to(tl.int64) * ROWS
    largest = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, ROWS, TILE):
        rows = first + start + tl.arange(0, TILE)
        live = (rows < m)[:, None] & (cols < n)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], live, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    tl.atomic_max(bits_ptr + cols, tl.max(largest, 0).to(tl.int32, bitcast=True), cols < n, sem="relaxed")


@triton.jit
def quantize_transposed_kernel(
    x_ptr, largest_ptr, q_ptr, scale_ptr, m, n, stride, TILE: tl.constexpr, FOR_ALL: tl.constexpr
):  # fmt: skip
    """Store a tile of q and, in the first row of tiles, its scales. FOR_ALL: ``largest`` is one number, else the bits of one
    for each column."""
    rows = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = (rows < m)[:, None] & (cols < n)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], live, 0.0).to(tl.float32)
    if FOR_ALL:
        largest = tl.zeros((TILE,), tl.float32) + tl.load(largest_ptr)
    else:
        largest = tl.load(largest_ptr + cols, cols < n, 0).to(tl.float32, bitcast=True)
    largest = tl.where(largest < 1e-30, 1e-30, largest)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + cols, largest * (1.0 / 448.0), cols < n)
    q = tl.trans(in_e4m3(x, (448.0 / largest)[None, :]).to(q_ptr.dtype.element_ty))
    tl.store(q_ptr + cols[:, None] * m + rows[None, :], q, (cols < n)[:, None] & (rows < m)[None, :])


@torch.no_grad()  # the ops have no gradient, their references neither
def _rows(x: torch.Tensor, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type == "cpu" and not interpreting():
        return quantize_rows_inline(x, power_of_two=power_of_two)
    m, n = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    q, scale = x.new_empty((m, n), dtype=E4M3), x.new_empty((m, 1), dtype=torch.float32)
    block = min(next_power_of_2(n), WIDEST)
    rows = max(1, 2048 // block)
    warps = min(max(rows * block // 1024, 4), 16)
    grid = (cdiv(m, rows),)
    launch(
        quantize_rows_kernel, grid, x, q, scale, m, n, x.stride(0), ROWS=rows, BLOCK=block, WIDE=n > block,
        POWER_OF_TWO=power_of_two, num_warps=warps,
    )  # fmt: skip
    return q, scale


@torch.no_grad()
def _columns(x: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = x.shape
    if x.device.type == "cpu" and not interpreting():
        q, scale = quantize_rows_inline(x.t().contiguous(), largest)
        return q, scale.reshape(-1, 1).expand(n, 1).contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    q, scale = x.new_empty((n, m), dtype=E4M3), x.new_empty((n, 1), dtype=torch.float32)
    tiles, for_all = cdiv(n, _TILE), largest is not None
    if largest is None:
        largest = torch.zeros(n, dtype=torch.int32, device=x.device)
        launch(quantize_amax_kernel, (tiles, cdiv(m, _ROWS)), x, largest, m, n, x.stride(0), ROWS=_ROWS, TILE=_TILE)
    grid = (tiles, cdiv(m, _TILE))
    launch(quantize_transposed_kernel, grid, x, largest, q, scale, m, n, x.stride(0), TILE=_TILE, FOR_ALL=for_all)
    return q, scale


quantize_rows = plain_op(
    "quantize_rows",
    "(Tensor x, bool power_of_two=False) -> (Tensor q, Tensor scale)",
    _rows,
    lambda x, power_of_two=False: (x.new_empty(x.shape, dtype=E4M3), x.new_empty((x.shape[0], 1), dtype=torch.float32)),
)
quantize_columns = plain_op(
    "quantize_columns",
    "(Tensor x, Tensor? largest=None) -> (Tensor q, Tensor scale)",
    _columns,
    lambda x, largest=None: (x.new_empty(x.shape[::-1], dtype=E4M3), x.new_empty((x.shape[1], 1), dtype=torch.float32)),
)
trace_launches(quantize_rows, _rows)
trace_launches(quantize_columns, _columns)
