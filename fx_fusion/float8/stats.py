"""``fx_fusion.float8_stats(model, *args)``: what float8 does to each linear of a model, measured on a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fx_fusion.float8.linears import FORWARD, OF_INPUT, OF_WEIGHT
from fx_fusion.float8.writer import into_dy
from fx_fusion.kernels.float8.quantize import quantize_rows_inline
from fx_fusion.kernels.float8.turn import turn_rows
from fx_fusion.torch_internals.dispatch import products_with_parameters, steps_in_backward

_ROWS = 128  # of each product that are compared: evenly spaced


@dataclass(frozen=True)
class Float8Stats:
    """One of the three products of a linear.

    Attributes:
        weight: the name of its parameter.
        product: ``"forward"``, ``"gradient of the input"`` or ``"gradient of the weight"``. The last is in float8 under the
            recipe ``"rowwise"`` only.
        sqnr: 20 log10(|y| / |y - y8|) in dB, of the product in float8 against float64, both of the same operands; infinite
            where they are equal, as of a matrix of zeros.
        amax: the largest magnitude of the first operand: x, or the gradient of y.
        underflow: the share of its numbers, zeros aside, that float8 has as zero.
        spread: the largest ratio of a row's largest magnitude to its root mean square: outliers make it large. A row is
            what is summed over.
    """

    weight: str
    product: str
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
                (s.weight, s.product, f"{s.sqnr:.1f}", f"{s.amax:.3g}", f"{100 * s.underflow:.2f}", f"{s.spread:.0f}")
                for s in self
            ],
            headers=headers,
            disable_numparse=True,
        )


def float8_stats(model: nn.Module, *args: Any, **kwargs: Any) -> Float8Table:
    """Run one training step of a model eagerly, and measure what ``options={"float8": "rowwise"}`` would do to the three
    products of each linear, in every spelling; ``"rowwise_gw_hp"`` has the first two in float8.

    The model's call gives its loss, or something with one (``.loss``). Its gradients are left as they were. Products are
    compared on 128 rows each.

    Returns: a list of ``Float8Stats``, the least exact first; ``print`` shows it as a table.

    Raises ValueError where the call gives no loss.
    """
    names = dict(model.named_parameters())
    found: list[Float8Stats] = []
    multiplied: list[tuple[str, Tensor, int]] = []  # x, and outputs of its linear: in no backward yet

    def measure(when: str, name: str, a: Tensor, b: Tensor) -> None:
        if not name:
            measure_gradient(a, b)
        elif when != "again":
            found.append(_with_weight(name, when == "backward", a, b))
        if when != "backward" and torch.is_grad_enabled() and names[name].requires_grad:
            multiplied.append((name, a, b.shape[1]))

    def measure_gradient(a: Tensor, b: Tensor) -> None:
        """Measure dy.T @ x, or x.T @ dy: the last linear that had this x, and as many outputs."""
        for place in reversed(range(len(multiplied))):
            name, x, outputs = multiplied[place]
            for dy, other in ((a.t(), b), (b, a.t())):
                # What is checkpointed computes x again, and stops in front of the product that reads it last.
                is_x = x.is_set_to(other) or (x.shape == other.shape and torch.equal(x, other))
                if is_x and dy.shape == (len(x), outputs):
                    del multiplied[place]
                    found.append(_of_weight(name, x, dy))
                    return

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
            if steps_in_backward(names.values()):
                given = (t for t in (*names.values(), *args, *kwargs.values()) if isinstance(t, Tensor))
                torch.autograd.grad(loss, [t for t in given if t.requires_grad], allow_unused=True)
            else:
                loss.backward()
    finally:
        for name, parameter in names.items():
            parameter.grad = before[name]
    return Float8Table(sorted(found, key=lambda stats: stats.sqnr))


def _with_weight(name: str, backward: bool, a: Tensor, b: Tensor) -> Float8Stats:
    rows = a[_some(len(a), a.device)]
    q, scale = quantize_rows_inline(rows)
    turned = backward and b.stride(0) != 1  # such a weight has one scale
    qb, scale_b = quantize_rows_inline(b.t(), b.abs().max().float() if turned else None)
    small = (q.double() * scale) @ (qb.double() * scale_b).t()
    return _compared(name, OF_INPUT if backward else FORWARD, a, rows, q, rows.double() @ b.double(), small)


def _of_weight(name: str, x: Tensor, dy: Tensor) -> Float8Stats:
    (q, of_dy), (_, of_x) = (quantize_rows_inline(t, power_of_two=True) for t in (dy, x))
    of_rows, scale = into_dy(of_dy, of_x)
    outputs = _some(dy.shape[1], dy.device)
    q = turn_rows(q, of_rows)[outputs]
    small = (q.double() @ turn_rows(x, of_x).double().t()) * scale
    rows = dy.t()[outputs]
    return _compared(name, OF_WEIGHT, dy, rows, q[:, : len(dy)], rows.double() @ x.double(), small)


def _some(count: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, min(count, _ROWS), device=device).long()


def _compared(
    name: str, product: str, a: Tensor, rows: Tensor, q: Tensor, true: Tensor, small: Tensor
) -> Float8Stats:  # fmt: skip
    wide = rows.float()
    lost = ((q.float() == 0) & (wide != 0)).sum() / (wide != 0).sum().clamp(min=1)
    spread = wide.abs().amax(1) / wide.square().mean(1).sqrt().clamp(min=1e-30)
    error, size = (true - small).norm().item(), true.norm().item()
    sqnr = 20 * math.log10(max(size, 1e-300) / error) if error else math.inf
    return Float8Stats(name, product, sqnr, a.abs().max().item(), lost.item(), spread.max().item())
