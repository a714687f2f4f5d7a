"""Some rows of a tensor, or all in another order, the last dim as it is; and one number a row, of a trailing dim."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.indices import WHOLE, index_of
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import source_of


def below_a_choice_of_rows(view: View, node: fx.Node) -> fx.Node | None:
    """Return what a node takes some rows of, or all in another order, with the classes as they are: the same can be done
    with the input of the linear layer. None for anything else."""
    bound = view.arguments_of(node, "getitem", "narrow", "transpose", "permute", "squeeze")
    below = None if bound is None else bound["input"]
    if bound is None or not is_tensor(below) or "input" in node.kwargs or (node.op == "call_method" and node.kwargs):
        return None
    name, rank = view.name(node), example(below).dim()
    if name == "getitem":
        index = index_of(bound["index"], rank)
        plain = index is not None and all(isinstance(item, (slice, int)) or _picks_rows(item) for item in index.items)
        if not plain or index is None or index.items[-1] != WHOLE:
            return None
        # It is read again where the loss stands.
        return below if view.effects.written_after(view.order[node], index.tensors) is None else None
    if name == "permute":
        dims = bound["dims"][0] if len(bound["dims"]) == 1 else bound["dims"]
        return below if not bound["keywords"] and dims[-1] in (-1, rank - 1) else None
    dims = (bound["dim0"], bound["dim1"]) if name == "transpose" else (bound["dim"],)
    others = all(isinstance(dim, int) and dim % rank != rank - 1 for dim in dims)
    return below if others else None


def below_a_slice_of_classes(view: View, node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return what ``node`` takes the first classes of, ``logits[..., :n]``, and how many: a vocabulary that was padded."""
    bound = view.arguments_of(node, "getitem")
    below = None if bound is None else bound["input"]
    if bound is None or not is_tensor(below):
        return None
    index = index_of(bound["index"], example(below).dim())
    if index is None or not index.only_slices or index.new_axes or len(index.cuts) != 1:
        return None
    ((dim, cut),) = index.cuts
    classes = example(node).shape[-1]
    first = cut.start in (None, 0) and cut.step in (None, 1) and dim == example(below).dim() - 1
    return (below, classes) if first and isinstance(classes, int) and classes > 0 else None


def _picks_rows(item: object) -> bool:
    """Return True if an item of an index is a tensor of row numbers; a mask of booleans has a result of unknown size."""
    return is_tensor(item) and example(item).dtype in (torch.int64, torch.int32)  # type: ignore[arg-type]


def with_one_class(view: View, node: fx.Node) -> fx.Node:
    """Return what is below ``squeeze(-1)``, ``[..., 0]`` or ``view(-1)`` of a trailing dim of 1: what has it; else the node
    itself."""
    name, below = view.name(node), source_of(node)
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        whole = not any(map(is_tensor, index)) and all(i in (0, -1, Ellipsis, slice(None)) for i in index)
    else:
        whole = name in ("squeeze", "view", "reshape", "flatten")
    if not whole or not is_tensor(below) or not example(below).dim():  # type: ignore[arg-type]
        return node
    last = example(below).shape[-1]  # type: ignore[arg-type]
    trailing = statically_known_true(last == 1) and same_shape(example(node), example(below)[..., 0])  # type: ignore[arg-type]
    return below if trailing else node  # type: ignore[return-value]
