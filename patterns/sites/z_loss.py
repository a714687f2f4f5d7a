"""The z-loss that is added to a cross-entropy: a number times the squares of each row's logsumexp, reduced as the loss is.

    loss + c · mean(logsumexp(z)²)                            of all rows
    loss + c · mean(logsumexp(z)² · (y != ignored))           of those that count, over the number of all
    loss + c · sum(logsumexp(z)² · (y != ignored)) / count    of those that count, count = sum(y != ignored)

A sum of losses goes with a sum of squares, losses of rows with squares of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.terms import Term, example, is_tensor, over_last_dim, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import source_of
from fx_fusion.patterns.sites.log_probs import below_views
from fx_fusion.patterns.sites.loss import LossSite

_VIEWS = ("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze")
_CASTS = ("float", "to", "type_as", "int", "long", "bool")


@dataclass
class ZLoss:
    """``root`` is the sum of both losses; ``nodes`` make it from the loss and the logits. ``over`` as in
    ``kernels/linear_cross_entropy``: "all" rows, those that "count", or these over the number of all ("masked")."""

    root: fx.Node
    factor: float
    over: str
    nodes: set[fx.Node]


@dataclass
class _Steps:
    """The steps from the sum down to the squares."""

    factor: float = 1.0
    reduction: str = "none"
    masked: bool = False
    counted: bool = False  # divided by the number of rows that count
    nodes: set[fx.Node] = field(default_factory=set)
    squares: set[fx.Node] = field(default_factory=set)  # those that nothing else may read
    crossed: set[fx.Node] = field(default_factory=set)  # masks, counts and copies of the target
    targets: set[fx.Node] = field(default_factory=set)  # what they are made of

    def over(self, reduction: str) -> str | None:
        """Return which rows these are, beside losses of this reduction; None where the two don't go together."""
        if reduction == "mean" and self.counted:
            return "count" if self.masked and self.reduction == "sum" else None
        if self.counted or reduction != self.reduction:
            return None
        if not self.masked:
            return "all"
        return "masked" if reduction == "mean" else "count"


def z_loss_of(view: View, site: LossSite) -> ZLoss | str | None:
    """The z-loss that a loss is added to, or why it can't be computed with it; None where there is none."""
    if site.sign < 0:
        return None
    for root in site.root.users:
        term = view.term(root)
        if term.op == "add" and site.root in term.operands and same_shape(example(root), example(site.root)):
            steps = _Steps()
            lse = _squared(view, site, term.operands[1 if term.operands[0] is site.root else 0], steps)
            if lse is not None and _is_of_its_logits(view, lse, site, steps):
                return _together(view, site, root, steps)
    return None


def _together(view: View, site: LossSite, root: fx.Node, steps: _Steps) -> ZLoss | str:
    over = steps.over(site.reduction)
    if over is None:
        return f"its z-loss is not reduced as the loss is ({site.reduction!r}), over all rows or those with a target"
    inside = {*site.nodes, *steps.nodes, root}
    for node in (site.root, *steps.squares):
        for user in node.users:
            if user not in inside:
                return f"{node.name}, a part of the sum of loss and z-loss, is also read by {user.name}: read the sum alone"
    if any(view.effects.region[node] != view.effects.region[root] for node in steps.nodes):
        return "its z-loss is computed in another grad mode or autocast region"
    # Masks, counts and copies of the target must hold now what they were made of.
    made = [view.order[node] for node in steps.crossed]
    write = view.effects.written_after(min(made), steps.crossed | steps.targets) if made else None
    if write is not None:
        return f"{write.name} writes to the target, or to a mask or a count that is made of it"
    return ZLoss(root, steps.factor, over, {root, *steps.nodes})


def _squared(view: View, site: LossSite, operand: Any, steps: _Steps) -> fx.Node | None:
    """The tensor whose squares are summed, the steps to it added; None if there are others."""
    while True:
        edge = view.edge(operand)
        if not is_tensor(edge.base):
            return None
        term = edge.base if isinstance(edge.base, Term) else view.term(edge.base)
        steps.squares.update((*edge.crossed, *term.nodes))
        if term.op == "square":
            inner = view.edge(term.operands[0])
            lse, crossed = _without_views(view, inner.base)
            steps.squares.update((*inner.crossed, *crossed))
            return lse
        if isinstance(edge.base, fx.Node) and (below := _below_view(view, edge.base)) is not None:
            operand = below
            continue
        operand = _below(view, site, term, steps)
        if operand is None:
            return None


