"""Two or three matrices beside each other in e4m3, so that one product does what one for each and their sum would do.

    x = [x_1 x_2 x_3]          s_i = max(max_j |x_ij|, SMALLEST) / 448       q_ij = e4m3(x_ij / s_i)     rows
    w = [w_1; w_2; w_3]        s = max(max |w|, SMALLEST) / 448, one for all   q_ji = e4m3(w_ij / s)       columns

with ``dx = x @ w = x_1 @ w_1 + x_2 @ w_2 + x_3 @ w_3``: gradients of one input by several linears. A row of x has one
scale over all of them, of which a power of two can be asked, and columns have one maximum, both as in ``quantize``.

Shapes     x_i: (m, n_i); rows: q (m, n), s (m, 1), n = Σ n_i. w_i: (n_i, k), their maxima one element each; columns:
           q (k, n), s (k, 1).
Dtypes     bf16 | fp16 | fp32; arithmetic in fp32; q float8_e4m3fn, s fp32.
Traffic    x once, q once, up to WIDEST columns in all (beyond: x three times, q once); w once, q once.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.float8.quantize import E4M3, WIDEST, quantize_rows, quantize_rows_inline
from fx_fusion.kernels.lib.e4m3 import in_e4m3, row_scale
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_op, trace_launches
from fx_fusion.ops.on_cpu import interpreting

MOST = 3  # matrices that can be beside each other
_TILE = 128


@triton.jit
def _load(x_ptr, row, n, stride, cols):
    return tl.load(x_ptr + row * stride + cols, cols < n, 0.0).to(tl.float32)


@triton.jit
def _store(q_ptr, x, factor, n, cols):
    tl.store(q_ptr + cols, in_e4m3(x, factor).to(q_ptr.dtype.element_ty), cols < n)


@triton.jit
def quantize_rows_together_kernel(
    x1_ptr, x2_ptr, x3_ptr, q_ptr, scale_ptr, n1, n2, n3, stride1, stride2, stride3,
    BLOCK1: tl.constexpr, BLOCK2: tl.constexpr, BLOCK3: tl.constexpr, THREE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Store a row of q and its s. THREE: there is an x3."""
    row = tl.program_id(0).to(tl.int64)
    cols1, cols2, cols3 = tl.arange(0, BLOCK1), tl.arange(0, BLOCK2), tl.arange(0, BLOCK3)
    x1 = _load(x1_ptr, row, n1, stride1, cols1)
    x2 = _load(x2_ptr, row, n2, stride2, cols2)
    largest = tl.maximum(tl.max(tl.abs(x1), 0), tl.max(tl.abs(x2), 0))
    width = n1 + n2
    if THREE:
        x3 = _load(x3_ptr, row, n3, stride3, cols3)
        largest = tl.maximum(largest, tl.max(tl.abs(x3), 0))
        width += n3
    scale, factor = row_scale(largest, POWER_OF_TWO)
    tl.store(scale_ptr + row, scale)
    q_ptr += row * width
    _store(q_ptr, x1, factor, n1, cols1)
    _store(q_ptr + n1, x2, factor, n2, cols2)
    if THREE:
        _store(q_ptr + n1 + n2, x3, factor, n3, cols3)


@triton.jit
def _transposed(x_ptr, q_ptr, factor, m, n, width, rows, cols):
    """Store a tile of q, whose rows have ``width`` elements, of x of shape (m, n)."""
    live = (rows < m)[:, None] & (cols < n)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * n + cols[None, :], live, 0.0).to(tl.float32)
    q = tl.trans(in_e4m3(x, factor).to(q_ptr.dtype.element_ty))
    tl.store(q_ptr + cols.to(tl.int64)[:, None] * width + rows[None, :], q, (cols < n)[:, None] & (rows < m)[None, :])


