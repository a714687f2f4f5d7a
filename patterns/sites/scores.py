"""The scores of attention written out: from the softmax down to the product of queries and keys."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.masks.prover import MaskProof
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.patterns.sites.products import NAMES as PRODUCTS
from fx_fusion.patterns.sites.products import Product, product_of

_HIDDEN = -1e3  # what the lowest number of a dtype must still be below, behind all scales
_SCALARS = (torch.tensor, torch.scalar_tensor)


@dataclass
class Scores:
    """What lies between the first product and the softmax."""

    q: Any = None
    keys: Any = None  # (.., d, keys) but for ``product.right_order``
    product: Product | None = None
    scale: float = 1.0
    factors: list[tuple[str, fx.Node]] = field(default_factory=list)  # "mul" or "div", and by what: one number for all keys
    proofs: list[MaskProof] = field(default_factory=list)
    biases: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # and the scores with it
    levels: list[fx.Node] = field(default_factory=list)  # one for each way in which batch and heads are grouped
    nodes: set[fx.Node] = field(default_factory=set)
    heads: Any = None  # where they are grouped in several ways: how many there are
    dropout: float = 0.0
    values: Product | None = None  # of probabilities and values


def read_scores(search: Search, node: Any, scores: Scores) -> None:
    """From the softmax down to the first product, one step at a time."""
    view, top = search.view, node
    while True:
        if not isinstance(node, fx.Node) or not is_tensor(node):
            raise NotThis(node, "not a softmax of scores")
        scores.nodes.add(node)
        product = product_of(view, node)
        if product is not None:
            if product.out_order is not None:
                raise NotThis(node, f"{node.name} has queries and keys in other than its last two dims")
            if product.alpha <= 0:
                raise NotThis(node, f"{node.name} scales the scores by {product.alpha}")
            if not same_shape(example(top), example(node)):
                raise NotThis(top, f"a mask or bias makes scores of shape {tuple(example(top).shape)} of {node.name}")
            if any(example(factor).dim() > example(node).dim() for _, factor in scores.factors):
                raise NotThis(node, f"{node.name} has fewer dims than what scales it")
            scores.levels.append(node)
            scores.q, scores.keys, scores.product = product.left, product.right, product
            if product.added is not None:
                _add_bias(search, node, product.added, scores)
            scores.scale *= product.alpha
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
        elif name == "add":
            node = _with_mask(search, node, scores)
        elif name in ("maximum", "max", "clamp") and (clamped := _above_the_lowest(view, node)) is not None:
            node = clamped
        elif name == "masked_fill":
            bound = view.arguments(node)
            if bound is None:
                raise NotThis(node, f"{node.name} is called in an unusual way")
            _fill(search, node, bound["mask"], True, bound["value"], scores)
            node = bound["input"]
        elif name == "where" and (chosen := view.arguments(node)) is not None:
            _fill(search, node, chosen["condition"], False, chosen["other"], scores)
            node = chosen["input"]
        else:
            raise NotThis(node, f"{name or node.name} is between the product and the softmax")


def has_product(view: View, node: fx.Node, depth: int = 8) -> bool:
    """Whether a matrix product is within a few steps: what tells attention from any other softmax."""
    if view.name(node) in PRODUCTS:
        return True
    return depth > 0 and any(is_tensor(n) and has_product(view, n, depth - 1) for n in node.all_input_nodes)


def regrouped(view: View, node: fx.Node) -> fx.Node | None:
    """What a view groups anew in batch and heads, (b * h, s, t) as (b, h, s, t), and leaves in its last two dims."""
    bound = view.arguments_of(node, "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
    below = None if bound is None else bound["input"]
    if not is_tensor(below) or not is_tensor(node):
        return None
    before, after = example(below).shape, example(node).shape
    if min(len(before), len(after)) < 3 or same_shape(example(below), example(node)):
        return None
    return below if all(statically_known_true(a == b) for a, b in zip(before[-2:], after[-2:], strict=True)) else None


def _above_the_lowest(view: View, node: fx.Node) -> fx.Node | None:
    """Below ``torch.max(scores, lowest number)``: the scores, which are nowhere lower but where they are -inf."""
    bound = view.arguments(node)
    if bound is None or bound.get("max") is not None:
        return None
    other = next((bound[name] for name in ("other", "dim", "min") if name in bound), None)  # torch.max(a, b) binds b as dim
    numbers = [_number(view, operand) for operand in (bound["input"], other)]
    lowest = torch.finfo(example(node).dtype).min
    scores = [number for number in numbers if is_tensor(number)]
    return scores[0] if len(scores) == 1 and any(isinstance(n, float) and n == lowest for n in numbers) else None


def _scaled(view: View, node: fx.Node, name: str, scores: Scores) -> fx.Node:
    a, b = (_number(view, operand) for operand in binary(view, node))
    if is_tensor(a) and is_tensor(b):
        return _scaled_by_a_tensor(view, node, name, scores)
    tensor, number = (a, b) if is_tensor(a) else (b, a)
    if not isinstance(number, (int, float)) or not is_tensor(tensor) or (name == "div" and number is a) or not number > 0:
        raise NotThis(node, f"{node.name} scales the scores by something that is not a positive constant")
    scores.scale *= number if name == "mul" else 1 / number
    return tensor


def _scaled_by_a_tensor(view: View, node: fx.Node, name: str, scores: Scores) -> fx.Node:
    """By one number for all keys, which may be learned: the queries are multiplied by it instead."""
    inside, factor = binary(view, node)
    if name == "mul" and has_product(view, factor) and not has_product(view, inside):
        inside, factor = factor, inside
    shape = example(factor).shape
    for_all_keys = not shape or (statically_known_true(shape[-1] == 1) and example(factor).dtype == example(inside).dtype)
    if has_product(view, factor) or not for_all_keys or not example(factor).dtype.is_floating_point:
        raise NotThis(node, f"{node.name} scales the scores by what is not one number for all keys, in their dtype")
    if example(inside).dtype == torch.float16:
        raise NotThis(node, f"{node.name} scales float16 scores by a tensor: queries that are scaled by it may overflow")
    if view.effects.written_after(view.order[factor], [factor]) is not None:
        raise NotThis(node, f"{node.name} scales the scores by {factor.name}, which is written to")
    scores.factors.append((name, factor))
    return inside


def _with_mask(search: Search, node: fx.Node, scores: Scores) -> fx.Node:
    view = search.view
    a, b = binary(view, node)
    if isinstance(b, (int, float)) and b == 0:
        return a
    if not is_tensor(a) or not is_tensor(b):
        raise NotThis(node, f"{node.name} adds {b if is_tensor(a) else a} to the scores")
    for inside, mask in ((a, b), (b, a)):
        if has_product(view, mask) or not has_product(view, inside):
            continue
        _add_bias(search, node, mask, scores)
        return inside
    raise NotThis(node, f"{node.name} combines scores in another way than by an additive mask")


def _add_bias(search: Search, node: fx.Node, mask: fx.Node, scores: Scores) -> None:
    """What ``node`` adds to the scores: a mask that is proved, or a learned bias."""
    if scores.factors:
        raise NotThis(node, f"the mask or bias of {node.name} is scaled with the scores, by {scores.factors[-1][1].name}")
    if not is_tensor(mask) or not example(mask).dtype.is_floating_point:
        raise NotThis(node, f"{node.name} adds {example(mask).dtype if is_tensor(mask) else mask} numbers to the scores")
    proof = search.masks.prove(mask)
    if proof.kind == "causal" and torch.finfo(example(mask).dtype).min * scores.scale > _HIDDEN:
        raise NotThis(node, f"{node.name} hides by a number that is scaled to where a score may come near to it")
    if proof.kind in ("causal", "none"):
        scores.proofs.append(proof)
    elif not example(mask).requires_grad:
        # A row that is hidden entirely is uniform in eager (or NaN); a fused kernel makes something else of it.
        raise NotThis(proof.node or mask, _not_read(proof))
    elif scores.scale != 1 or example(mask).dim() < 2:
        raise NotThis(node, f"the bias {mask.name} is scaled with the scores, or has fewer than two dims")
    else:
        scores.biases.append((mask, node))
        scores.levels.append(node)


def _not_read(proof: MaskProof) -> str:
    if proof.structure is None:
        return f"the mask is not proved: {proof.reason}"
    return f"the mask is {proof.reason}: that is read in calls of scaled_dot_product_attention (attn_implementation='sdpa')"


def _without_maximum(view: View, node: fx.Node, scores: Scores) -> fx.Node:
    """Below ``scores - max(scores)``, which a softmax is the same without."""
    term = view.term(node)
    inside, largest = term.operands if term.op == "sub" and len(term.operands) == 2 else (None, None)
    found = _maximum(view, largest) if is_tensor(inside) else None
    if found is None or found[0] is not inside:
        raise NotThis(node, f"{node.name} is between the product and the softmax")
    scores.nodes.update(found[1])
    return inside  # type: ignore[return-value]


def _maximum(view: View, node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """What a node is the maximum of, over keys, and the nodes that make it."""
    nodes = [node]
    if isinstance(node, fx.Node) and view.name(node) == "detach":
        node = node.args[0]
        nodes.append(node)
    if isinstance(node, fx.Node) and (node.target, node.args[1:]) in ((operator.getitem, (0,)), (getattr, ("values",))):
        node = node.args[0]  # torch.max gives where it is, too
    bound = view.arguments_of(node, "amax", "max")
    if bound is None or not is_tensor(bound["input"]) or not bound["keepdim"]:
        return None
    dims = bound["dim"] if isinstance(bound["dim"], (tuple, list)) else (bound["dim"],)
    over_keys = tuple(dims) in ((-1,), (example(bound["input"]).dim() - 1,))
    source, nodes = bound["input"], list(dict.fromkeys([*nodes, node]))
    if view.name(source) == "detach":
        nodes.append(source)
        source = source.args[0]
    return (source, nodes) if over_keys else None


def _number(view: View, item: Any) -> Any:
    """A number that the graph makes a tensor of, ``torch.tensor(64.0).sqrt()``, as it is; anything else unchanged."""
    if not is_tensor(item) or example(item).dim() != 0 or not example(item).dtype.is_floating_point:
        return item
    if view.effects.written_after(view.order[item], [item]) is not None:
        return item
    if item.target in _SCALARS and item.args and isinstance(item.args[0], (int, float)):
        return torch.tensor(item.args[0], dtype=example(item).dtype).item()
    if (full := view.arguments_of(item, "full")) is not None and isinstance(view.folded(full["fill_value"]), (int, float)):
        return torch.tensor(view.folded(full["fill_value"]), dtype=example(item).dtype).item()
    below = view.arguments_of(item, "sqrt", "rsqrt")
    number = None if below is None else _number(view, below["input"])
    if not isinstance(number, (int, float)):
        return item
    return getattr(torch, str(view.name(item)))(torch.tensor(number, dtype=example(item).dtype)).item()


def _fill(search: Search, node: fx.Node, mask: Any, hides: bool, fill: Any, scores: Scores) -> None:
    view = search.view
    fill = view.folded(fill)
    if isinstance(fill, fx.Node) and view.effects.written_after(view.order[fill], [fill]) is not None:
        raise NotThis(node, f"{node.name} fills with a value that is written to")
    if scores.factors:
        raise NotThis(node, f"the mask of {node.name} is scaled with the scores, by {scores.factors[-1][1].name}")
    if isinstance(fill, fx.Node) and fill.target in _SCALARS:
        fill = fill.args[0] if fill.args else None
    elif (full := view.arguments_of(fill, "full")) is not None:
        fill = full["fill_value"]
    if not is_tensor(mask) or example(mask).dtype != torch.bool or not isinstance(fill, (int, float)):
        raise NotThis(node, f"{node.name} fills with a value that is not a constant, or by a mask that is not boolean")
    lowest = torch.finfo(example(node).dtype).min
    if not (fill * scores.scale <= max(lowest / 2, -1e30)):
        raise NotThis(node, f"{node.name} hides with {fill}, which a score may come near to")
    proof = search.masks.prove(mask, hides=hides)
    if proof.kind not in ("causal", "none"):
        raise NotThis(proof.node or mask, _not_read(proof))
    scores.proofs.append(proof)
