"""A number that is linear in the losses of rows: by how much each row is in it is known before its loss is.

    (loss * mask).sum() / mask.sum()        where(mask, loss, 0).mean()        (loss.view(b, s).sum(1) / lengths).mean()

Read from the losses up to the number, and back down to the weight of each row, as its gradient would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.legality import why_not_plain
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.terms import example, is_tensor, negative_dim, same_shape, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary, source_of
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.torch_internals.containers import map_nodes

_VIEWS = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous")
_Back = Callable[["_Weights", fx.Node], fx.Node]


@dataclass
class WeightedSum:
    """``root`` is the number, made from the losses ``rows`` by ``nodes``, one behind the other, that read ``others`` too."""

    rows: fx.Node
    root: fx.Node
    nodes: list[fx.Node]
    others: list[fx.Node]
    back: list[_Back]  # for each node: the weights of what it reads, given those of its result


def weighted_sum(view: View, rows: fx.Node) -> WeightedSum | None:
    """The number that nothing but linear steps make of the losses ``rows``, one or more; None where there is none. The steps
    may be made again behind the last of them: in one region, of tensors that nothing writes to until then."""
    nodes: list[fx.Node] = []
    others: list[fx.Node] = []
    back: list[_Back] = []
    node, found = rows, None if example(rows).dim() else WeightedSum(rows, rows, [], [], [])
    while len(node.users) == 1:
        (user,) = node.users
        step = _step(view, user, node, others) if is_tensor(user) else None
        if step is None or example(user).dtype == torch.float64 or view.effects.region[user] != view.effects.region[rows]:
            break
        nodes.append(user)
        back.append(step)
        node = user
        if example(node).dim() == 0 and not is_written(view, rows, node, others):
            found = WeightedSum(rows, node, nodes[:], others[:], back[:])
    return found


def is_written(view: View, rows: fx.Node, root: fx.Node, others: Sequence[fx.Node]) -> bool:
    """Return True if something writes to one of ``others`` while a number is made of losses: the steps are made again behind
    it."""
    return view.effects.writes_between(view.order[rows], view.order[root], others) is not None


def made_again(editor: Editor, total: WeightedSum, value: fx.Node, start: int = 0) -> fx.Node:
    """The number, of losses in float32 that take the place of those that the step ``start`` reads."""
    below, root = total.nodes[start - 1] if start else total.rows, total.root
    new = {below: value}
    for node in total.nodes[start:]:
        if editor.view.transparent(node) is below:  # a cast
            new[node] = new[below]
        else:
            args, kwargs = map_nodes(lambda n: new.get(n, n), (node.args, dict(node.kwargs)))
            made = editor.method if node.op == "call_method" else editor.call
            new[node] = made(node.target, args, kwargs, like=root)
        below = node
    return new[below]


def over_classes(editor: Editor, total: WeightedSum, rows: fx.Node, like: fx.Node) -> tuple[fx.Node, int]:
    """Return what the steps up to that which adds up the classes make of numbers of a row and a class, from their sums
    ``rows`` (m), float32; and the number of the next step. Raises Mismatch where other steps than products come before
    it."""
    weights = _Weights(editor, like, rows)
    shape = example(total.rows).shape
    last = next((n for n, node in enumerate(total.nodes) if not same_sizes(example(node).shape, shape)), None)
    bound = None if last is None else editor.view.arguments_of(total.nodes[last], "sum", "mean")
    dims = None if bound is None else _dims(bound, len(shape))
    if last is None or bound is None or not dims or len(shape) - 1 not in dims:
        raise Mismatch("the terms are not added up over the classes first")
    begin = WeightedSum(total.rows, total.nodes[last], total.nodes[: last + 1], [], total.back[: last + 1])
    weight = weight_of_all_classes(editor, weight_below(editor, begin, rows, like), like)
    rows = editor.method("reshape", (rows, weights.sizes(shape[:-1])), like=like)
    value = editor.call(torch.mul, (rows, weight), like=like)
    if dims[:-1]:
        value = editor.method("sum", (value, tuple(dims[:-1]), bound["keepdim"]), like=like)
    return editor.method("unsqueeze", (value, -1), like=like) if bound["keepdim"] else value, last + 1


def weight_below(
    editor: Editor, total: WeightedSum, alike: fx.Node, like: fx.Node, first: fx.Node | None = None
) -> fx.Node:  # fmt: skip
    """The weight, float32, in a shape that is broadcast, of what a number is made of. ``first``: that of the number itself;
    by default 1. ``alike``: a node (m)."""
    weights, weight = _Weights(editor, like, alike), first
    if weight is None:
        weight = editor.call(torch.ones, ((),), {"dtype": torch.float32, "device": example(total.root).device}, like=like)
    for step in reversed(total.back):
        weight = step(weights, weight)
    return weight


def weights_of_rows(
    editor: Editor, total: WeightedSum, alike: fx.Node, like: fx.Node, *, of_classes: bool = False,
    divisors: Sequence[Any] = (), first: fx.Node | None = None,
) -> fx.Node:  # fmt: skip
    """The weight (m), float32, of each row in the number; ``alike``: a node (m).

    The number is made of losses, with ``of_classes`` of numbers of a row and a class, all classes of one weight, or of one
    loss that is a sum over the rows, divided by the ``divisors``. ``first``: the weight of the number itself. Raises
    Mismatch where classes have weights of their own."""
    weights, weight = _Weights(editor, like, alike), weight_below(editor, total, alike, like, first)
    weight = weights.divided(weight, divisors)
    if weights.is_one_number(weight):
        alone = editor.method("reshape", (weight, ()), like=like)
        return editor.method("contiguous", (editor.method("expand_as", (alone, alike), like=like),), like=like)
    shape = tuple(example(total.rows).shape)
    if of_classes:
        weight, shape = weight_of_all_classes(editor, weight, like), shape[:-1]
    return editor.method("reshape", (weights.spread_to(weight, shape), -1), like=like)


def divided(editor: Editor, number: fx.Node, sizes: Sequence[Any], alike: fx.Node, like: fx.Node) -> fx.Node:
    """A number over sizes; ``alike``: a node (m)."""
    return _Weights(editor, like, alike).divided(number, sizes)


def weight_of_all_classes(editor: Editor, weight: fx.Node, like: fx.Node) -> fx.Node:
    """A weight of each row and class without the dim of classes, which all have one. Raises Mismatch where they have not."""
    if example(weight).dim() == 0:
        return weight
    if not statically_known_true(example(weight).shape[-1] == 1):
        raise Mismatch("the classes of a row have weights of their own; one number a row is fused")
    return editor.method("squeeze", (weight, -1), like=like)


@dataclass
class _Weights:
    """Steps back down, to m rows as ``alike`` has. A weight has the shape that it is broadcast from."""

    editor: Editor
    like: fx.Node
    alike: fx.Node

    def sizes(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Sizes, m as a node where it is a product of symbols: a graph that holds a symbol itself can't be run as it is."""
        m = example(self.alike).shape[0]
        return tuple(
            self.editor.method("size", (self.alike, 0), like=self.like)
            if isinstance(n, torch.SymInt) and statically_known_true(n == m)
            else n
            for n in shape
        )

    def divided(self, weight: fx.Node, sizes: Sequence[Any]) -> fx.Node:
        for size in self.sizes(sizes):
            weight = self.call(torch.div, weight, size)
        return weight

    def is_one_number(self, weight: fx.Node) -> bool:
        return all(statically_known_true(n == 1) for n in example(weight).shape)

    def spread(self, weight: fx.Node, node: fx.Node) -> fx.Node:
        """A weight in the shape of a node."""
        return self.spread_to(weight, tuple(example(node).shape))

    def spread_to(self, weight: fx.Node, shape: tuple[Any, ...]) -> fx.Node:
        if same_sizes(example(weight).shape, shape):
            return weight
        return self.editor.method("expand", (weight, self.sizes(shape)), like=self.like)

    def wide(self, other: Any) -> Any:
        """Floats in 16 bits in float32: one number in float32 times them would be rounded to 16 bits."""
        floats = is_tensor(other) and example(other).is_floating_point()
        return self.editor.cast(other, torch.float32, like=self.like) if floats else other

    def call(self, function: Any, *operands: Any) -> fx.Node:
        return self.editor.call(function, operands, like=self.like)


