"""Biases of attention that are learned, and the masks that hide some of their scores."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.masks.prover import MaskProof, called
from fx_fusion.graph.masks.structure import CAUSAL, FILLED, Structure
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary

_LEARNED = ("embedding", "linear")  # a table of relative positions, a bias of pairs
_MOVES = ("permute", "transpose", "unsqueeze", "squeeze", "getitem", "view", "reshape", "expand", "contiguous")


def read_bias(search: Search, node: Any, proofs: list[MaskProof]) -> None:
    """Down from a mask to the learned biases and the proved masks that it is made of; both leave something of each row."""
    if not is_tensor(node):
        raise NotThis(node, f"{node} is added to the scores")
    view, proof = search.view, search.masks.prove(node)
    below, name = view.transparent(node), view.name(node)
    if shows_every_row(proof, node):
        proofs.append(proof)
    elif below is not None:
        read_bias(search, below, proofs)
    elif name == "add":
        for operand in binary(view, node):
            read_bias(search, operand, proofs)
    elif name == "where" and (chosen := view.arguments(node)) is not None:
        read_bias(search, chosen["condition"], proofs)
        read_bias(search, chosen["input"], proofs)
    elif name == "masked_fill":
        bound = view.arguments(node)
        hidden = None if bound is None else search.masks.prove(bound["mask"], hides=True)
        if bound is None or hidden is None or not shows_every_row(hidden, bound["mask"]):
            raise NotThis(node, f"{node.name} may hide a row entirely")
        proofs.append(hidden)
        read_bias(search, bound["input"], proofs)
    elif name in _MOVES and node.args and is_tensor(node.args[0]):
        read_bias(search, node.args[0], proofs)
    elif name in ("cat", "stack") and (bound := view.arguments(node)) is not None:
        for operand in bound["tensors"]:
            read_bias(search, operand, proofs)
    elif (calculated := _calculated(view, node)) is not None:
        masks: list[MaskProof] = []
        read_bias(search, calculated, masks)
        if masks:
            raise NotThis(node, f"{node.name} calculates with a mask")
    elif node.op == "placeholder" and view.outside is not None and search.outer is not None:
        if view.outside.operands[node] is None:
            raise NotThis(node, f"{node.name} is another one in each call of the graph that it goes into")
        read_bias(search.outer, view.outside.operands[node], proofs)
    elif not example(node).requires_grad or not (name in _LEARNED or _is_given(node)):
        raise NotThis(node, f"{node.name} may hide a row entirely: neither a learned bias nor a proved mask")


def _calculated(view: View, node: fx.Node) -> fx.Node | None:
    """Return what a node interpolates, or is a number times or divided by."""
    if called(node) == "interpolate" and node.args and is_tensor(node.args[0]):
        return node.args[0]  # type: ignore[return-value]
    if view.name(node) not in ("mul", "div"):
        return None
    tensor, number = binary(view, node)
    if not is_tensor(tensor) and view.name(node) == "mul":
        tensor, number = number, tensor
    usual = isinstance(number, (int, float)) and 1e-3 <= abs(number) <= 1e3
    return tensor if is_tensor(tensor) and usual else None


def _is_given(node: fx.Node) -> bool:
    """Return True if a node is a parameter: what another graph computed may be a mask."""
    return node.op in ("placeholder", "get_attr") and example(node).is_leaf


def shows_every_row(proof: MaskProof, mask: fx.Node) -> bool:
    """Every query sees something: key 0 in a causal mask, itself in a structured one, if there are as many keys."""
    if proof.structure is None:
        return proof.kind in ("causal", "none")
    as_many_keys = statically_known_true(example(mask).shape[-2] <= example(mask).shape[-1])
    return as_many_keys and proof.structure.shows_every_query_itself


def without_masks(
    search: Search, mask: fx.Node, dtype: torch.dtype
) -> tuple[fx.Node, Structure, list[MaskProof], list[fx.Node]]:  # fmt: skip
    """The learned bias in a mask that is added to the scores, in a call that computes in ``dtype``; what shows of it, the
    proofs of that, and the nodes that make the mask of the bias. Raises NotThis where nothing is learned, or a row may be
    hidden entirely in another way than by one number for all its scores."""
    node, structures = mask, []
    proofs: list[MaskProof] = []
    nodes: list[fx.Node] = []
    while True:
        below, hiding = _step(search, node)
        if below is None:
            break
        if hiding is not None:
            structures.append(_shown(search, hiding, node, dtype))
            proofs.append(hiding)
        nodes.append(node)
        node = below
    if len(proofs) > 1 and any(structure.hidden_rows for structure in structures):
        raise NotThis(mask, f"{mask.name} is made of several masks, and may hide a row entirely")
    learned: list[MaskProof] = []
    read_bias(search, node, learned)
    if learned or not example(node).requires_grad:
        raise NotThis(node, f"{node.name} is no learned bias alone")
    return node, functools.reduce(operator.and_, structures, Structure()), proofs, nodes


def _shown(search: Search, hiding: MaskProof, node: fx.Node, dtype: torch.dtype) -> Structure:
    """Return what shows of a bias that ``node`` hides some of."""
    if shows_every_row(hiding, node):
        return CAUSAL if hiding.kind == "causal" else hiding.structure or Structure()
    structure = hiding.structure_in(dtype)
    if structure is not None and search.view.name(node) != "add":  # the lowest number is there instead of the bias
        finite = dtype == example(node).dtype != torch.float16 and _hides_by(search.view, node)[1] == torch.finfo(dtype).min
        structure = replace(structure, hidden_rows=FILLED if finite and not structure.labels else "")
    if structure is None or not structure.hidden_rows:
        raise NotThis(node, f"{node.name} may hide a row entirely")
    return structure


def _hides_by(view: View, node: fx.Node) -> tuple[Any, Any]:
    """The mask of ``where`` or ``masked_fill``, and the number that it puts in; two None for another node."""
    name, bound = view.name(node), view.arguments(node)
    if name not in ("where", "masked_fill") or bound is None or not is_tensor(bound["input"]):
        return None, None
    mask, number = (bound["condition"], bound["other"]) if name == "where" else (bound["mask"], bound["value"])
    number = view.folded(number)
    usual = is_tensor(mask) and type(number) in (int, float) and number <= torch.finfo(example(node).dtype).min
    return (mask, number) if usual else (None, None)


def _step(search: Search, node: fx.Node) -> tuple[fx.Node | None, MaskProof | None]:
    """Return what is below a node that casts or hides some of it, and the proof of what it hides; None where it does
    neither."""
    view = search.view
    below = view.transparent(node)
    if below is not None:
        kept = keeps_values(example(below).dtype, example(node).dtype)  # or the number that hides is another one then
        return (below, None) if kept else (None, None)
    if view.name(node) in ("contiguous", "expand") and is_tensor(node.args[0]):
        return node.args[0], None  # type: ignore[return-value]
    if view.name(node) == "add":
        return _masked_sum(search, node)
    mask, _ = _hides_by(view, node)
    if mask is None:
        return None, None
    below = (view.arguments(node) or {})["input"]
    return below, search.masks.prove(mask, hides=view.name(node) == "masked_fill")


def _masked_sum(search: Search, node: fx.Node) -> tuple[fx.Node | None, MaskProof | None]:
    """The operand of a sum that is learned, and the proof of the other, a mask; two None for another sum."""
    operands = binary(search.view, node)
    for bias, mask in (operands, operands[::-1]):
        if is_tensor(bias) and is_tensor(mask) and not example(mask).requires_grad:
            return bias, search.masks.prove(mask)
    return None, None
