"""The products of activations, or of their gradients, with a weight: in a joint graph every linear is two of them.

    y = x @ w.T (+ bias)            the forward
    dx = dy @ w                     the gradient of its input

The third, the gradient of the weight, is a product of x and dy and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fx_fusion.memory.joint_graph import JointGraph, base
from fx_fusion.torch_internals.partitioner import input_number, is_cast, is_reshape, is_view
from fx_fusion.torch_internals.traced_kernels import functional_graph, insert

_ATEN = torch.ops.aten


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
        with_weight = input_number(weight) in parameters and input_number(_origin(a)) not in parameters
        if with_weight and (bias is None or bias.meta["val"].dim() == 1):
            yield Product(node, a, b, bias, weight, _source(a), node in joint.backward)


def batches_of_one_to_products(graph: fx.Graph, parameters: frozenset[int]) -> None:
    """Write each batch of one product with a weight, as einsum makes of a linear, as that product."""
    for node in graph.find_nodes(op="call_function", target=_ATEN.bmm.default):
        a, b = node.args
        if a.meta["val"].shape[0] == 1 and input_number(_origin(b)) in parameters:
            product = functional_graph(_first_product, [a.meta["val"], b.meta["val"]])
            made = insert(product, graph, [a, b], node.prev)
            for member in made:
                member.meta = {**node.meta, "val": member.meta["val"]}
            node.replace_all_uses_with(made[-1])
            graph.erase_node(node)


def _first_product(a: Tensor, b: Tensor) -> Tensor:
    return (a.squeeze(0) @ b.squeeze(0)).unsqueeze(0)


def _origin(node: fx.Node) -> fx.Node:
    """What a node is views and casts of."""
    while node.op == "call_function" and (is_view(node) or is_cast(node)):
        node = base(node) if is_view(node) else node.all_input_nodes[0]
    return node


def _source(node: fx.Node) -> fx.Node:
    while is_reshape(node):
        node = node.all_input_nodes[0]
    return node