def _step(view: View, node: fx.Node, below: fx.Node, others: list[fx.Node]) -> _Back | None:
    """Return how weights go through ``node`` back to ``below``; None where it is not linear, or copies losses."""
    name, bound = view.name(node), view.arguments(node)
    if bound is None:
        return None
    if view.transparent(node) is below:
        return (lambda w, weight: weight) if keeps_values(example(below).dtype, example(node).dtype) else None
    if name in ("mul", "div"):
        return _product(view, node, below, others, name)
    if name == "where":
        return _choice(view, node, below, bound, others)
    if source_of(node) is not below:  # other.view_as(below) is none of it
        return None
    if name in _VIEWS:
        return _view(node, below)
    if name == "neg":
        return lambda w, weight: w.call(torch.neg, weight)
    if name in ("sum", "mean"):
        return _reduction(node, below, bound, name)
    return _choice(view, node, below, bound, others) if name == "masked_fill" else None


def _view(node: fx.Node, below: fx.Node) -> _Back:
    def back(w: _Weights, weight: fx.Node) -> fx.Node:
        shape = () if w.is_one_number(weight) else tuple(example(below).shape)
        whole = weight if shape == () else w.spread(weight, node)
        return w.editor.method("reshape", (whole, -1 if len(shape) == 1 else w.sizes(shape)), like=w.like)

    return back