def _below(view: View, site: LossSite, term: Term, steps: _Steps) -> Any:
    """The operand of one step that is understood."""
    if term.op in ("mean", "sum") and steps.reduction == "none" and example(term.nodes[0]).dim() == 0:
        steps.reduction = term.op
        return term.operands[0]
    if term.op not in ("mul", "div") or len(term.operands) != 2:
        return None
    left, right = term.operands
    if term.op == "mul" and isinstance(left, (int, float)):
        left, right = right, left
    if isinstance(right, (int, float)):
        if right < 0 or (term.op == "div" and right == 0):
            return None
        steps.factor *= right if term.op == "mul" else 1 / right
        return left
    if term.op == "div":
        if steps.counted:
            return None
        steps.counted = steps.reduction == "none" and _counts(view, site, right, steps)
        return left if steps.counted else None
    for squares, mask in ((left, right), (right, left)):
        alike = is_tensor(squares) and is_tensor(mask) and same_shape(example(squares), example(mask))
        if not steps.masked and alike and _is_mask(view, site, mask, steps):
            steps.masked = True
            return squares
    return None


def _counts(view: View, site: LossSite, node: Any, steps: _Steps) -> bool:
    """Return True if a node is the number of rows whose target counts, or 1 if none does."""
    edge = view.edge(node)
    base, crossed = edge.base, [*edge.crossed]
    clamp = view.arguments_of(base, "clamp", "clamp_min")
    if clamp is not None and clamp["min"] == 1 and clamp.get("max") is None:
        crossed.append(base)
        base = clamp["input"]
    total = view.arguments_of(base, "sum")
    if total is None or total["dim"] is not None or total["dtype"] is not None:
        return False
    steps.crossed.update((*crossed, base))
    return _is_mask(view, site, total["input"], steps)


def _is_mask(view: View, site: LossSite, node: Any, steps: _Steps) -> bool:
    """Return True if a node is ``target != ignore_index``, as a bool or a number, of any shape."""
    crossed = []
    while (isinstance(node, fx.Node) and view.name(node) in _CASTS) or _below_view(view, node) is not None:
        crossed.append(node)
        node = source_of(node)
    bound = view.arguments_of(node, "ne")
    if bound is None or bound["other"] != site.ignore_index or not is_tensor(bound["input"]):
        return False
    (one, above_one), (other, above) = (_without_views(view, target) for target in (bound["input"], site.target))
    if not view.same_value(one, other):
        return False
    steps.crossed.update((*crossed, node, *above_one, *above))
    steps.targets.update((one, other))
    return True


def _without_views(view: View, node: Any) -> tuple[Any, list[fx.Node]]:
    """Return what a node is a view or a copy of, row after row, and the nodes from it to there."""
    crossed = []
    while (below := _below_view(view, node)) is not None:
        crossed.append(node)
        node = below
    return node, crossed


def _below_view(view: View, node: Any) -> fx.Node | None:
    """Return what a node lays out anew, in the same order and dtype."""
    if not isinstance(node, fx.Node) or view.name(node) not in _VIEWS:
        return None
    below = source_of(node)
    return below if below is not None and is_tensor(below) and example(below).dtype == example(node).dtype else None


def _is_of_its_logits(view: View, lse: fx.Node, site: LossSite, steps: _Steps) -> bool:
    """Return True if a node is the logsumexp of each row of the site's logits, cast and laid out in any way."""
    bound = view.arguments_of(lse, "logsumexp")
    if bound is None or not is_tensor(bound["input"]) or not over_last_dim(bound["dim"], bound["input"]):
        return False
    if example(lse).dtype == torch.float64:  # the kernels compute in float32
        return False
    steps.squares.add(lse)
    logits, above = _uncast_rows(view, bound["input"])
    if not view.same_value(logits, _uncast_rows(view, site.logits)[0]):
        return False
    steps.nodes.update((*above, *steps.squares))
    return True


def _uncast_rows(view: View, node: fx.Node) -> tuple[fx.Node, set[fx.Node]]:
    """Return what a node is a view or a wider cast of, row after row, and the nodes between."""
    crossed: set[fx.Node] = set()
    while True:
        base, views = below_views(view, node)
        source = view.source(base)
        crossed |= {*views, *source.crossed}
        if source.base is node or not isinstance(source.base, fx.Node):
            return base, crossed
        node = source.base
