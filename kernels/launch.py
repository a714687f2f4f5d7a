"""What every launcher needs: rows of a tensor, the number of multiprocessors, block sizes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


class NotTraceable(Exception):
    """A launcher can't be traced for these inputs: its op stays opaque."""


_traced: list[bool] = []


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Launches become nodes of the graph that is being traced: Inductor then launches the kernels itself."""
    _traced.append(True)
    try:
        yield
    finally:
        _traced.pop()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, traced or for real. A kernel casts its float arguments to fp32: Triton's own
    launcher passes them so, Inductor passes fp64, which would make the arithmetic fp64."""
    if _traced:
        torch.library.wrap_triton(kernel)[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


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
    laid_out = x.permute(order)
    if laid_out.is_contiguous():
        return
    if _traced:
        raise NotTraceable
    if rows.data_ptr() != x.data_ptr():
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


@triton.jit
def _column_sums_kernel(parts_ptr, out_ptr, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, rows, ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts_ptr + r.to(tl.int64) * n + cols, (r < rows) & (cols < n), 0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0)[None, :].to(out_ptr.dtype.element_ty), cols < n)


def column_sums(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """``parts.sum(0)`` of a contiguous fp32 matrix, accumulated in fp32, rounded once: one launch instead of two."""
    rows, n = parts.shape
    out = torch.empty(n, dtype=dtype, device=parts.device)
    launch(_column_sums_kernel, (cdiv(n, 32),), parts, out, rows, n, ROWS=64, BLOCK=32, num_warps=4)
    return out
