"""Attention written out, read from its softmax: down to the first product, up to the second.

The steps between are too many, and too freely ordered, for one function an order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.terms import example, is_tensor, over_last_dim, same_shape, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis
from fx_fusion.patterns.sites.products import product_of
from fx_fusion.patterns.sites.read_scores import is_shifted, read_scores, regrouped, without_sink
from fx_fusion.patterns.sites.scores import Scores, has_product
from fx_fusion.rewrite.editor import Editor, Mismatch


def written_out(search: Search) -> Iterator[Match | NearMiss]:
    """Each softmax of scores: a match of ``attention``, its reading a ``Scores``, or why it is none."""
    view = search.view
    for node in view.graph.nodes:
        bound, nodes = _softmax(view, node)
        if bound is None or not is_tensor(node) or not is_tensor(bound["input"]) or not has_product(view, bound["input"]):
            continue
        scores = Scores(nodes=nodes)
        try:
            read_scores(search, bound["input"], scores)
            yield _read(view, node, bound, scores)
        except NotThis as why:
            yield NearMiss("attention", node, why.node if isinstance(why.node, fx.Node) else node, str(why))


def _softmax(view: View, node: fx.Node) -> tuple[Mapping[str, Any] | None, set[fx.Node]]:
    """The arguments of a softmax and the nodes that compute it, written out too: ``e / e.sum(-1, keepdim=True)`` with
    ``e = exp(x - max(x))``. Without the maximum it overflows where a softmax does not, and is none."""
    bound = view.arguments_of(node, "softmax")
    if bound is not None or not is_tensor(node):
        return bound, {node}
    found = normalized_exponentials(view, node)
    return ({"input": found[0], "dim": -1}, found[1]) if found and is_shifted(view, found[0]) else (None, set())


def normalized_exponentials(view: View, node: fx.Node) -> tuple[Any, set[fx.Node]] | None:
    """x of ``exp(x) / exp(x).sum(-1, keepdim=True)``, and the nodes that compute it of x; None for another node."""
    term = view.term(node)
    if term.op != "div" or not all(map(is_tensor, term.operands)):
        return None
    power, total = inner_term(view, term.operands[0], "exp"), inner_term(view, term.operands[1], "sum")
    if power is None or total is None or total.attrs != ((-1,), True) or not is_tensor(power.operands[0]):
        return None
    inside = view.edge(power.operands[0])
    if not view.same_source(total.operands[0], term.operands[0]) or inside.roundings:
        return None
    return inside.base, {node, *power.nodes, *total.nodes, *view.edge(total.operands[0]).crossed, *inside.crossed}


def _read(view: View, softmax: fx.Node, bound: Mapping[str, Any], scores: Scores) -> Match:
    if bound["dim"] not in (-1, example(softmax).dim() - 1):
        raise NotThis(softmax, f"the softmax is over dim {bound['dim']}, not over keys")
    if not keeps_values(example(bound["input"]).dtype, example(softmax).dtype):
        raise NotThis(softmax, f"the softmax rounds the scores to {example(softmax).dtype}")
    probabilities, dropout, nodes, rounded = softmax, 0.0, scores.nodes, set()
    sink = scores.sink is not None
    seen = [example(softmax).dtype]
    while True:
        user = next(iter(probabilities.users), None)
        if len(probabilities.users) != 1 or user is None:
            raise NotThis(probabilities, f"{probabilities.name} is used {len(probabilities.users)} times")
        if view.name(user) == "dropout" and view.transparent(user) is None:
            args = view.arguments(user)
            if args is None or dropout or args["inplace"] or not isinstance(args["p"], float):
                raise NotThis(user, "an unusual dropout")
            dropout = args["p"]
        elif sink and without_sink(view, user, probabilities):
            sink = False
        elif not sink and regrouped(view, user) is probabilities:
            nodes.add(user)
            scores.levels.append(user)
            probabilities = user
            continue
        elif view.transparent(user) is not probabilities:
            break
        nodes.add(user)
        rounded.add(user)
        seen.append(example(user).dtype)
        probabilities = user
    values = product_of(view, user)
    if sink:
        raise NotThis(user, f"{user.name} reads the probability of the sink, too")
    if values is None or values.left is not probabilities or values.left_order is not None or values.added is not None:
        raise NotThis(user, f"expected a product of {probabilities.name} and values, found {view.name(user) or user.name}")
    v = values.right
    if values.alpha != 1:
        raise NotThis(user, f"{user.name} scales its result by {values.alpha}")
    if any(dtype not in (seen[0], example(v).dtype) for dtype in seen):
        raise NotThis(probabilities, f"the probabilities are rounded on the way to {probabilities.name}")
    if (write := view.effects.written_after(view.order[user], [user])) is not None:
        raise NotThis(write, f"{write.name} changes the result in place; fused attention keeps it for its backward")
    q, keys, first = scores.q, scores.keys, scores.product
    assert first is not None
    scores.levels.append(probabilities)
    scores.heads = _common_heads(scores)
    orders = first.left_order, first.right_order, values.right_order
    of_q, of_keys, of_v = (
        [example(t).shape[d] for d in (order or range(example(t).dim()))[:-2]]
        for t, order in zip((q, keys, v), orders, strict=True)
    )
    of_scores = example(probabilities).shape[:-2]
    if not _broadcasts(of_keys, of_q) or not _broadcasts(of_v, of_scores):
        raise NotThis(user, "batch and heads of queries, keys and values differ")
    scores.dropout, scores.values = dropout, values
    # Of scores less their maximum it is another number.
    scores.lse = None if scores.sink is not None or scores.shifted else _lse_of(view, bound["input"], user)
    # Inputs lie as the kernel takes them; what is grouped anew, in another order, or one head for all, does not.
    one_level = scores.heads is None
    as_they_are = [
        one_level and order is None and same_sizes(own, whole)
        for order, own, whole in zip(orders, (of_q, of_keys, of_v), (of_q, of_q, of_scores), strict=True)
    ]
    inputs: dict[str, fx.Node] = {}
    crossed: set[fx.Node] = set()
    others = {f"bias_{i}": bias for i, (bias, _) in enumerate(scores.biases)}
    others.update({f"factor_{i}": factor for i, (_, factor) in enumerate(scores.factors)})
    for name, node, as_it_is in (("q", q, as_they_are[0]), ("v", v, as_they_are[2])):
        (inputs if as_it_is else others)[name if as_it_is else f"{name}_otherwise"] = node
    turned = view.term(keys).op == "transpose" and view.term(keys).attrs == (-2, -1) and not view.hides_gradient(keys)
    if as_they_are[1] and turned:
        inputs["k"] = view.term(keys).operands[0]
    else:
        others["keys"] = keys
    if {"q", "k"} <= inputs.keys() and not scores.factors:  # queries times a factor would be rounded to 16 bits
        casts: set[fx.Node] = set()
        below = [_before_it_was_widened(view, inputs[name], example(v).dtype, casts) for name in ("q", "k")]
        if None not in below and casts:  # products of 16 bits are added in float32 anyway
            q = keys = scores.q = inputs["q"] = below[0]
            inputs["k"], crossed = below[1], casts | {scores.keys}
    dtypes = [example(t).dtype for t in (q, keys, v)]
    if len(inputs) < 3 and len(set(dtypes)) > 1:  # the guard sees those that lie as a kernel takes them
        raise NotThis(keys, f"q, k and v are {', '.join(map(str, dtypes))}; attention takes one dtype")
    everything = frozenset((*nodes, user))
    return Match(
        "attention", (user,), everything, inputs, others=others, rounded=frozenset(rounded), reading=scores,
        unmade={"scores": softmax}, crossed=frozenset(crossed),
    )  # fmt: skip


def _lse_of(view: View, scores: fx.Node, root: fx.Node) -> fx.Node | None:
    """Their ``logsumexp``, by which some scale the result as a sink does (Granite with windows)."""
    for user in scores.users:
        bound = view.arguments_of(user, "logsumexp")
        if bound is None or view.effects.region[user] != view.effects.region[root]:
            continue
        if over_last_dim(bound["dim"], scores):
            return user
    return None


def _before_it_was_widened(view: View, node: Any, dtype: torch.dtype, casts: set[fx.Node]) -> Any:
    """Return what a node is a cast of, in a narrower dtype; None where it is none. ``casts`` gets what is between."""
    while is_tensor(node) and example(node).dtype != dtype:
        below = view.transparent(node)
        if below is None or not keeps_values(example(below).dtype, example(node).dtype):
            return None
        casts.add(node)
        node = below
    return node


def _common_heads(scores: Scores) -> Any:
    """The number of heads where batch and heads are grouped in several ways on the way, or in three dims; None where they
    are the same one or two dims everywhere."""
    leading = [example(level).shape[:-2] for level in scores.levels]
    if all(same_sizes(leading[0], other) for other in leading) and len(leading[0]) < 3:
        return None
    heads = [sizes[-1] for sizes in leading if len(sizes) > 1]
    if not heads:
        return None
    if not isinstance(heads[0], int):
        raise NotThis(scores.levels[0], "the number of heads changes between calls, and they are grouped in several ways")
    if not all(statically_known_true(n == heads[0]) for n in heads):
        raise NotThis(scores.levels[0], f"batch and heads are grouped as {' and '.join(map(str, map(tuple, leading)))}")
    return heads[0]


def _broadcasts(sizes: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Return True if batch and heads are those of the queries, or 1."""
    return len(sizes) == len(wanted) and all(
        statically_known_true(a == b) or statically_known_true(a == 1) for a, b in zip(sizes, wanted, strict=True)
    )


def times(editor: Editor, q: Any, factors: Sequence[tuple[str, fx.Node]], like: fx.Node) -> Any:
    """The queries scaled as their scores are."""
    for name, factor in factors:
        scaled = editor.call(getattr(torch, name), (q, factor), like=like)
        if example(scaled).dtype != example(q).dtype or not same_shape(example(scaled), example(q)):
            raise Mismatch(f"{factor.name} is no number for each query, in the dtype of the queries")
        q = scaled
    return q
