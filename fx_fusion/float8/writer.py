"""Products in float8: what the forward and the gradients of inputs multiply has a scale a row.

``rowwise_gw_hp`` (torchao's ``rowwise_with_gw_hp``): both operands of these two products are quantized along the dim that is
summed, by their current values, so there is no state; gradients of weights stay products in bfloat16. Nothing is saved for
the backward that is not without float8: it quantizes the weight again, the other way.

``rowwise``: gradients of weights too, dw = dy.T @ x. They sum over the rows i, whose scales s_i and t_i of x and dy are
powers of two here and go into dy's copy by columns: with c_i = s_i t_i and c = max_i c_i

    dw = c sum_i (q(dy)_i / (c / c_i)) q(x)_i

A power of two moves without another rounding, except in rows that add next to nothing to the sum: there numbers underflow.
For the backward the scales of x's rows are saved besides.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.float8.inserter import Inserter
from fx_fusion.float8.products import Product, WeightGradient
from fx_fusion.float8.sums import leave_out
from fx_fusion.kernels.float8.quantize import LARGEST, quantize_columns, quantize_rows, quantize_rows_inline
from fx_fusion.kernels.float8.together import MOST, quantize_columns_together, quantize_rows_together
from fx_fusion.kernels.float8.turn import turn_rows
from fx_fusion.memory.joint_graph import base
from fx_fusion.torch_internals.partitioner import compute_again, is_fusible
from fx_fusion.torch_internals.scaled_mm import scaled_product

_LEAST = 2.0**-120  # a power of two, and above float32's subnormals


@dataclass(frozen=True)
class Quantized:
    """The nodes of rows in float8 and of their scales, and all that were put in for them."""

    q: fx.Node
    scale: fx.Node
    made: tuple[fx.Node, ...]


class Writer:
    """Writes products of one graph anew, those of a group (``sums``) as one. What several read is quantized once.

    Attributes:
        power_of_two: whether the scales of activations and of their gradients are powers of two.
        rows: what was quantized, by ``Product.activation``.
        together: the same of products that are one, by their group.
    """

    def __init__(self, inserter: Inserter, emulate: bool, power_of_two: bool, groups: Iterable[tuple[Product, ...]] = ()):
        self._inserter, self._emulate, self.power_of_two = inserter, emulate, power_of_two
        self._group = {product: group for group in groups for product in group}
        self.rows: dict[tuple[fx.Node, Any], Quantized] = {}
        self.together: dict[tuple[Product, ...], Quantized] = {}
        self._turned: dict[tuple[fx.Node, Any], fx.Node] = {}
        self._largest: dict[fx.Node, fx.Node] = {}  # of weights, from the scales of their rows in the forward
        self._instead: dict[fx.Node, fx.Node] = {}  # of nodes that were replaced, what others read now

    def write(self, product: Product | WeightGradient) -> None:
        """Put the product in float8 in the place of the one that is there. They come in the order of the graph, gradients of
        weights whose two other products are written as well."""
        node, group = product.node, () if isinstance(product, WeightGradient) else self._group.get(product, ())
        if group and product is not max(group, key=lambda member: member.node):
            return  # the last one is written for all
        if isinstance(product, WeightGradient):
            result = self._gradient(product)
        else:
            result = self._sum(product, group) if group else self._with_weight(product)
        result.meta = {**node.meta, "val": result.meta["val"]}
        node.replace_all_uses_with(result)
        self._inserter.graph.erase_node(node)
        self._instead[node] = result
        for member in group:
            if member is not product:
                total, rest = leave_out(member.node)
                self._instead[total] = rest

    def _with_weight(self, product: Product) -> fx.Node:
        of_a, of_weight = self._rows_of(product, product.node, product.a), self._weight(product)
        multiply = _emulated if self._emulate else _multiplied_back if product.backward else _multiplied
        operands = [of_a.q, of_a.scale, *of_weight[-2:], *([] if product.bias is None else [product.bias])]
        return self._insert(product.node, multiply, operands, of_weight[-1])[-1]

    def _sum(self, product: Product, group: tuple[Product, ...]) -> fx.Node:
        """The gradient of the input of several linears, in the place of the last one."""
        a = [self._now(p.a) for p in group]
        made = self._insert(product.node, _ROWS_TOGETHER[self.power_of_two], a, a[-1])
        self.together[group] = rows = Quantized(made[-2], made[-1], tuple(made))
        operands = [*(p.b for p in group), *(self._largest[p.part] for p in group)]
        weights = self._insert(product.node, _columns_together, operands, product.node.prev)
        for member in weights:
            compute_again(member)
        multiply = _emulated if self._emulate else _multiplied_back
        return self._insert(product.node, multiply, [rows.q, rows.scale, *weights[-2:]], weights[-1])[-1]

    def _gradient(self, product: WeightGradient) -> fx.Node:
        node, key = product.node, product.forward.activation
        dy = self._rows_of(product.of_input, node, product.dy)
        of_x = self.rows[key].scale
        if key not in self._turned:
            made = self._insert(node, turn_rows, [self._now(product.x), of_x], node.prev)
            for member in made:
                compute_again(member)  # or a copy of x is saved besides
            self._turned[key] = made[-1]
        *_, of_rows, scale = self._insert(node, into_dy, [dy.scale, of_x], node.prev)
        turned = self._insert(node, turn_rows, [dy.q, of_rows], node.prev)[-1]
        operands = (self._turned[key], turned) if product.transposed else (turned, self._turned[key])
        multiply = _emulated_over_rows if self._emulate else _multiplied_over_rows
        return self._insert(node, multiply, [*operands, scale], node.prev)[-1]

    def _rows_of(self, product: Product, node: fx.Node, a: fx.Node) -> Quantized:
        """Return what the product multiplies with its weight, in float8, and its scales, made where ``node`` is the first to
        read it, as ``a``."""
        key, a = product.activation, self._now(a)
        if key not in self.rows:
            made = self._insert(node, _ROWS[_is_inductors(a), self.power_of_two], [a], a)
            self.rows[key] = Quantized(made[-2], made[-1], tuple(made))
        return self.rows[key]

    def _weight(self, product: Product) -> list[fx.Node]:
        """The nodes of the weight in float8: the last two are its values and scales."""
        node, b, largest = product.node, product.b, self._largest.get(product.part)
        turned = product.is_turned
        if turned and largest is not None and product.backward:
            made = self._insert(node, quantize_columns, [b, largest], node.prev)
        elif turned:
            made = self._insert(node, quantize_columns, [b], node.prev)
        else:
            rows = _rows_of_transposed_inline if _is_inductors(b) else _rows_of_transposed
            made = self._insert(node, rows, [b], node.prev)
            if not product.backward:
                self._largest[product.part] = self._insert(node, _largest, [made[-1]], made[-1])[-1]
        if product.backward:
            for member in made:
                compute_again(member)  # or its bytes are saved, besides the parameter
        return made

    def _now(self, node: fx.Node) -> fx.Node:
        """Return what stands in the place of a node."""
        while node in self._instead:
            node = self._instead[node]
        return node

    def _insert(
        self, product: fx.Node, function: Callable[..., Any], operands: Sequence[fx.Node], after: fx.Node
    ) -> list[fx.Node]:  # fmt: skip
        return self._inserter.insert(function, operands, after, like=product)


def _is_inductors(node: fx.Node) -> bool:
    """Return True if a kernel of Inductor's makes a node: it can quantize it then. Of several results, who makes them."""
    node = base(node)
    while node.target is operator.getitem:
        node = base(node.all_input_nodes[0])
    return is_fusible(node)


