"""The scores of attention written out, from the softmax down to the product of queries and keys, one step at a time."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.indices import index_of
from fx_fusion.graph.terms import example, is_tensor, over_last_dim, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.patterns.sites.products import product_of
from fx_fusion.patterns.sites.scores import Scores, add_bias, add_fill, constant, has_product, with_mask


def read_scores(search: Search, node: Any, scores: Scores) -> None:
    """From the softmax down to the first product, one step at a time."""
    view, top = search.view, node
    while True:
        if not isinstance(node, fx.Node) or not is_tensor(node):
            raise NotThis(node, "not a softmax of scores")
        if not example(node).is_floating_point():
            raise NotThis(node, f"{node.name} is {example(node).dtype}")
        scores.nodes.add(node)
        product = product_of(view, node)
        if product is not None:
            if product.out_order is not None:
                raise NotThis(node, f"{node.name} has queries and keys in other than its last two dims")
            if product.alpha <= 0:
                raise NotThis(node, f"{node.name} scales the scores by {product.alpha}")
            if not same_shape(example(top), example(node)):
                raise NotThis(top, f"a mask or bias makes scores of shape {tuple(example(top).shape)} of {node.name}")
            if any(is_tensor(factor) and example(factor).dim() > example(node).dim() for _, factor in scores.factors):
                raise NotThis(node, f"{node.name} has fewer dims than what scales it")
            scores.levels.append(node)
            scores.q, scores.keys, scores.product = product.left, product.right, product
            if product.added is not None:
                add_bias(search, node, product.added, scores)
            scores.scale *= product.alpha
            if scores.softcap is not None:
                scores.scale *= scores.softcap
            return
        below, name = view.transparent(node), view.name(node)
        if (grouped := regrouped(view, node)) is not None:
            if not same_shape(example(top), example(node)):
                raise NotThis(top, f"a mask or bias makes scores of shape {tuple(example(top).shape)} of {node.name}")
            if scores.factors:
                raise NotThis(node, f"{node.name} is between the product and what scales it")
            scores.levels.append(node)
            node = top = grouped
        elif below is not None:
            if not keeps_values(example(below).dtype, example(node).dtype):
                raise NotThis(node, f"{node.name} rounds the scores to {example(node).dtype}")
            node = below
        elif name in ("mul", "div"):
            node = _scaled(view, node, name, scores)
        elif name == "sub":
            node = _without_maximum(view, node, scores)
        elif name == "tanh":
            node = _capped(view, node, scores)
        elif name == "cat":
            node = top = _with_sink(view, node, scores)
        elif name == "add":
            node = with_mask(search, node, scores)
        elif name in ("maximum", "max", "clamp") and (clamped := _above_the_lowest(view, node)) is not None:
            scores.maximized |= name != "clamp"
            node = clamped
        elif name == "masked_fill":
            bound = view.arguments(node)
            if bound is None:
                raise NotThis(node, f"{node.name} is called in an unusual way")
            add_fill(search, node, bound["mask"], True, bound["value"], scores)
            node = bound["input"]
        elif name == "where" and (chosen := view.arguments(node)) is not None:
            add_fill(search, node, chosen["condition"], False, chosen["other"], scores)
            node = chosen["input"]
        else:
            raise NotThis(node, f"{name or node.name} is between the product and the softmax")


def regrouped(view: View, node: fx.Node) -> fx.Node | None:
    """Return what a view groups anew in batch and heads, (b * h, s, t) as (b, h, s, t), and leaves in its last two dims."""
    bound = view.arguments_of(node, "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
    below = None if bound is None else bound["input"]
    if not is_tensor(below) or not is_tensor(node):
        return None
    before, after = example(below).shape, example(node).shape
    if min(len(before), len(after)) < 3 or same_shape(example(below), example(node)):
        return None
    return below if all(statically_known_true(a == b) for a, b in zip(before[-2:], after[-2:], strict=True)) else None


def _capped(view: View, node: fx.Node, scores: Scores) -> Any:
    """Return what is below the tanh of softcap · tanh(scores / softcap)."""
    if scores.softcap is not None or scores.factors or scores.biases:
        raise NotThis(node, f"{node.name} caps the scores, and what is done to them after that is more than a mask")
    scores.softcap, scores.scale = scores.scale, 1.0
    return (view.arguments(node) or {}).get("input")


def _with_sink(view: View, node: fx.Node, scores: Scores) -> Any:
    """The scores that one more is written behind, in each row."""
    bound = view.arguments(node) or {"tensors": (), "dim": -1}
    last = bound["dim"] in (-1, example(node).dim() - 1)
    inside, sink = bound["tensors"] if last and len(bound["tensors"]) == 2 else (None, None)
    if not is_tensor(inside) or not is_tensor(sink) or not statically_known_true(example(sink).shape[-1] == 1):
        raise NotThis(node, f"{node.name} is between the product and the softmax")
    untouched = scores.sink is None and scores.softcap is None and scores.scale == 1
    if not untouched or scores.factors or scores.proofs or scores.biases:
        raise NotThis(node, f"the sink of {node.name} is scaled, capped or masked with the scores")
    if view.effects.written_after(view.order[sink], [sink]) is not None:
        raise NotThis(node, "the sink is written to")
    scores.sink = sink
    return inside


def without_sink(view: View, node: fx.Node, probabilities: fx.Node) -> bool:
    """Return True if ``node`` is the probabilities without the last column."""
    bound = view.arguments_of(node, "getitem")
    if bound is None or bound["input"] is not probabilities:
        return False
    index = index_of(bound["index"], example(probabilities).dim())
    width = example(probabilities).shape[-1]
    if index is None or not index.only_slices or index.new_axes or len(index.cuts) != 1:
        return False
    (dim, cut), = index.cuts
    stops_before_it = isinstance(cut.stop, int) and (cut.stop == -1 or statically_known_true(cut.stop == width - 1))
    return dim == index.rank - 1 and cut.start in (None, 0) and cut.step in (None, 1) and stops_before_it


def _above_the_lowest(view: View, node: fx.Node) -> fx.Node | None:
    """Return what is below ``torch.max(scores, lowest number)``: the scores, which are nowhere lower but where they are
    -inf."""
    bound = view.arguments(node)
    if bound is None or bound.get("max") is not None:
        return None
    other = next((bound[name] for name in ("other", "dim", "min") if name in bound), None)  # torch.max(a, b) binds b as dim
    numbers = [constant(view, operand) for operand in (bound["input"], other)]
    lowest = torch.finfo(example(node).dtype).min
    scores = [number for number in numbers if is_tensor(number)]
    return scores[0] if len(scores) == 1 and any(isinstance(n, float) and n == lowest for n in numbers) else None


def _scaled(view: View, node: fx.Node, name: str, scores: Scores) -> fx.Node:
    a, b = (constant(view, operand) for operand in binary(view, node))
    if is_tensor(a) and is_tensor(b):
        return _scaled_by_a_tensor(view, node, name, scores)
    tensor, number = (a, b) if is_tensor(a) else (b, a)
    if isinstance(number, fx.Node) and isinstance(example(number), torch.SymFloat) and not (name == "div" and number is a):
        return _scaled_queries(node, name, tensor, number, scores)
    if not isinstance(number, (int, float)) or not is_tensor(tensor) or (name == "div" and number is a) or not number > 0:
        raise NotThis(node, f"{node.name} scales the scores by something that is not a positive constant")
    scores.scale *= number if name == "mul" else 1 / number
    scores.rescaled |= number != 1
    return tensor


def _scaled_by_a_tensor(view: View, node: fx.Node, name: str, scores: Scores) -> fx.Node:
    """Read a product by one number for all keys, which may be learned: the queries are multiplied by it instead."""
    inside, factor = binary(view, node)
    if name == "mul" and has_product(view, factor) and not has_product(view, inside):
        inside, factor = factor, inside
    shape = example(factor).shape
    for_all_keys = not shape or (statically_known_true(shape[-1] == 1) and example(factor).dtype == example(inside).dtype)
    if has_product(view, factor) or not for_all_keys or not example(factor).dtype.is_floating_point:
        raise NotThis(node, f"{node.name} scales the scores by what is not one number for all keys, in their dtype")
    if view.effects.written_after(view.order[factor], [factor]) is not None:
        raise NotThis(node, f"{node.name} scales the scores by {factor.name}, which is written to")
    return _scaled_queries(node, name, inside, factor, scores)


def _scaled_queries(node: fx.Node, name: str, inside: fx.Node, factor: fx.Node, scores: Scores) -> fx.Node:
    """The queries are to be scaled, not the scores: by a tensor, or a number that may be another one in the next call."""
    if example(inside).dtype == torch.float16:
        raise NotThis(node, f"{node.name} scales float16 scores by {factor.name}: queries times it may overflow")
    scores.factors.append((name, factor))
    return inside


def _without_maximum(view: View, node: fx.Node, scores: Scores) -> fx.Node:
    """Return what is below ``scores - max(scores)``, which a softmax is the same without."""
    term = view.term(node)
    inside, largest = term.operands if term.op == "sub" and len(term.operands) == 2 else (None, None)
    found = _maximum(view, largest) if is_tensor(inside) else None
    if found is None or found[0] is not inside:
        raise NotThis(node, f"{node.name} is between the product and the softmax")
    if scores.sink is not None or scores.softcap is not None:  # which are not shifted with the scores
        raise NotThis(node, f"{node.name} shifts the scores below their {'sink' if scores.sink else 'softcap'}")
    scores.nodes.update(found[1])
    scores.shifted = True
    return inside  # type: ignore[return-value]


def is_shifted(view: View, node: Any) -> bool:
    """Return True if a node is ``x - max(x)``, the maximum being over the last dim."""
    term = view.term(node)
    found = _maximum(view, term.operands[1]) if term.op == "sub" and len(term.operands) == 2 else None
    return found is not None and found[0] is term.operands[0]


def _maximum(view: View, node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return what a node is the maximum of, over keys, and the nodes that make it."""
    nodes = [node]
    if isinstance(node, fx.Node) and view.name(node) == "detach":
        node = node.args[0]
        nodes.append(node)
    if isinstance(node, fx.Node) and (node.target, node.args[1:]) in ((operator.getitem, (0,)), (getattr, ("values",))):
        node = node.args[0]  # torch.max gives where it is, too
    bound = view.arguments_of(node, "amax", "max")
    if bound is None or not is_tensor(bound["input"]) or not bound["keepdim"]:
        return None
    over_keys = over_last_dim(bound["dim"], bound["input"])
    unread = [user for user in node.users if not user.users]  # where it is, in a checkpointed body
    source, nodes = bound["input"], list(dict.fromkeys([*unread, *nodes, node]))
    if view.name(source) == "detach":
        nodes.append(source)
        source = source.args[0]
    return (source, nodes) if over_keys else None
