"""Gradients of one input by several linears, of which only the sum is read: one product makes it.

    dx = dy_1 @ w_1 + dy_2 @ w_2 = [dy_1 dy_2] @ [w_1; w_2]

So it is of q, k and v, and of gate and up. The sum is rounded once, and is not computed by kernels of its own. A row of them
has one scale: next to the largest, what is 30 000 times smaller adds nothing to the sum. Gradients of weights in float8 ask
for rows of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fx_fusion.float8.gate import gate_of
from fx_fusion.float8.products import Product
from fx_fusion.kernels.float8.together import MOST
from fx_fusion.torch_internals.partitioner import is_reshape

_ADD = torch.ops.aten.add.Tensor


def sums(found: Iterable[Product], owning: Collection[Product] = ()) -> Iterator[tuple[Product, ...]]:
    """Yield those of ``found``, in the order of the graph, whose sum one product makes: gradients of one size that follow
    one another, so that nothing waits long for the others, of weights that a forward before them has quantized by rows. In
    the order of their forwards, which is the opposite one. Both halves of a gate are by themselves: its kernel writes them
    beside each other (``float8.gates``), but not again for those that ask for rows of their own, ``owning``."""
    products = list(found)
    of_forwards = {p.part for p in products if not p.backward and not p.is_turned}
    run, of = list[Product](), None
    for product in (p for p in products if p.backward and p.part in of_forwards):
        gate = gate_of(product.source)
        kind = _sum_of(product), gate and gate.node
        if kind[0] is None or kind != of or not _beside(run, product) or len(run) == MOST:
            yield from _groups(run, of, owning)
            run = []
        run, of = [*run, product], kind
    yield from _groups(run, of, owning)


def _groups(run: list[Product], of: Any, owning: Collection[Product]) -> Iterator[tuple[Product, ...]]:
    of_a_gate = of is not None and of[1] is not None
    if len(run) > 1 and not (of_a_gate and any(p in owning for p in run)):
        yield tuple(reversed(run))


def _beside(run: list[Product], product: Product) -> bool:
    """Return True if it has the sizes of those before, and another gradient."""
    of_run = {p.activation for p in run}
    return product.activation not in of_run and all(p.sizes[:2] == product.sizes[:2] for p in run)


def _sum_of(product: Product) -> fx.Node | None:
    """The last of the sums that are all that is read of a product with a weight in rows."""
    if not product.is_turned:
        return None
    node, end = product.node, None
    while (user := _only_reader(node)) is not None and (is_reshape(user) or _is_plain_sum(user)):
        node, end = user, end if is_reshape(user) else user
    return end


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_plain_sum(node: fx.Node) -> bool:
    """Return True if a node is the sum of two nodes alike, laid out as they are."""
    if node.target is not _ADD or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    return all((v.shape, v.stride(), v.dtype) == (values[0].shape, values[0].stride(), values[0].dtype) for v in values)


def leave_out(term: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Take a product out of the sum that it is a term of, and erase it. Returns this sum, which is erased too, and what
    stands in its place."""
    path = [term]
    while is_reshape(user := next(iter(path[-1].users))):
        path.append(user)
    (rest,) = (n for n in user.all_input_nodes if n is not path[-1])
    user.replace_all_uses_with(rest)
    for node in (user, *reversed(path)):
        node.graph.erase_node(node)
    return user, rest
