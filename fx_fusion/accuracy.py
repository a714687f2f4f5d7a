"""Define what is accurate: values against float64, and how far eager is from it.

The rule: an error is at most twice eager's in the same dtype, plus two roundings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Values = Mapping[str, Tensor]


class Double(TorchFunctionMode):
    """Makes float64 of casts of float64 and of integers inside: ``x.float()`` in a model means "at least float32", and so do
    ``x.to(torch.bfloat16)`` and ``softmax(..., dtype=torch.float32)``. Grouped products, which torch has for narrower dtypes
    alone, are computed group by group."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and (args[0].dtype == torch.float64 or not _is_inexact(args[0])):
            if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
                return args[0].double()
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if a in _FLOATS else a for a in args)
            if kwargs.get("dtype") in _FLOATS:
                kwargs["dtype"] = torch.float64
            if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
                return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_product(x: Tensor, weight: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """Return x[i] · weight[e] for the rows i of group e, (rows, n), and zeros for rows behind the last group."""
    ends = offs.tolist()
    products = [x[begin:end] @ weight[e] for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*products, x.new_zeros(x.shape[0] - ends[-1], weight.shape[2])])


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def doubled(tensor: Tensor) -> Tensor:
    """A tensor in float64 (complex128); one of integers as it is."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Compared:
    """One output, or the gradient of one parameter: lengths of differences from float64, relative to its own length.

    ``error`` is fx_fusion's, ``usual`` eager's, ``allowed`` what the rule allows: twice eager's and two roundings; for a
    single number at least eight of float32, or a tenth of one of the model's."""

    name: str
    error: float
    usual: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Return True if it is as accurate as the rule asks; not so for NaN."""
        return self.error <= self.allowed

    @property
    def used(self) -> float:
        """Return which part of what is allowed the error takes; more than 1 is wrong."""
        return self.error / self.allowed if self.allowed else math.inf


def compare(ours: Values, usual: Values, exact: Values) -> list[Compared]:
    """The worst first. A gradient that is 0 but for roundings (of a key's bias) is measured by what others are."""
    sizes = [length(t) / math.sqrt(t.numel()) for n, t in exact.items() if n.startswith("gradient") and t.numel()]
    typical = statistics.median(sizes) if sizes else 0.0
    coarsest = max(torch.finfo(t.dtype).eps for t in usual.values())
    rows = []
    for name, truth in exact.items():
        if not truth.numel():
            continue
        floor = typical * math.sqrt(truth.numel()) if name.startswith("gradient") else 0.0
        unit = max(length(truth), floor) or 1.0
        # Where eager overflows and float64 does not, finite numbers are better than eager's.
        if name not in ours or not any(same_kinds(ours[name], t) for t in (usual[name], truth)):
            rows.append(Compared(name, math.inf, 0.0, 0.0))
            continue
        known, error = (length(_apart(values[name], truth)) / unit for values in (usual, ours))
        roundings = 2 * torch.finfo(usual[name].dtype).eps
        if truth.numel() == 1:  # eager's own error of one number may be 0 by luck
            roundings = max(roundings, 8 * torch.finfo(torch.float32).eps, 0.1 * coarsest)
        rows.append(Compared(name, error, known, 2 * known + roundings))
    return sorted(rows, key=lambda row: -row.used)


def _apart(values: Tensor, truth: Tensor) -> Tensor:
    """The difference in float64, 0 where the values are not finite."""
    return (doubled(values) - doubled(truth)).masked_fill(~values.isfinite(), 0.0)


def same_kinds(one: Tensor, other: Tensor) -> bool:
    """Return True if the same elements are finite, NaN, and infinite of the same sign."""
    if one.is_complex() or other.is_complex():
        parts = [torch.view_as_real(t.to(torch.complex128)) for t in (one, other)]
        return same_kinds(*parts)
    return torch.equal(*(doubled(t).where(~t.isfinite(), 0.0).nan_to_num(2.0, 1.0, -1.0) for t in (one, other)))


def alike(one: Values, other: Values) -> bool:
    """Return True if two runs differ by no more than atomics make them."""
    return all(length(doubled(one[n]) - doubled(t)) <= 0.05 * length(t) for n, t in other.items())


def length(tensor: Tensor) -> float:
    """The Euclidean norm, in float64; NaN counts as 0."""
    return doubled(tensor).nan_to_num().norm().item()


def nudged(inputs: Mapping[str, Any], seed: int, together: float = 0.0) -> dict[str, Any]:
    """Inputs that differ by up to half a rounding (some go to the next number), and by up to ``together`` roundings that
    all elements of a row (of an image) have in common, as if its statistics were off by that."""
    made = dict(inputs)
    for at, (name, t) in enumerate(inputs.items()):
        if isinstance(t, Tensor) and t.is_floating_point():
            generator = torch.Generator(t.device).manual_seed(1000 * seed + at)
            noise = torch.rand(t.shape, generator=generator, device=t.device) - 0.5
            if together and t.dim() > 1:
                rows = (t.shape[0], *(1,) * (t.dim() - 1))
                noise = noise + 2 * together * (torch.rand(rows, generator=generator, device=t.device) - 0.5)
            made[name] = (t.double() * (1 + torch.finfo(t.dtype).eps * noise)).to(t.dtype)
    return made
