"""A matrix in e4m3 by columns, whose rows have scales of their own: what the gradient of a weight multiplies.

    q_ji = e4m3(x_ij (1 / s_i))          for i < m, 0 for m <= i < M

It sums over the rows of x, so their scales can't be taken out of the sum. Beyond 448 a number becomes 448; NaN stays NaN.

Shapes     x: (m, n); s: (m, 1); q: (n, M), M being m or the next multiple of 16, which float8 products need.
Dtypes     x bf16 | fp16 | fp32 | float8_e4m3fn; s fp32; arithmetic in fp32; q float8_e4m3fn.
Traffic    x once, q once.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.float8.quantize import E4M3, LARGEST
from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op, trace_launches
from fx_fusion.ops.on_cpu import interpreting

_TILE = 128
_UNIT = 16


@triton.jit
def turn_rows_kernel(x_ptr, scale_ptr, q_ptr, m, n, stride, width, TILE: tl.constexpr):
    """Store a tile of q, whose rows have ``width`` elements."""
    tiles = tl.cdiv(n, TILE)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = (rows < m)[:, None] & (cols < n)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], live, 0.0).to(tl.float32)
    x *= (1.0 / tl.load(scale_ptr + rows, rows < m, 1.0))[:, None]
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    q = tl.trans(x.to(q_ptr.dtype.element_ty))
    tl.store(q_ptr + cols[:, None] * width + rows[None, :], q, (cols < n)[:, None] & (rows < width)[None, :])


def _width(m: int) -> int:
    return cdiv(m, _UNIT) * _UNIT


@torch.no_grad()  # the op has no gradient, its reference neither
def _turned(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    m, n = x.shape
    width = _width(m)
    if x.device.type == "cpu" and not interpreting():
        turned = (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(E4M3).t()
        q = x.new_zeros((n, width), dtype=E4M3)
        q[:, :m] = turned
        return q
    x = x if x.stride(1) == 1 else x.contiguous()
    q = x.new_empty((n, width), dtype=E4M3)
    grid = (cdiv(n, _TILE) * cdiv(width, _TILE),)  # of one dim: the others end at 65535
    launch(turn_rows_kernel, grid, x, scale.contiguous(), q, m, n, x.stride(0), width, TILE=_TILE)
    return q


turn_rows = plain_op(
    "turn_rows",
    "(Tensor x, Tensor scale) -> Tensor",
    _turned,
    lambda x, scale: x.new_empty((x.shape[1], _width(x.shape[0])), dtype=E4M3),
)
trace_launches(turn_rows, _turned)
