"""``fx_fusion.float8_stats(model, *args)``: what float8 does to each linear of a model, measured on a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fx_fusion.kernels.float8.quantise import quantise_rows_inline
from fx_fusion.torch_internals.dispatch import products_with_parameters

_ROWS = 128  # of each product that are compared: evenly spaced


@dataclass(frozen=True)
class Float8Stats:
    """A linear in one direction.

    Attributes:
        weight: the name of its parameter.
        gradient: whether it is the gradient of its input, else the forward.
        sqnr: 20 log10(|y| / |y - y8|) in dB, of the product in float8 against float64, both of the same operands.
        amax: the largest magnitude of what is multiplied with the weight: x, or the gradient of y.
        underflow: the share of its numbers, zeros aside, that float8 has as zero.
        spread: the largest ratio of a row's largest magnitude to its root mean square: outliers make it large.
    """

    weight: str
    gradient: bool
    sqnr: float
    amax: float
    underflow: float
    spread: float


class Float8Table(list[Float8Stats]):
    """All of a model, the least exact first; printed as a table."""

    def __str__(self) -> str:
        headers = ("weight", "product", "SQNR dB", "amax", "underflow %", "spread")
        return tabulate(
            [
                (s.weight, "gradient" if s.gradient else "forward", f"{s.sqnr:.1f}", f"{s.amax:.3g}",
                 f"{100 * s.underflow:.2f}", f"{s.spread:.0f}")
                for s in self
            ],
            headers=headers, disable_numparse=True,
        )  # fmt: skip


def float8_stats(model: nn.Module, *args: Any, **kwargs: Any) -> Float8Table:
    """Run one training step of a model eagerly, and measure what ``options={"float8": "rowwise_gw_hp"}`` would do to each
    product of activations, or of their gradients, with a parameter, in every spelling.

    The model's call gives its loss, or something with one (``.loss``). Its gradients are left as they were. Products are
    compared on 128 rows each.

    Returns: a list of ``Float8Stats``, the least exact first; ``print`` shows it as a table.

    Raises ValueError where the call gives no loss.
    """
    names = dict(model.named_parameters())
    found: list[Float8Stats] = []

    def measure(name: str, gradient: bool, a: Tensor, b: Tensor) -> None:
        found.append(_stats(name, gradient, a, b))

    before = {name: parameter.grad for name, parameter in names.items()}
    for parameter in names.values():
        parameter.grad = None
    try:
        with products_with_parameters(names, measure) as phase:
            out = model(*args, **kwargs)
            loss = out if isinstance(out, Tensor) else getattr(out, "loss", None)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                raise ValueError("float8_stats needs the loss of a step: a model that returns it, or something with .loss")
            phase.backward = True
            loss.backward()
    finally:
        for name, parameter in names.items():
            parameter.grad = before[name]
    return Float8Table(sorted(found, key=lambda stats: stats.sqnr))


def _stats(name: str, gradient: bool, a: Tensor, b: Tensor) -> Float8Stats:
    rows = a[torch.linspace(0, len(a) - 1, min(len(a), _ROWS), device=a.device).long()]
    q, scale = quantise_rows_inline(rows)
    turned = gradient and b.stride(0) != 1  # such a weight has one scale
    qb, scale_b = quantise_rows_inline(b.t(), b.abs().max().float() if turned else None)
    small = (q.double() * scale) @ (qb.double() * scale_b).t()
    true = rows.double() @ b.double()
    wide = rows.float()
    lost = ((q.float() == 0) & (wide != 0)).sum() / (wide != 0).sum().clamp(min=1)
    spread = wide.abs().amax(1) / wide.square().mean(1).sqrt().clamp(min=1e-30)
    error = (true - small).norm().clamp(min=1e-300)
    sqnr = 20 * torch.log10(true.norm().clamp(min=1e-300) / error)
    return Float8Stats(name, gradient, sqnr.item(), a.abs().max().item(), lost.item(), spread.max().item())


