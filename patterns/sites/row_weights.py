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

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.terms import example, is_tensor, negative_dim, same_shape, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary, source_of
from fx_fusion.rewrite.editor import Editor, Mismatch

_VIEWS = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous")
_Back = Callable[["_Weights", fx.Node], fx.Node]


@dataclass
class WeightedSum:
    """``root`` is the number, made from the losses by ``nodes`` that also read the tensors ``others``."""

    root: fx.Node
    nodes: list[fx.Node]
    others: list[fx.Node]
    back: list[_Back]  # for each step from the losses up: the weights of what it reads, given those of its result


def weighted_sum(view: View, rows: fx.Node) -> WeightedSum | None:
    """The number that nothing but linear steps make of the losses ``rows``, one or more; None where there is none."""
    nodes: list[fx.Node] = []
    others: list[fx.Node] = []
    back: list[_Back] = []
    node, found = rows, None if example(rows).dim() else WeightedSum(rows, [], [], [])
    while len(node.users) == 1:
        (user,) = node.users
        step = _step(view, user, node, others) if is_tensor(user) else None
        if step is None or example(user).dtype == torch.float64:
            break
        nodes.append(user)
        back.append(step)
        node = user
        if example(node).dim() == 0:
            found = WeightedSum(node, nodes[:], others[:], back[:])
    return found


def weight_below(editor: Editor, total: WeightedSum, like: fx.Node, first: fx.Node | None = None) -> fx.Node:
    """The weight, float32, in a shape that is broadcast, of what a number is made of. ``first``: that of the number itself;
    by default 1."""
    weights, weight = _Weights(editor, like), first
    if weight is None:
        weight = editor.call(torch.ones, ((),), {"dtype": torch.float32, "device": example(total.root).device}, like=like)
    for step in reversed(total.back):
        weight = step(weights, weight)
    return weight


def weights_of_rows(
    editor: Editor, total: WeightedSum, rows: fx.Node, alike: fx.Node, like: fx.Node, *, of_classes: bool = False,
    divisors: Sequence[Any] = (), first: fx.Node | None = None,
) -> fx.Node:  # fmt: skip
    """The weight (m), float32, of each row in the number; ``alike``: a node (m).

    ``rows`` are losses, with ``of_classes`` numbers of a row and a class, all classes of one weight, or one loss that is a
    sum over the rows, divided by the ``divisors``. ``first``: the weight of the number itself. Raises Mismatch where classes
    have weights of their own."""
    weights, weight = _Weights(editor, like), weight_below(editor, total, like, first)
    for size in divisors:
        weight = weights.call(torch.div, weight, size)
    if weights.is_one_number(weight):
        alone = editor.method("reshape", (weight, ()), like=like)
        return editor.method("contiguous", (editor.method("expand_as", (alone, alike), like=like),), like=like)
    shape = tuple(example(rows).shape)
    if of_classes:
        if not statically_known_true(example(weight).shape[-1] == 1):
            raise Mismatch("the classes of a row have weights of their own; one number a row is fused")
        weight, shape = editor.method("squeeze", (weight, -1), like=like), shape[:-1]
    return editor.method("reshape", (weights.spread_to(weight, shape), -1), like=like)


@dataclass
class _Weights:
    """Steps back down. A weight has the shape that it is broadcast from."""

    editor: Editor
    like: fx.Node

    def is_one_number(self, weight: fx.Node) -> bool:
        return all(statically_known_true(n == 1) for n in example(weight).shape)

    def spread(self, weight: fx.Node, node: fx.Node) -> fx.Node:
        """A weight in the shape of a node."""
        return self.spread_to(weight, tuple(example(node).shape))

    def spread_to(self, weight: fx.Node, shape: tuple[Any, ...]) -> fx.Node:
        if same_sizes(example(weight).shape, shape):
            return weight
        return self.editor.method("expand", (weight, shape), like=self.like)

    def wide(self, other: Any) -> Any:
        """Floats in 16 bits in float32: one number in float32 times them would be rounded to 16 bits."""
        floats = is_tensor(other) and example(other).is_floating_point()
        return self.editor.cast(other, torch.float32, like=self.like) if floats else other

    def call(self, function: Any, *operands: Any) -> fx.Node:
        return self.editor.call(function, operands, like=self.like)


def _step(view: View, node: fx.Node, below: fx.Node, others: list[fx.Node]) -> _Back | None:
    """How weights go through ``node`` back to ``below``; None where it is not linear, or copies losses."""
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
        return w.editor.method("reshape", (whole, -1 if len(shape) == 1 else shape), like=w.like)

    return back


def _reduction(node: fx.Node, below: fx.Node, bound: Any, name: str) -> _Back | None:
    if bound["dtype"] is not None and not keeps_values(example(below).dtype, bound["dtype"]):
        return None
    shape, dims = example(below).shape, bound["dim"]
    dims = tuple(range(len(shape))) if dims is None else dims if isinstance(dims, (tuple, list)) else (dims,)
    if not all(isinstance(d, int) for d in dims):
        return None
    dims = sorted(negative_dim(d, len(shape)) + len(shape) for d in dims) or list(range(len(shape)))

    def back(w: _Weights, weight: fx.Node) -> fx.Node:
        for dim in dims if name == "mean" else ():
            weight = w.call(torch.div, weight, shape[dim])
        if w.is_one_number(weight):
            return w.editor.method("reshape", (weight, ()), like=w.like)
        weight = weight if bound["keepdim"] else w.spread(weight, node)
        for dim in () if bound["keepdim"] else dims:
            weight = w.editor.method("unsqueeze", (weight, dim), like=w.like)
        return weight

    return back


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
    """Where a mask puts 0 in the place of losses."""
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
    """Whether no gradient goes to what the losses ``below`` are multiplied with; a tensor is noted among the others."""
    if not isinstance(other, fx.Node):
        return isinstance(other, (int, float))
    if not is_tensor(other):
        return isinstance(example(other), (int, float, torch.SymInt, torch.SymFloat))
    known = example(other)
    if known.requires_grad or known.is_complex() or known.dtype == torch.float64 or known.device != example(below).device:
        return False
    others.append(other)
    return True
