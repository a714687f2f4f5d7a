"""Sums over the rows of partial gradients: the second pass of every parameter gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.ops.launch import launch


@triton.jit
def _column_sums_kernel(
    parts_ptr, a_ptr, b_ptr, c_ptr, d_ptr, rows, n,
    HAS_A: tl.constexpr, HAS_B: tl.constexpr, HAS_C: tl.constexpr, HAS_D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sum over the rows of matrix number program_id(1) of ``parts`` in the output of that number."""
    which = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = cols < n
    at = parts_ptr + which.to(tl.int64) * rows * n + cols[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(at + r.to(tl.int64) * n, (r < rows) & live[None, :], 0.0)
    out = tl.sum(total, 0)
    if HAS_A:
        if which == 0:
            tl.store(a_ptr + cols, out.to(a_ptr.dtype.element_ty), live)
    if HAS_B:
        if which == 1:
            tl.store(b_ptr + cols, out.to(b_ptr.dtype.element_ty), live)
    if HAS_C:
        if which == 2:
            tl.store(c_ptr + cols, out.to(c_ptr.dtype.element_ty), live)
    if HAS_D:
        if which == 3:
            tl.store(d_ptr + cols, out.to(d_ptr.dtype.element_ty), live)


def column_sums(parts: Tensor, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Returns ``parts[i].sum(0)`` of up to four contiguous fp32 matrices, accumulated in fp32 and rounded once to
    ``dtypes[i]``; None where ``dtypes[i]`` is None. One launch for all."""
    _, rows, n = parts.shape
    outs = [None if d is None else torch.empty(n, dtype=d, device=parts.device) for d in dtypes]
    has = {f"HAS_{'ABCD'[i]}": i < len(outs) and outs[i] is not None for i in range(4)}
    pointers = [parts if i >= len(outs) or outs[i] is None else outs[i] for i in range(4)]
    if any(has.values()):
        launch(
            _column_sums_kernel, (cdiv(n, 32), len(outs)), parts, *pointers, rows, n, ROWS=64, BLOCK=32, num_warps=4,
            **has,
        )  # fmt: skip
    return outs
