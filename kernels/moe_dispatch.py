"""Rows of tokens on their way to experts and back: each the gradient of the other, without atomics and without a fill.

    dispatch:  rows[r] = x[perm[r] // k]                    r = 0 .. t·k − 1, ordered by expert
    combine:   y[t]    = Σ_j rows[inverse[t·k + j]]         j = 0 .. k − 1

``perm`` is a permutation of the t·k pairs of a token and one of its k experts, ``inverse`` its inverse. The gradient of
dispatch is combine of the gradients of its rows, and the other way round, so each sum is over k rows in one order: the
result is the same in every run. Rows from ``here`` on belong to experts that other ranks have: 0, whatever is there.

Shapes     x, y: (t, h); rows: (t·k, h); perm, inverse: (t·k); here: (1) or None.
Dtypes     bf16 | fp16 | fp32; sums in fp32, rounded once; perm, inverse int32 | int64; here int32.
Saved      perm, inverse, here.
Traffic    (t·k + t)·h elements, forward and backward.
Source     Shazeer et al. 2017, arXiv:1701.06538 (dispatch and combine).
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.kernels.lib.rows import as_rows
from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import plain_function, plain_op, register_autograd, trace_launches
from fx_fusion.ops.on_cpu import interpreting

MOST_EXPERTS = 64  # of one token: the loop over them is unrolled


@triton.jit
def _moe_dispatch_kernel(
    x_ptr, perm_ptr, here_ptr, rows_ptr, rows, h, stride, K: tl.constexpr, LOCAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(perm_ptr + r, r < rows, 0).to(tl.int64)
    there = r < rows
    if LOCAL:
        there = r < tl.load(here_ptr)
    x = tl.load(x_ptr + (pair // K)[:, None] * stride + cols[None, :], there[:, None] & (cols < h)[None, :], 0.0)
    tl.store(rows_ptr + r[:, None] * h + cols[None, :], x, (r < rows)[:, None] & (cols < h)[None, :])


@triton.jit
def _moe_combine_kernel(
    rows_ptr, inverse_ptr, here_ptr, y_ptr, h, stride, K: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        r = tl.load(inverse_ptr + token * K + j).to(tl.int64)
        there = cols < h
        if LOCAL:
            there = cols < tl.where(r < tl.load(here_ptr), h, 0)
        total += tl.load(rows_ptr + r * stride + cols, there, 0.0).to(tl.float32)
    tl.store(y_ptr + token * h + cols, total.to(y_ptr.dtype.element_ty), cols < h)


@planner
def moe_dispatch_plan(h: int) -> Plan:
    """Choose ROWS x BLOCK of a program by the columns ``h`` of a row: 16 bytes a thread and row."""
    return Plan(ROWS=4, BLOCK=min(next_power_of_2(h), 1024), num_warps=4)


def _dispatch(x, perm, inverse, here, k):
    rows = _fake_dispatch(x, perm, inverse, here, k)
    if not x.is_cuda and not interpreting():
        return rows.copy_(_masked(x[perm // k], here))
    x, (s, h), plan = as_rows(x), rows.shape, moe_dispatch_plan(x.shape[1])
    if rows.numel():
        local = here is not None
        launch(
            _moe_dispatch_kernel,
            (cdiv(s, plan.ROWS), cdiv(h, plan.BLOCK)), x, perm.contiguous(), here if local else rows, rows, s, h,
            x.stride(0), K=k, LOCAL=local, **plan.meta(),
        )  # fmt: skip
    return rows


def _combine(rows, perm, inverse, here, k, dtype):
    y = _fake_combine(rows, perm, inverse, here, k, dtype)
    if not rows.is_cuda and not interpreting():
        wide = torch.promote_types(rows.dtype, torch.float32)
        return y.copy_(_masked(rows, here)[inverse].view(-1, k, rows.shape[1]).sum(1, dtype=wide))
    rows, (t, h), plan = as_rows(rows), y.shape, moe_dispatch_plan(rows.shape[1])
    if y.numel():
        local = here is not None
        launch(
            _moe_combine_kernel,
            (t, cdiv(h, plan.BLOCK)), rows, inverse.contiguous(), here if local else y, y, h, rows.stride(0),
            K=k, LOCAL=local, BLOCK=plan.BLOCK, num_warps=plan.num_warps,
        )  # fmt: skip
    return y


def _masked(rows, here):
    """Return the rows, those from ``here`` on as 0."""
    if here is None:
        return rows
    here = torch.arange(rows.shape[0], device=rows.device) < here
    return torch.where(here[:, None], rows, 0.0)


def _fake_dispatch(x, perm, inverse, here, k):
    return x.new_empty((perm.shape[0], x.shape[1]))


def _fake_combine(rows, perm, inverse, here, k, dtype):
    return rows.new_empty((rows.shape[0] // k, rows.shape[1]), dtype=rows.dtype if dtype is None else dtype)


_GIVEN = "Tensor perm, Tensor inverse, Tensor? here, int k"
moe_dispatch = plain_op("moe_dispatch", f"(Tensor x, {_GIVEN}) -> Tensor rows", _dispatch, _fake_dispatch)
moe_combine = plain_op(
    "moe_combine", f"(Tensor rows, {_GIVEN}, ScalarType? dtype) -> Tensor y", _combine, _fake_combine
)  # fmt: skip
trace_launches(moe_dispatch, _dispatch, cheap=True, symbolic=True)
trace_launches(moe_combine, _combine, symbolic=True)


def _save(ctx, inputs, output):
    first, perm, inverse, here, ctx.k = inputs[:5]
    ctx.save_for_backward(perm, inverse, here)
    ctx.dtype = first.dtype


def _dispatch_backward(ctx, drows):
    return moe_combine(drows, *ctx.saved_tensors, ctx.k, None), None, None, None, None


def _combine_backward(ctx, dy):
    return moe_dispatch(dy.to(ctx.dtype), *ctx.saved_tensors, ctx.k), None, None, None, None, None


register_autograd("moe_dispatch", _dispatch_backward, _save, twice=True)
register_autograd("moe_combine", _combine_backward, _save, twice=True)


@plain_function
def inverse_permutation(perm):
    """Return the inverse of ``perm``, (n), a permutation of the numbers below n."""
    return torch.empty_like(perm).scatter(0, perm, torch.arange(perm.shape[0], dtype=perm.dtype, device=perm.device))


@plain_function
def count_of_rows(mask):
    """Return how many rows a mask, (rows, 1), leaves, as one int32."""
    return torch.logical_not(mask).sum(dtype=torch.int32).view(1)


@plain_function
def sum_of_biases(bias, ids, scale, dtype):
    """Return ``Σ_j scale[t, j] · bias[ids[t, j]]``, (t, h), as a product with the matrix of all tokens and experts.

    bias: (experts, h), finite; ids, scale: (t, k), the ids of a token apart."""
    wide = torch.promote_types(scale.dtype, bias.dtype)
    with torch.autocast(bias.device.type, enabled=False):
        share = scale.new_zeros((ids.shape[0], bias.shape[0]), dtype=wide).scatter_add(1, ids, scale.to(wide))
        return (share @ bias.to(wide)).to(dtype)
