"""The scores of attention written out: what is read of them, and the masks and biases that are added to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fx_fusion.fusion.search import Search
from fx_fusion.graph.masks.prover import MaskProof, has_a_key_for_each_query
from fx_fusion.graph.masks.structure import ADDED, FILLED, Structure
from fx_fusion.graph.ranges import bounds_of
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.patterns.sites.learned_biases import read_bias
from fx_fusion.patterns.sites.products import NAMES as PRODUCTS
from fx_fusion.patterns.sites.products import Product

_SMALL = 1e4  # of a bias, in magnitude: -1e4 is what BERT hid padding by
_HIDDEN = -1e3  # what the lowest number of a dtype must still be below, behind all scales
_SCALARS = (torch.tensor, torch.scalar_tensor)


@dataclass
class Scores:
    """The ops between the first product and the softmax."""

    q: Any = None
    keys: Any = None  # (.., d, keys) but for ``product.right_order``
    product: Product | None = None
    scale: float = 1.0
    factors: list[tuple[str, fx.Node]] = field(default_factory=list)  # "mul" or "div", and by what: one number for all keys
    proofs: list[MaskProof] = field(default_factory=list)
    proofs_in_biases: list[MaskProof] = field(default_factory=list)  # of masks that are added to learned biases
    biases: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # and the scores with it
    levels: list[fx.Node] = field(default_factory=list)  # one for each way in which batch and heads are grouped
    nodes: set[fx.Node] = field(default_factory=set)
    heads: Any = None  # where they are grouped in several ways: how many there are
    dropout: float = 0.0
    values: Product | None = None  # of probabilities and values
    softcap: float | None = None  # softcap · tanh(q · keys · scale / softcap)
    sink: fx.Node | None = None  # (.., queries, 1): one more score of each row, without a value
    structure: Structure | None = None  # what the mask shows, where it is more than causal
    rescaled: bool = False  # whether ``scale`` is a product of numbers, be it 1
    maximized: bool = False  # with the lowest number: of two that are the same each has half of the gradient
    shifted: bool = False  # by their maximum, which is left out
    lse: fx.Node | None = None  # the logarithm of the sum of their exponentials, where it is read

    @property
    def causal(self) -> bool:
        """Return True if one of the masks hides exactly the keys behind the query."""
        return any(proof.kind == "causal" for proof in self.proofs)

    @property
    def plain(self) -> bool:
        """Return True if scaled_dot_product_attention computes it."""
        return self.softcap is None and self.sink is None and self.structure is None and self.lse is None


def has_product(view: View, node: fx.Node, depth: int = 8) -> bool:
    """Return True if a matrix product is within a few steps: what tells attention from any other softmax."""
    if view.name(node) in PRODUCTS:
        return True
    return depth > 0 and any(is_tensor(n) and has_product(view, n, depth - 1) for n in node.all_input_nodes)


def with_mask(search: Search, node: fx.Node, scores: Scores) -> fx.Node:
    view = search.view
    a, b = binary(view, node)
    if isinstance(b, (int, float)) and b == 0:
        return a
    if not is_tensor(a) or not is_tensor(b):
        raise NotThis(node, f"{node.name} adds {b if is_tensor(a) else a} to the scores")
    for inside, mask in ((a, b), (b, a)):
        if has_product(view, mask) or not has_product(view, inside):
            continue
        add_bias(search, node, mask, scores)
        return inside
    raise NotThis(node, f"{node.name} combines scores in another way than by an additive mask")


def add_bias(search: Search, node: fx.Node, mask: fx.Node, scores: Scores) -> None:
    """Record what ``node`` adds to the scores: a mask that is proved, or a bias that is learned or finite everywhere."""
    if scores.factors:
        raise NotThis(node, f"the mask or bias of {node.name} is scaled with the scores, by {scores.factors[-1][1].name}")
    if scores.softcap is not None:
        raise NotThis(node, f"{node.name} masks scores that are capped after that")
    if not is_tensor(mask) or not example(mask).dtype.is_floating_point:
        raise NotThis(node, f"{node.name} adds {example(mask).dtype if is_tensor(mask) else mask} numbers to the scores")
    proof = search.masks.prove(mask)
    hides = proof.kind == "causal" or proof.structure is not None or proof.or_hides_rows is not None
    if hides and torch.finfo(example(mask).dtype).min * scores.scale > _HIDDEN:
        raise NotThis(node, f"{node.name} hides by a number that is scaled to where a score may come near to it")
    finite = proof.structure is None and _is_small(search.view, mask)
    if proof.kind in ("causal", "none") or not (finite or example(mask).requires_grad):
        _mask(proof, mask, scores, filled=False)
    elif scores.scale != 1 or example(mask).dim() < 2:
        raise NotThis(node, f"the bias {mask.name} is scaled with the scores, or has fewer than two dims")
    else:
        if not finite:  # a row that it hides entirely is not the same beside another mask, nor in each fused kernel
            read_bias(search, mask, scores.proofs_in_biases)
        scores.biases.append((mask, node))
        scores.levels.append(node)


def _is_small(view: View, bias: fx.Node) -> bool:
    """Return True if a bias hides nothing: it is finite, far above what hides a score, and small enough for the logarithm of
    a sum of exponentials that is next to it in float32: the backward takes the probabilities from it."""
    bounds = bounds_of(view, bias)
    most = min(_SMALL, torch.finfo(example(bias).dtype).max / 16)
    return bounds is not None and max(map(abs, bounds)) <= most and not view.effects.returned(bias)


def _mask(proof: MaskProof, mask: fx.Node, scores: Scores, *, filled: bool) -> None:
    """Note what a mask shows; ``filled``: a finite number is filled in. In a row that is hidden entirely all probabilities
    are equal where all scores are one finite number (and NaN where they are -inf); beside a sink they are all 0."""
    structure, or_hides = proof.structure, proof.or_hides_rows
    if or_hides is not None and (scores.sink is not None or or_hides.hidden_rows):
        structure = or_hides
    if structure is not None:
        sees_itself = structure.shows_every_query_itself and has_a_key_for_each_query(mask)
        if scores.sink is not None or sees_itself:
            structure = replace(structure, hidden_rows="")
        elif filled and not structure.labels:
            structure = replace(structure, hidden_rows=FILLED)
        if structure.hidden_rows and scores.rescaled:
            raise NotThis(mask, f"{mask.name} may hide a row entirely, by a number that is scaled")
        if structure.hidden_rows == ADDED and scores.maximized:
            raise NotThis(mask, f"{mask.name} may hide a row entirely, by the number that scores are the maximum with")
        if not (sees_itself or structure.hidden_rows or scores.sink is not None):
            raise NotThis(
                proof.node or mask,
                f"the mask is {proof.reason}, and may hide a row entirely: that is read in calls of "
                "scaled_dot_product_attention (attn_implementation='sdpa')",
            )
        scores.structure = structure if scores.structure is None else scores.structure & structure
    elif proof.kind not in ("causal", "none"):
        raise NotThis(proof.node or mask, f"the mask is not proved: {proof.reason}")
    scores.proofs.append(proof)
    if scores.structure is not None and scores.structure.hidden_rows and sum(p.kind != "none" for p in scores.proofs) > 1:
        raise NotThis(mask, f"{mask.name} and another mask hide scores, and may hide a row entirely, by several numbers")


def add_fill(search: Search, node: fx.Node, mask: Any, hides: bool, fill: Any, scores: Scores) -> None:
    view = search.view
    fill = view.folded(fill)
    if isinstance(fill, fx.Node) and view.effects.written_after(view.order[fill], [fill]) is not None:
        raise NotThis(node, f"{node.name} fills with a value that is written to")
    if scores.factors:
        raise NotThis(node, f"the mask of {node.name} is scaled with the scores, by {scores.factors[-1][1].name}")
    fill = constant(view, fill)  # as its dtype holds it: the lowest float32 is -inf in a tensor of 16 bits
    if not is_tensor(mask) or example(mask).dtype != torch.bool or not isinstance(fill, (int, float)):
        raise NotThis(node, f"{node.name} fills with a value that is not a constant, or by a mask that is not boolean")
    lowest = torch.finfo(example(node).dtype).min
    if not (fill * scores.scale <= max(lowest / 2, -1e30)):
        raise NotThis(node, f"{node.name} hides with {fill}, which a score may come near to")
    if scores.softcap is not None:
        raise NotThis(node, f"{node.name} masks scores that are capped after that")
    _mask(search.masks.prove(mask, hides=hides), mask, scores, filled=fill >= lowest)
def constant(view: View, item: Any) -> Any:
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
    number = None if below is None else constant(view, below["input"])
    if not isinstance(number, (int, float)):
        return item
    return getattr(torch, str(view.name(item)))(torch.tensor(number, dtype=example(item).dtype)).item()
