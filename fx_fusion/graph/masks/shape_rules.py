"""The vocabulary of masks, continued: ops that rename, add, drop or index dims."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from fx_fusion.graph.indices import WHOLE, Index, index_of
from fx_fusion.graph.masks.expressions import DIMS, Interpreter, Opaque, size_of, upper_bound
from fx_fusion.graph.masks.rules import RULES, Bound, rule_of
from fx_fusion.graph.terms import example, is_tensor

__all__ = ["RULES"]


@rule_of("contiguous", "clone", "detach", "expand", "expand_as", "broadcast_to", "alias")
def _same(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    return prover.at(bound["input"], node)


@rule_of("unsqueeze")
def _unsqueeze(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    rank = example(node).dim()
    dims = [d for i, d in enumerate(DIMS[:rank]) if i != bound["dim"] % rank]
    return prover.at(bound["input"], node, dims)


@rule_of("repeat")
def _repeat(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    """Repeat dims of size 1 and new dims; other dims once."""
    below, after = bound["input"], example(node).shape
    before = example(below).shape
    new = len(after) - len(before)
    dims: list[Any] = []
    for i, size in enumerate(before):
        once = size_of(size) == size_of(after[new + i])
        if not once and not (isinstance(size, int) and size == 1):
            raise Opaque(node, f"{node.name} repeats a dim of more than 1")
        dims.append(DIMS[new + i] if once else sympy.Integer(0))
    return prover.at(below, node, dims)


@rule_of("squeeze", "view", "reshape")
def _reshape(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    """Adding and removing dims of size 1 only."""
    below = bound["input"]
    if example(below).dtype != example(node).dtype:
        raise Opaque(node, f"{node.name} reads the memory of {example(below).dtype} as {example(node).dtype}")
    before = [i for i, s in enumerate(example(below).shape) if not (isinstance(s, int) and s == 1)]
    after = [i for i, s in enumerate(example(node).shape) if not (isinstance(s, int) and s == 1)]
    same = len(before) == len(after) and all(
        size_of(example(below).shape[i]) == size_of(example(node).shape[j]) for i, j in zip(before, after, strict=True)
    )
    if not same:
        raise Opaque(node, f"{node.name} merges or splits dims")
    dims: list[Any] = [sympy.Integer(0)] * example(below).dim()
    for i, j in zip(before, after, strict=True):
        dims[i] = DIMS[j]
    return prover.at(below, node, dims)


@rule_of("transpose", "t", "permute")
def _transpose(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    rank = example(node).dim()
    order = list(range(rank))
    if prover.name(node) == "permute":
        dims = bound["dims"][0] if len(bound["dims"]) == 1 else bound["dims"] or bound["keywords"]["dims"]
        order = [d % rank for d in dims]
    elif rank > 1:
        a, b = bound.get("dim0", 0) % rank, bound.get("dim1", 1) % rank
        order[a], order[b] = order[b], order[a]
    renamed: list[Any] = [None] * rank
    for i, source in enumerate(order):
        renamed[source] = DIMS[i]
    return prover.at(bound["input"], node, renamed)


@rule_of("getitem")
def _getitem(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    below = bound["input"]
    index = index_of(bound["index"], example(below).dim())
    if index is None:
        raise Opaque(node, f"{node.name} is indexed in an unusual way")
    if any(is_tensor(item) for item in index.tensors):
        return _gather(prover, node, below, index)
    dims: list[Any] = []
    out = 0
    for item in index.items:
        if item is None:
            out += 1
        elif isinstance(item, slice):
            if item.step not in (None, 1) or (isinstance(item.start, int) and item.start < 0):
                raise Opaque(node, f"{node.name} slices with a step or from the end")
            start = sympy.Integer(0) if item.start is None else prover.at(item.start, node)
            lowest = upper_bound(-start, {})
            if lowest is None or not lowest.is_nonpositive:
                raise Opaque(node, f"{node.name} may slice from the end")
            dims.append(DIMS[out] + start)
            out += 1
        elif isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            dims.append(sympy.Integer(item))
        else:
            raise Opaque(node, f"{node.name} is indexed by {item}")
    return prover.at(below, node, dims)


def _gather(prover: Interpreter, node: fx.Node, below: fx.Node, index: Index) -> sympy.Basic:
    """``x[i, j]`` with broadcast index tensors for the leading dims."""
    indices, items = index.tensors, list(index.items)
    rest = items[len(indices) :]
    if items[: len(indices)] != indices or any(item != WHOLE for item in rest):
        raise Opaque(node, f"{node.name} mixes index tensors and slices")
    rank = example(node).dim()
    lead, kept = list(DIMS[: rank - len(rest)]), list(DIMS[rank - len(rest) : rank])
    if any(example(i).dtype in (torch.bool, torch.uint8) for i in indices):
        raise Opaque(node, f"{node.name} is indexed by a boolean tensor")
    chosen = [prover.at(i, node, lead) for i in indices]
    sizes = {dim: size_of(size) for dim, size in zip(DIMS, example(node).shape, strict=False)}
    for i in chosen:
        lowest = upper_bound(-i, sizes)
        if lowest is None or not lowest.is_nonpositive:
            raise Opaque(node, f"{node.name} may index from the end")
    return prover.at(below, node, [*chosen, *kept])
