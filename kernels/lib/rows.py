"""Tensors as matrices of rows with unit stride."""

from __future__ import annotations

from torch import Tensor

from fx_fusion.ops.launch import refuse_tracing


def as_rows(x: Tensor) -> Tensor:
    """Returns x: (..., n) as (m, n) with unit stride along n; copies only where no such view exists."""
    n = x.shape[-1]
    rows = x.reshape(-1, n) if x.numel() else x.new_empty(0, n)
    return rows if rows.stride(-1) == 1 or n == 1 else rows.contiguous()


def row_order(x: Tensor) -> list[int]:
    """Returns the dims from the largest stride to the smallest, the last dim last: ``x.permute(order)`` has the order of
    memory, so a transposed tensor (heads before positions) is not copied."""
    leading = sorted(range(x.dim() - 1), key=lambda d: -x.stride(d))
    return [*leading, x.dim() - 1]


def write_back(x: Tensor, rows: Tensor, order: list[int]) -> None:
    """Copy ``rows``, which a kernel wrote, to x unless ``rows = as_rows(x.permute(order))`` is a view of x."""
    laid_out = x.permute(order)
    if laid_out.is_contiguous():
        return
    refuse_tracing()
    if rows.data_ptr() != x.data_ptr():
        laid_out.copy_(rows.view(laid_out.shape))
