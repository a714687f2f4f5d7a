"""Matrices in e4m3 with a scale for each row, which ``_scaled_mm`` multiplies: of x itself, or of x transposed.

    s_i    = max(max_j |x_ij|, SMALLEST) / 448            q_ij = e4m3(x_ij / s_i)          quantise_rows
    s_j    = max(max_i |x_ij|, SMALLEST) / 448            q_ji = e4m3(x_ij / s_j)          quantise_columns

A row of x is one of the matrix that is multiplied; 448 is the largest number of e4m3. NaN stays NaN, and a row that holds an
infinity becomes NaN.

Shapes     x: (m, n); rows: q (m, n), s (m, 1); columns: q (n, m), s (n, 1).
Dtypes     x bf16 | fp16 | fp32; arithmetic in fp32; q float8_e4m3fn, s fp32.
Traffic    rows: made of torch's ops, which Inductor fuses with what computes x. Columns: x twice, q once.
Source     Micikevicius et al. 2022, arXiv:2209.05433 (e4m3); a scale a row: torchao's "rowwise" recipes.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op, trace_launches
from fx_fusion.ops.on_cpu import interpreting

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 1e-30  # an amax below it is taken for it: its reciprocal is finite
_TILE, _ROWS = 128, 256


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and s of the rows of x. Of torch's ops, in the form in which Inductor has them."""
    cast = torch.ops.prims.convert_element_type
    wide = cast(x, torch.float32)
    largest = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST)
    q = cast((wide * (LARGEST / largest)).clamp(-LARGEST, LARGEST), E4M3)
    return q, largest * (1 / LARGEST)


@triton.jit
def quantise_amax_kernel(x_ptr, bits_ptr, m, n, stride, ROWS: tl.constexpr, TILE: tl.constexpr):
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
def quantise_transposed_kernel(x_ptr, bits_ptr, q_ptr, scale_ptr, m, n, stride, TILE: tl.constexpr):
    """Store a tile of q and, in the first row of tiles, its scales."""
    rows = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = (rows < m)[:, None] & (cols < n)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], live, 0.0).to(tl.float32)
    largest = tl.load(bits_ptr + cols, cols < n, 0).to(tl.float32, bitcast=True)
    largest = tl.where(largest < 1e-30, 1e-30, largest)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + cols, largest * (1.0 / 448.0), cols < n)
    q = x * (448.0 / largest)[None, :]
    q = tl.where(q > 448.0, 448.0, tl.where(q < -448.0, -448.0, q))
    q = tl.trans(q.to(q_ptr.dtype.element_ty))
    tl.store(q_ptr + cols[:, None] * m + rows[None, :], q, (cols < n)[:, None] & (rows < m)[None, :])


def _launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type == "cpu" and not interpreting():
        return quantise_rows(x.t().contiguous())
    m, n = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    bits = torch.zeros(n, dtype=torch.int32, device=x.device)
    q, scale = x.new_empty((n, m), dtype=E4M3), x.new_empty((n, 1), dtype=torch.float32)
    tiles = cdiv(n, _TILE)
    launch(quantise_amax_kernel, (tiles, cdiv(m, _ROWS)), x, bits, m, n, x.stride(0), ROWS=_ROWS, TILE=_TILE)
    launch(quantise_transposed_kernel, (tiles, cdiv(m, _TILE)), x, bits, q, scale, m, n, x.stride(0), TILE=_TILE)
    return q, scale


quantise_columns = plain_op(
    "quantise_columns",
    "(Tensor x) -> (Tensor q, Tensor scale)",
    _launch,
    lambda x: (x.new_empty(x.shape[::-1], dtype=E4M3), x.new_empty((x.shape[1], 1), dtype=torch.float32)),
)
trace_launches(quantise_columns, _launch)