@triton.jit
def quantize_columns_together_kernel(
    x1_ptr, x2_ptr, x3_ptr, largest1_ptr, largest2_ptr, largest3_ptr, q_ptr, scale_ptr, m1, m2, m3, n,
    TILE: tl.constexpr, THREE: tl.constexpr,
):  # fmt: skip
    """Store a tile of q and, in the first row of tiles, its scales. THREE: there is an x3."""
    cols = tl.program_id(0) * TILE + tl.arange(0, TILE)
    largest = tl.maximum(tl.load(largest1_ptr), tl.load(largest2_ptr))
    width = m1 + m2
    if THREE:
        largest = tl.maximum(largest, tl.load(largest3_ptr))
        width += m3
    scale, factor = row_scale(largest, False)
    tile = tl.program_id(1)
    if tile == 0:
        tl.store(scale_ptr + cols, tl.zeros((TILE,), tl.float32) + scale, cols < n)
    rows = tile * TILE + tl.arange(0, TILE)
    tiles1, tiles2 = tl.cdiv(m1, TILE), tl.cdiv(m2, TILE)
    if tile < tiles1:
        _transposed(x1_ptr, q_ptr, factor, m1, n, width, rows, cols)
    elif tile < tiles1 + tiles2:
        _transposed(x2_ptr, q_ptr + m1, factor, m2, n, width, rows - tiles1 * TILE, cols)
    elif THREE:
        _transposed(x3_ptr, q_ptr + m1 + m2, factor, m3, n, width, rows - (tiles1 + tiles2) * TILE, cols)


@torch.no_grad()  # the ops have no gradient, their references neither
def _rows(x1, x2, x3, power_of_two):
    xs = [x for x in (x1, x2, x3) if x is not None]
    if x1.device.type == "cpu" and not interpreting():
        return quantize_rows_inline(torch.cat(xs, 1), power_of_two=power_of_two)
    widths = [x.shape[1] for x in xs]
    blocks = [next_power_of_2(n) for n in widths]
    if sum(blocks) > WIDEST:
        return quantize_rows(torch.cat(xs, 1), power_of_two)
    q, scale = _rows_results(x1, x2, x3, power_of_two)
    xs = [x if x.stride(1) == 1 else x.contiguous() for x in xs]
    strides, more = [x.stride(0) for x in xs], MOST - len(xs)
    xs += [q] * more
    widths, strides, blocks = (given + given[:more] for given in (widths, strides, blocks))
    warps = min(max(next_power_of_2(sum(blocks)) // 1024, 4), 16)
    launch(
        quantize_rows_together_kernel, (len(x1),), *xs, q, scale, *widths, *strides, BLOCK1=blocks[0], BLOCK2=blocks[1],
        BLOCK3=blocks[2], THREE=x3 is not None, POWER_OF_TWO=power_of_two, num_warps=warps,
    )  # fmt: skip
    return q, scale


@torch.no_grad()
def _columns(x1, x2, x3, largest1, largest2, largest3):
    xs, largest = ([x for x in given if x is not None] for given in ((x1, x2, x3), (largest1, largest2, largest3)))
    q, scale = _columns_results(x1, x2, x3, *largest)
    if x1.device.type == "cpu" and not interpreting():
        most = torch.stack([one.reshape(()) for one in largest]).amax()
        values, one = quantize_rows_inline(torch.cat(xs).t().contiguous(), most)
        return values, one.reshape(1, 1).expand_as(scale).contiguous()
    xs = [x.contiguous() for x in xs]
    heights, n, more = [x.shape[0] for x in xs], x1.shape[1], MOST - len(xs)
    grid = (cdiv(n, _TILE), sum(cdiv(m, _TILE) for m in heights))
    xs, largest = xs + [q] * more, largest + [scale] * more
    heights += heights[:more]
    launch(
        quantize_columns_together_kernel, grid, *xs, *largest, q, scale, *heights, n, TILE=_TILE, THREE=x3 is not None
    )  # fmt: skip
    return q, scale


def _rows_results(x1, x2, x3, power_of_two):
    n = sum(x.shape[1] for x in (x1, x2, x3) if x is not None)
    return x1.new_empty((x1.shape[0], n), dtype=E4M3), x1.new_empty((x1.shape[0], 1), dtype=torch.float32)


def _columns_results(x1, x2, x3, *largest):
    n = sum(x.shape[0] for x in (x1, x2, x3) if x is not None)
    return x1.new_empty((x1.shape[1], n), dtype=E4M3), x1.new_empty((x1.shape[1], 1), dtype=torch.float32)


quantize_rows_together = plain_op(
    "quantize_rows_together",
    "(Tensor x1, Tensor x2, Tensor? x3, bool power_of_two) -> (Tensor q, Tensor scale)",
    _rows,
    _rows_results,
)
quantize_columns_together = plain_op(
    "quantize_columns_together",
    "(Tensor x1, Tensor x2, Tensor? x3, Tensor largest1, Tensor largest2, Tensor? largest3) -> (Tensor q, Tensor scale)",
    _columns,
    _columns_results,
)
trace_launches(quantize_rows_together, _rows)
trace_launches(quantize_columns_together, _columns)
