"""What every launcher needs: rows of a tensor, the number of multiprocessors, block sizes."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """``(..., n) -> (m, n)`` with unit stride along n; copies only where no view of it is possible."""
    n = x.shape[-1]
    rows = x.reshape(-1, n) if x.numel() else x.new_empty(0, n)
    return rows if rows.stride(-1) == 1 or n == 1 else rows.contiguous()


def row_order(x: Tensor) -> list[int]:
    """Dims from the largest stride to the smallest, the last dim last: ``x.permute(order)`` walks x as it lies in
    memory, so a transposed tensor (heads before positions) is neither copied nor laid out anew."""
    leading = sorted(range(x.dim() - 1), key=lambda d: -x.stride(d))
    return [*leading, x.dim() - 1]


def write_back(x: Tensor, rows: Tensor, order: list[int]) -> None:
    """``rows`` was to be ``as_rows(x.permute(order))``; where no such view exists it is a copy, and goes back to x."""
    if rows.data_ptr() != x.data_ptr():
        laid_out = x.permute(order)
        laid_out.copy_(rows.view(laid_out.shape))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """SMs of the tensor's device; 2 in the interpreter, so that several programs share the rows in tests too."""
    return _multiprocessors(x.device.index or 0) if x.is_cuda else 2
