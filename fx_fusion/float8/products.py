"""The products of linears: in a joint graph every linear is three of them.

    y = x @ w.T (+ bias)            the forward
    dx = dy @ w                     the gradient of its input
    dw = dy.T @ x                   the gradient of its weight
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.memory.joint_graph import JointGraph, base
from fx_fusion.torch_internals.partitioner import input_number, is_cast, is_reshape, is_view
from fx_fusion.torch_internals.traced_kernels import functional_graph, insert

_ATEN = torch.ops.aten
VOCABULARY = 32000  # outputs from which on a linear may be an lm_head


@dataclass(frozen=True)
class Product:
    """``node = a @ b (+ bias)`` with a of shape (m, k), and b of (k, n) made of the parameter ``weight`` by views and casts.

    Attributes:
        source: what a is a reshape of: products with one source and k have one a.
        backward: whether it is the gradient of an input.
    """

    node: fx.Node
    a: fx.Node
    b: fx.Node
    bias: fx.Node | None
    weight: fx.Node
    source: fx.Node
    backward: bool

    @property
    def sizes(self) -> tuple[int | torch.SymInt, int | torch.SymInt, int | torch.SymInt]:
        """m, n and k."""
        (m, k), n = self.a.meta["val"].shape, self.b.meta["val"].shape[1]
        return m, n, k

    @property
    def outputs(self) -> float:
        """Return how many outputs the linear has; 0 where that is symbolic."""
        _, n, k = self.sizes
        outputs = k if self.backward else n
        return outputs if isinstance(outputs, int) else 0

    @property
    def is_turned(self) -> bool:
        """Return True if b has to be transposed to be quantized by what is summed."""
        return self.b.meta["val"].stride(0) != 1

    @property
    def part(self) -> fx.Node:
        """The weight, or the part of it that is multiplied: the same for the products of one linear."""
        node = self.b
        while node.target is _ATEN.permute.default or is_reshape(node):
            node = node.all_input_nodes[0]
        return node

    @property
    def activation(self) -> tuple[fx.Node, int | torch.SymInt]:
        """Return what is the same for products that multiply the same a."""
        return self.source, self.sizes[2]


@dataclass(frozen=True)
class WeightGradient:
    """``node = dy.T @ x``, or its transpose ``x.T @ dy``: a product of what two others of one weight multiply with it.

    Attributes:
        x, dy: reshapes, of shapes (m, k) and (m, n), of what these two multiply.
        forward, of_input: they.
    """

    node: fx.Node
    x: fx.Node
    dy: fx.Node
    forward: Product
    of_input: Product

    @property
    def transposed(self) -> bool:
        """Return True if it is ``x.T @ dy``."""
        return self.node.args[1] is self.dy


def products(joint: JointGraph, parameters: frozenset[int]) -> Iterator[Product]:
    """Every product with a weight, ``parameters`` being the numbers of the inputs that are some."""
    for node in joint.graph.nodes:
        if node.target is _ATEN.mm.default:
            bias, (a, b) = None, node.args
        elif node.target is _ATEN.addmm.default and not node.kwargs:
            bias, a, b = node.args
        else:
            continue
        weight = _origin(b)
        if input_number(weight) in parameters and input_number(_origin(a)) not in parameters:
            yield Product(node, a, b, bias, weight, source(a), node in joint.backward)


def weight_gradients(joint: JointGraph, found: Collection[Product]) -> Iterator[WeightGradient]:
    """The gradients of weights of which ``found`` has forward and gradient of the input."""
    multiply: dict[fx.Node, list[Product]] = {}
    for product in found:
        multiply.setdefault(product.source, []).append(product)
    for node in joint.graph.find_nodes(op="call_function", target=_ATEN.mm.default):
        if node not in joint.backward or node.args[0].target is not _ATEN.permute.default:
            continue
        operands = node.args[0].args[0], node.args[1]
        sides = [multiply.get(source(operand), []) for operand in operands]
        sides = [[p for p in side if _has_shape_of(p.a, n)] for side, n in zip(sides, operands, strict=True)]
        pairs = ((one, other) for one in sides[0] for other in sides[1] if one.weight is other.weight)
        for one, other in pairs:
            if one.backward is not other.backward:
                (dy, of_input), (x, forward) = sorted(zip(operands, (one, other), strict=True), key=_is_forward)
                yield WeightGradient(node, x, dy, forward, of_input)
                break


def _has_shape_of(node: fx.Node, other: fx.Node) -> bool:
    shapes = node.meta["val"].shape, other.meta["val"].shape
    return all(statically_known_true(a == b) for a, b in zip(*shapes, strict=True))


def _is_forward(side: tuple[fx.Node, Product]) -> bool:
    return not side[1].backward


def vocabularies(joint: JointGraph, found: Collection[Product], rows: Mapping[int, int]) -> Iterator[fx.Node]:
    """The weights of linears with so many outputs that they are taken for classes, unless another linear reads what is made
    of them, as ``down_proj`` does in an MLP. ``rows``: of weights that are DTensors, on all ranks, by input."""

    def is_wide(product: Product) -> bool:
        here = product.weight.meta["val"].shape[0]
        whole = rows.get(number, here) if (number := input_number(product.weight)) is not None else here
        return product.outputs * whole >= VOCABULARY * here

    forwards = [p for p in found if not p.backward]
    read = {member for p in forwards for member in _ancestors(p.a, p)}
    for product in forwards:
        if is_wide(product) and product.node not in read:
            yield product.weight
    of_forwards = {p.weight for p in forwards}
    yield from (p.weight for p in found if p.weight not in of_forwards and is_wide(p))


_BETWEEN = 64  # nodes, from an activation back to the products that it is made of


def _ancestors(node: fx.Node, product: Product) -> set[fx.Node]:
    """Return what an activation is made of, back to the products of other linears."""
    seen, stack = {node}, [node]
    while stack and len(seen) < _BETWEEN:
        member = stack.pop()
        if member.target in (_ATEN.mm.default, _ATEN.addmm.default):
            continue
        found = [n for n in member.all_input_nodes if n not in seen and n is not product.weight]
        seen.update(found)
        stack += found
    return seen


def unpaired(joint: JointGraph, found: Collection[Product], gradients: Collection[WeightGradient]) -> Iterator[Product]:
    """The forwards of ``found`` whose weight has a gradient that is none of ``gradients``: their input has none."""
    paired = {g.forward for g in gradients}
    with_input = {p.weight for p in found if p.backward}
    known = {g.node for g in gradients} | {p.node for p in found}
    lonely: dict[fx.Node, int] = {}
    for node in joint.graph.find_nodes(op="call_function", target=_ATEN.mm.default):
        if node in joint.backward and node not in known:
            for operand in node.args:
                turned = operand.args[0] if operand.target is _ATEN.permute.default else operand
                lonely[source(turned)] = lonely.get(source(turned), 0) + 1
    for product in found:
        if product.backward or product in paired or product.weight in with_input:
            continue
        if lonely.get(product.source, 0) > 0:
            lonely[product.source] -= 1
            yield product


def batches_of_one_to_products(graph: fx.Graph, parameters: frozenset[int]) -> None:
    """Write each batch of one product of a linear, as einsum makes of it, as that product."""
    batches = [
        node
        for node in graph.find_nodes(op="call_function", target=_ATEN.bmm.default)
        if statically_known_true(node.args[0].meta["val"].shape[0] == 1)
    ]
    with_weight = [node for node in batches if input_number(_origin(node.args[1])) in parameters]
    sources = {source(node.args[0]) for node in with_weight}
    for node in batches:
        a, b = node.args
        if node in with_weight:
            _write(node, _first_product, [a, b])
        elif a.target is _ATEN.permute.default and {source(a.args[0]), source(b)} <= sources:
            _write(node, _first_gradient, [a.args[0], b])


def _write(node: fx.Node, function: Callable[..., Tensor], operands: list[fx.Node]) -> None:
    made = insert(functional_graph(function, [n.meta["val"] for n in operands]), node.graph, operands, node.prev)
    for member in made:
        member.meta = {**node.meta, "val": member.meta["val"]}
    node.replace_all_uses_with(made[-1])
    node.graph.erase_node(node)


def _first_product(a: Tensor, b: Tensor) -> Tensor:
    return (a.squeeze(0) @ b.squeeze(0)).unsqueeze(0)


def _first_gradient(a: Tensor, b: Tensor) -> Tensor:
    return (a.squeeze(0).permute(1, 0) @ b.squeeze(0)).unsqueeze(0)


def _origin(node: fx.Node) -> fx.Node:
    """Return what a node is views and casts of."""
    while node.op == "call_function" and (is_view(node) or is_cast(node)):
        node = base(node) if is_view(node) else node.all_input_nodes[0]
    return node


def source(node: fx.Node) -> fx.Node:
    """Return what a node is a reshape of."""
    while is_reshape(node):
        node = node.all_input_nodes[0]
    return node

