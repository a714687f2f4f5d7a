"""Logits of other heads that a loss reads beside those that it trains: a teacher's.

What makes them is handed to the op, which makes them a chunk at a time, so that they are never in memory as a whole either.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fx_fusion.fusion.legality import why_not_plain
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.indices import WHOLE, index_of
from fx_fusion.graph.linear import Linear, linear_of
from fx_fusion.graph.rows_of_logits.values import CLASS, Input, Region, Rows
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.patterns.sites.row_tail import has_no_gradient


@dataclass(frozen=True)
class FrozenHead:
    """Logits of another head that the body reads, without a gradient: what makes them, and the rows that are taken."""

    linear: Linear
    rows: fx.Node | None
    nodes: tuple[fx.Node, ...]

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes that the logits are made of."""
        return [n for n in (self.linear.x, self.linear.weight, self.linear.bias) if n is not None]


def frozen_head(view: View, region: Region, given: Input) -> FrozenHead | None:
    """Return what makes an input of the body, if it is all rows of logits that nothing else reads, without a gradient."""
    source = given.source
    if not isinstance(source, fx.Node) or given.typed.labels[-1:] != (CLASS,):
        return None
    if given.typed.node in trained_in(region, given):
        return None
    rows = [label for label in given.typed.labels[:-1] if isinstance(label, Rows)]
    covered = [axis for label in rows for axis in range(label.first, label.last)]
    if covered != [i for i, n in enumerate(region.rows) if not (isinstance(n, int) and n == 1)]:
        return None
    node, cut = source, None
    while view.name(node) in ("detach", "getitem") or view.transparent(node) is not None:
        below = node.args[0]
        if not is_tensor(below) or not keeps_values(example(below).dtype, example(node).dtype):
            return None
        if view.name(node) == "getitem":
            index = index_of(node.args[1], example(below).dim())
            whole = index is not None and index.only_slices and not index.new_axes and index.items[-1] == WHOLE
            if cut is not None or not whole:
                return None
            cut = node
        node = below
    linear = linear_of(view, node)
    made = None if linear is None else _made_inside(view, region, node)
    if linear is None or made is None:
        return None
    head = FrozenHead(linear, cut, (node, *made))
    if view.effects.written_after(view.order[node], head.operands) is not None:
        return None
    return head if all(why_not_plain(example(n)) is None for n in head.operands) else None


def _made_inside(view: View, region: Region, node: fx.Node) -> list[fx.Node] | None:
    """Return what is made of a node up to the region; None where something of it is read outside."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or not (user in region.nodes or view.is_pure(user) or view.name(user) == "detach"):
                return None
            if user not in region.nodes and user not in seen:
                seen.add(user)
                waiting.append(user)
    return list(seen)


def trained_in(region: Region, given: Input) -> set[fx.Node]:
    """Return the nodes of the body through which a gradient comes, where the input has one."""
    return differentiated(region.body) if given.tensor.requires_grad else set()


def differentiated(body: fx.Graph) -> set[fx.Node]:
    """Return the nodes of a body through which a gradient of its results may come."""
    found, waiting = set[fx.Node](), list(body.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in found or has_no_gradient(node.target):
            continue
        found.add(node)
        waiting += node.all_input_nodes
    return found