def _reduction(node: fx.Node, below: fx.Node, bound: Any, name: str) -> _Back | None:
    if bound["dtype"] is not None and not keeps_values(example(below).dtype, bound["dtype"]):
        return None
    shape = example(below).shape
    dims = _dims(bound, len(shape))
    if dims is None:
        return None

    def back(w: _Weights, weight: fx.Node) -> fx.Node:
        if name == "mean" and shape:  # x.mean(0) of one number is that
            weight = w.divided(weight, [shape[dim] for dim in dims])
        if w.is_one_number(weight):
            return w.editor.method("reshape", (weight, ()), like=w.like)
        weight = weight if bound["keepdim"] else w.spread(weight, node)
        for dim in () if bound["keepdim"] else dims:
            weight = w.editor.method("unsqueeze", (weight, dim), like=w.like)
        return weight

    return back


def _dims(bound: Any, rank: int) -> list[int] | None:
    """The dims that a sum or a mean is over, from the first on; None where they change."""
    dims = bound["dim"]
    dims = range(rank) if dims is None else dims if isinstance(dims, (tuple, list)) else (dims,)
    if not all(isinstance(d, int) for d in dims):
        return None
    return sorted(negative_dim(d, rank) + rank for d in dims) or list(range(rank))


def _product(view: View, node: fx.Node, below: fx.Node, others: list[fx.Node], name: str) -> _Back | None:
    try:
        left, right = binary(view, node)
    except NotThis:
        return None
    other = right if left is below else left
    if (name == "div" and left is not below) or other is below or not same_shape(example(node), example(below)):
        return None
    if not _is_constant(other, below, others):
        return None
    function = torch.mul if name == "mul" else torch.div
    return lambda w, weight: w.call(function, weight, w.wide(other))


def _choice(view: View, node: fx.Node, below: fx.Node, bound: Any, others: list[fx.Node]) -> _Back | None:
    """Return where a mask puts 0 in the place of losses."""
    if "mask" in bound:
        condition, zero, hides = bound["mask"], bound["value"], True
    else:
        condition, hides = bound["condition"], bound["other"] is below
        zero = bound["input"] if hides else bound["other"]
        if not hides and bound["input"] is not below:
            return None
    zero = view.folded(zero)
    if not isinstance(zero, (int, float)) or zero != 0 or not same_shape(example(node), example(below)):
        return None
    if not is_tensor(condition) or not _is_constant(condition, below, others):
        return None
    if hides:
        return lambda w, weight: w.call(torch.where, condition, 0.0, weight)
    return lambda w, weight: w.call(torch.where, condition, weight, 0.0)


def _is_constant(other: Any, below: fx.Node, others: list[fx.Node]) -> bool:
    """Return True if no gradient goes to what the losses ``below`` are multiplied with; a tensor is noted among the
    others."""
    if not isinstance(other, fx.Node):
        return isinstance(other, (int, float))
    if not is_tensor(other):
        return isinstance(example(other), (int, float, torch.SymInt, torch.SymFloat))
    known = example(other)
    if known.requires_grad or known.is_complex() or known.dtype == torch.float64 or known.device != example(below).device:
        return False
    if why_not_plain(known) is not None:
        return False
    others.append(other)
    return True