def _rows_by_powers(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(x, True)


def _rows_by_powers_inline(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows_inline(x, power_of_two=True)


# Whether Inductor makes the activation, and whether its scales are powers of two.
_ROWS = {
    (False, False): quantize_rows, (True, False): quantize_rows_inline,
    (False, True): _rows_by_powers, (True, True): _rows_by_powers_inline,
}  # fmt: skip


def _rows_together(*xs: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    return quantize_rows_together(*_three(xs), power_of_two)


def _columns_together(*given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of weights, and their maxima."""
    count = len(given) // 2
    return quantize_columns_together(*_three(given[:count]), *_three(given[count:]))


def _three(given: Sequence[Tensor]) -> list[Tensor | None]:
    return [*given, *[None] * (MOST - len(given))]


_ROWS_TOGETHER = {power: functools.partial(_rows_together, power_of_two=power) for power in (False, True)}


def _rows_of_transposed(b: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(b.permute(1, 0))


def _rows_of_transposed_inline(b: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows_inline(b.permute(1, 0))


def _largest(scale: Tensor) -> Tensor:
    """The largest magnitude of a matrix, by the scales of its rows. Its columns then have one scale: their own would cost a
    pass over it, and the range of e4m3 is wide enough for one."""
    return scale.amax() * LARGEST


def _multiplied(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None = None, fast: bool = True
) -> Tensor:  # fmt: skip
    """a @ b.T + bias."""
    return scaled_product(a, b.permute(1, 0), scale_a, scale_b.view(1, -1), bias, fast)


def into_dy(of_dy: Tensor, of_x: Tensor) -> tuple[Tensor, Tensor]:
    """c / c_i, the scales of the rows of dy's copy, and c, by which the product is multiplied: no zero, also without a
    gradient at all."""
    each = of_dy * of_x
    some = each
    if not isinstance(each.shape[0], int) or not each.numel():  # rows that are chosen in the graph may be none
        some = torch.cat((each.reshape(-1), each.new_full((1,), _LEAST)))
    largest = some.amax().clamp(min=_LEAST)
    return largest / each, largest


def _multiplied_over_rows(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """a @ b.T times a number."""
    return scaled_product(a, b.permute(1, 0), scale, torch.ones_like(scale), None, fast=False)


def _emulated_over_rows(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return ((a.float() @ b.float().permute(1, 0)) * scale).to(torch.bfloat16)


def _multiplied_back(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return _multiplied(a, scale_a, b, scale_b, fast=False)


def _emulated(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what ``_scaled_mm`` computes, with sums in float32."""
    y = (a.float() @ b.float().permute(1, 0)) * scale_a * scale_b.view(1, -1)
    return (y if bias is None else y + bias.float()).to(torch.bfloat16)
