"""Write products with a weight anew, in float8: what the forward and the gradients of inputs multiply has a scale a row.

``rowwise_gw_hp`` (torchao's ``rowwise_with_gw_hp``): both operands of these two products are quantised along the dim that is
summed, by their current values, so there is no state; gradients of weights stay products in bfloat16. Nothing is saved for
the backward that is not without float8: it quantises the weight again, the other way.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.float8.choice import slower, why_not, without_support
from fx_fusion.float8.products import Product, batches_of_one_to_products, products
from fx_fusion.graph.places import module_of
from fx_fusion.kernels.float8.quantise import LARGEST, quantise_columns, quantise_rows, quantise_rows_inline
from fx_fusion.memory.joint_graph import JointGraph, base
from fx_fusion.memory.recompute import Decisions
from fx_fusion.torch_internals.partitioner import checkpoint_of, compute_again, is_fusible, set_checkpoint
from fx_fusion.torch_internals.scaled_mm import scaled_product
from fx_fusion.torch_internals.traced_kernels import functional_graph, insert


@dataclass
class Linears:
    """What became of the products with a weight of one joint graph. ``asked``, but not ``made``: torch's cache had the
    compiled graph already. ``products``: of each its module, whether it is the gradient of an input, and why it stays in
    bfloat16, empty for one in float8."""

    recipe: str = "off"
    asked: bool = False
    made: bool = False
    products: list[tuple[str, bool, str]] = field(default_factory=list)
    trouble: str = ""  # why all others stay in bfloat16, if something raised or the device has no float8

    @property
    def any(self) -> bool:
        """Whether a product runs in float8."""
        return any(not reason for _, _, reason in self.products)

    def sentences(self) -> list[str]:
        """What runs in float8; what does not, and why."""
        if not self.asked:
            return []
        if self.trouble:
            return [f"float8 {self.recipe}: {'the rest' if self.any else 'all'} in bfloat16: {self.trouble}"]
        if not self.made:
            return [f"float8 {self.recipe}: from torch's compile cache, decided when it was compiled"]
        said = []
        for backward, what in ((False, "forward"), (True, "gradients of inputs")):
            names = Counter(_leaf(m) for m, b, reason in self.products if b is backward and not reason)
            said += [f"{what} of {_listed(names)}"] if names else []
        found = [f"float8 {self.recipe}: {'; '.join(said) or 'nothing'}"]
        kept = Counter((_leaf(m), b, reason) for m, b, reason in self.products if reason)
        for (name, backward, reason), count in kept.items():
            which = "gradient of the input of" if backward else "forward of"
            found.append(f"float8 {self.recipe}: in bfloat16: {which} {count} x {name}: {reason}")
        return found


def _leaf(module: str) -> str:
    return next((part for part in reversed(module.split(".")) if not part.isdigit()), "") or "a function"


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def to_float8(graph: fx.Graph, keep: Sequence[str], select: str, inputs: Decisions, linears: Linears) -> None:
    """Write the products of a joint graph anew that may be and that gain by it, and write down what became of each.

    Args:
        keep: patterns (``fnmatch``) of the paths of modules that stay in bfloat16.
        select: ``"always"``: without asking whether they gain; ``"never"``: none.
        inputs: which of them are parameters, and which the graph writes to.
    """
    linears.made = True
    parameters = frozenset(inputs.parameters)
    batches_of_one_to_products(graph, parameters)
    joint = JointGraph(graph, written=inputs.written)
    found = list(products(joint, parameters))
    if not found:
        return
    device = found[0].a.meta["val"].device
    emulate = select == "always" and device.type == "cpu"
    linears.trouble = "" if emulate else without_support(device)
    if linears.trouble:
        warnings.warn(f"fx_fusion: float8 was asked for, and all is in bfloat16: {linears.trouble}", stacklevel=2)
        return
    modules = {p.weight: module_of(p.node) for p in found if not p.backward}
    places = {p: modules.get(p.weight) or module_of(p.node) for p in found}
    kept = {p: reason for p in found if (reason := why_not(p, places[p], keep))}
    kept.update({p: "the graph writes to its weight" for p in found if joint.is_lost(p.weight)})
    if select == "never":
        kept.update(dict.fromkeys(found, "select='never'"))
    elif select != "always":
        kept.update(slower(p for p in found if p not in kept))
    writer = _Writer(graph, emulate)
    for product in found:
        if product not in kept:
            writer.write(product)
        linears.products.append((places[product], product.backward, kept.get(product, "")))


class _Writer:
    """Writes products of one graph anew. What several read is quantised once, and equal functions are traced once."""

    def __init__(self, graph: fx.Graph, emulate: bool):
        self._graph, self._emulate = graph, emulate
        self._rows: dict[tuple[fx.Node, Any], tuple[fx.Node, fx.Node]] = {}
        self._largest: dict[fx.Node, fx.Node] = {}  # of weights, from the scales of their rows in the forward
        self._traced: dict[tuple[Any, ...], fx.GraphModule] = {}

    def write(self, product: Product) -> None:
        """Put the product in float8 in the place of the one that is there."""
        node, key = product.node, (product.source, product.sizes[2])
        if key not in self._rows:
            rows = quantise_rows_inline if is_fusible(base(product.a)) else quantise_rows
            *_, q, scale = self._insert(product, rows, [product.a], product.a)
            self._rows[key] = q, scale
        of_weight = self._weight(product)
        multiply = _emulated if self._emulate else _multiplied_back if product.backward else _multiplied
        operands = [*self._rows[key], *of_weight[-2:], *([] if product.bias is None else [product.bias])]
        result = self._insert(product, multiply, operands, of_weight[-1])[-1]
        result.meta = {**node.meta, "val": result.meta["val"]}
        node.replace_all_uses_with(result)
        self._graph.erase_node(node)

    def _weight(self, product: Product) -> list[fx.Node]:
        """The nodes of the weight in float8: the last two are its values and scales."""
        b, largest = product.b, self._largest.get(product.weight)
        turned = b.meta["val"].stride(0) != 1
        if turned and largest is not None and product.backward:
            made = self._insert(product, quantise_columns, [b, largest], product.node.prev)
        elif turned:
            made = self._insert(product, quantise_columns, [b], product.node.prev)
        else:
            rows = _rows_of_transposed_inline if is_fusible(base(b)) else _rows_of_transposed
            made = self._insert(product, rows, [b], product.node.prev)
            if not product.backward:
                self._largest[product.weight] = self._insert(product, _largest, [made[-1]], made[-1])[-1]
        if product.backward:
            for member in made:
                compute_again(member)  # or its bytes are saved, besides the parameter
        return made

    def _insert(
        self, product: Product, function: Callable[..., Any], operands: list[fx.Node], after: fx.Node
    ) -> list[fx.Node]:  # fmt: skip
        """The nodes of a function of ``operands``, put behind ``after`` and them. Those of a checkpointed product are
        computed again with it, or for it, and never saved."""
        values = [n.meta["val"] for n in operands]
        key = function, *((str(v.shape), str(v.stride()), v.dtype, v.device) for v in values)
        if key not in self._traced:
            self._traced[key] = functional_graph(function, values)
        made = insert(self._traced[key], self._graph, operands, max(*operands, after))
        if (said := checkpoint_of(product.node)) is not None:
            for node in made:
                set_checkpoint(node, said)
        return made


def _rows_of_transposed(b: Tensor) -> tuple[Tensor, Tensor]:
    return quantise_rows(b.permute(1, 0))


def _rows_of_transposed_inline(b: Tensor) -> tuple[Tensor, Tensor]:
    return quantise_rows_inline(b.permute(1, 0))


def _largest(scale: Tensor) -> Tensor:
    """The largest magnitude of a matrix, by the scales of its rows. Its columns then have one scale: their own would cost a
    pass over it, and the range of e4m3 is wide enough for one."""
    return scale.amax() * LARGEST


def _multiplied(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None = None, fast: bool = True
) -> Tensor:  # fmt: skip
    """a @ b.T + bias."""
    return scaled_product(a, b.permute(1, 0), scale_a, scale_b.view(1, -1), bias, fast)


def _multiplied_back(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    return _multiplied(a, scale_a, b, scale_b, fast=False)


def _emulated(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """What ``_scaled_mm`` computes, with sums in float32."""
    y = (a.float() @ b.float().permute(1, 0)) * scale_a * scale_b.view(1, -1)
    return (y if bias is None else y + bias.float()).to(torch.bfloat16)
