"""Log-probabilities and the class that is picked of each row, however they are spelled.

    log p  =  log_softmax(z)  =  z − logsumexp(z)           of logits z, over the last dim
    picked =  gather(log p, y)  =  take_along_dim  =  Σ_c one_hot(y)_c · log p_c  =  log p[arange(n), y]

A view that keeps the last dim changes nothing of either. In ``log p[arange(n), y]`` a y below 0 counts from the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.indices import index_of
from fx_fusion.graph.terms import example, is_tensor, over_last_dim, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary, source_of


@dataclass(frozen=True)
class Picked:
    """One number a row, of one class: ``source[.., target]`` at ``root`` (which may have a trailing dim of 1, or be the sum
    over all rows); ``nodes`` make it. ``from_end``: a target below 0 counts from the end."""

    root: fx.Node
    source: fx.Node
    target: fx.Node
    nodes: frozenset[fx.Node]
    summed: bool = False
    from_end: bool = False


def logits_of(view: View, log_probs: Any) -> tuple[fx.Node, set[fx.Node]] | None:
    """The logits whose log-probabilities over the last dim a node holds, and the nodes that make them; None for anything
    else. No cast on the way rounds."""
    if not is_tensor(log_probs) or example(log_probs).dtype == torch.float64:  # the kernels compute in float32
        return None
    node, nodes = below_views(view, log_probs)
    term = inner_term(view, node, "log_softmax")
    if term is not None and term.attrs == (-1,):
        return term.operands[0], {*nodes, *term.nodes}
    edge = view.edge(node)
    term = inner_term(view, node, "sub")
    if term is None or len(term.operands) != 2 or not all(map(is_tensor, term.operands)):
        return None
    logits, total = term.operands
    bound = view.arguments_of(total, "logsumexp")
    if bound is None or bound["input"] is not logits or not bound["keepdim"] or not over_last_dim(bound["dim"], logits):
        return None
    return logits, {*nodes, *edge.crossed, *term.nodes, total}


def below_views(view: View, node: fx.Node) -> tuple[fx.Node, set[fx.Node]]:
    """Return what a node is a view of whose last dim is the same (row after row they hold the same), and the views."""
    nodes: set[fx.Node] = set()
    while True:
        name, source = view.name(node), None
        if name in ("view", "reshape", "flatten", "unflatten"):
            source = source_of(node)
        elif name == "getitem" and view.name(node.args[0]) == "broadcast_tensors":
            source = _broadcast(view, node)
            source = source if source is not None and same_shape(example(source), example(node)) else None
            nodes.update([] if source is None else [node.args[0]])  # type: ignore[list-item]
        if source is None or example(source).dim() * example(node).dim() == 0:
            return node, nodes
        if not statically_known_true(example(source).shape[-1] == example(node).shape[-1]):
            return node, nodes
        nodes.add(node)
        node = source


def _broadcast(view: View, node: fx.Node) -> fx.Node | None:
    """The tensor that an item of ``broadcast_tensors(...)`` is."""
    call, i = node.args
    operands = call.args if len(call.args) != 1 or is_tensor(call.args[0]) else call.args[0]  # type: ignore[union-attr]
    return operands[i] if isinstance(i, int) and is_tensor(operands[i]) else None  # type: ignore[index,return-value]


# -- the class of each row -------------------------------------------------------------------------------------------
def picked(view: View, node: fx.Node) -> Picked | None:
    """Return what ``node`` picks, if it picks one class of each row."""
    name = view.name(node)
    if name in ("gather", "take_along_dim"):
        return _gathered(view, node)
    if name == "getitem":
        return _indexed(view, node)
    return _one_hot_product(view, node) if name == "sum" else None


def _gathered(view: View, node: fx.Node) -> Picked | None:
    bound = view.arguments(node)
    if bound is None or not is_tensor(bound["input"]) or not is_tensor(bound["index"]):
        return None
    source = bound["input"]
    if not isinstance(bound["dim"], int) or not over_last_dim(bound["dim"], source):
        return None
    found = _one_class_a_row(view, bound["index"], source)
    return None if found is None else Picked(node, source, found[0], frozenset([node, *found[1]]))


def _one_class_a_row(view: View, index: fx.Node, source: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The target if ``index`` is it with a trailing dim of 1, int64, for as many rows as the source has; and the nodes that
    broadcast it and the source to each other."""
    if example(index).dim() != example(source).dim() or example(index).dtype != torch.int64:
        return None
    if example(index).shape[-1] != 1 or not same_shape(example(index)[..., 0], example(source)[..., 0]):
        return None
    edge = view.edge(index)
    if not isinstance(edge.base, fx.Node) or edge.roundings:
        return None
    base, nodes = _first_column(view, edge.base)
    term = view.term(base)
    if term.op == "unsqueeze" and term.attrs == (-1,):
        target = term.operands[0]
    elif view.name(base) in ("view", "reshape"):  # y.view(-1, 1)
        target = source_of(base)
        if is_tensor(target) and view.effects.written_after(view.order[base], [base, target]) is not None:
            return None  # reshape may have copied what is written to afterwards
    else:
        return index, []  # y[:, 1:, None]: as it is
    return (target, nodes) if is_tensor(target) and example(target).dtype == torch.int64 else (index, [])


def _first_column(view: View, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return what is below ``broadcast_tensors(index, ..)[0][..., :1]``, which ``Categorical.log_prob`` makes of an index,
    that index."""
    below = node.args[0] if view.name(node) == "getitem" else None
    if not is_tensor(below) or view.name(below) != "getitem" or view.name(below.args[0]) != "broadcast_tensors":  # type: ignore[union-attr]
        return node, []
    index = index_of(node.args[1], example(below).dim())
    source = _broadcast(view, below)  # type: ignore[arg-type]
    if index is None or not index.only_slices or index.new_axes or source is None:
        return node, []
    only_first = [(d, s.start or 0, s.stop) for d, s in index.cuts] == [(example(below).dim() - 1, 0, 1)]
    if not only_first or not same_shape(example(source), example(node)):
        return node, []
    return source, [node, below, below.args[0]]  # type: ignore[list-item,union-attr]


def is_indexed(view: View, node: fx.Node) -> bool:
    """Return True if ``node`` is ``log p[rows, classes]``, whatever the rows are."""
    return _pairs(view, node) is not None and logits_of(view, node.args[0]) is not None


def _pairs(view: View, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors of ``source[rows, columns]``, of a source of two dims."""
    source = node.args[0] if view.name(node) == "getitem" else None
    index = index_of(node.args[1], 2) if is_tensor(source) and example(source).dim() == 2 else None  # type: ignore[arg-type]
    pairs = index is not None and len(index.items) == 2 and all(map(is_tensor, index.items))
    return index.items if pairs and index is not None else None  # type: ignore[return-value]


def _indexed(view: View, node: fx.Node) -> Picked | None:
    """``source[arange(rows), target]``."""
    source, pairs = node.args[0], _pairs(view, node)
    if pairs is None:
        return None
    rows, target = pairs
    count, classes = example(source).shape  # type: ignore[arg-type]
    if example(target).dtype != torch.int64 or example(target).dim() != 1 or not isinstance(classes, int):
        return None
    if not statically_known_true(example(target).shape[0] == count) or not _counts_to(view, rows, count):
        return None
    return Picked(node, source, target, frozenset([node]), from_end=True)  # type: ignore[arg-type]


def _counts_to(view: View, node: fx.Node, count: Any) -> bool:
    """Return True if a node is ``arange(count)``, of integers."""
    bound = view.arguments_of(node, "arange")
    if bound is None or example(node).dtype not in (torch.int64, torch.int32) or example(node).dim() != 1:
        return False
    if view.effects.written_after(view.order[node], [node]) is not None:
        return False
    start, step = 0, 1
    if len(bounds := bound["bounds"]) > 1:
        start, step = bounds[0], bounds[2] if len(bounds) > 2 else 1
    known = {"start": start, "step": step, **bound["keywords"]}
    return known["start"] == 0 and known["step"] == 1 and statically_known_true(example(node).shape[0] == count)


def _one_hot_product(view: View, node: fx.Node) -> Picked | None:
    """``(one_hot(target, classes) * source).sum(-1)``, or the sum over all rows too."""
    bound = view.arguments(node)
    if bound is None or not is_tensor(bound["input"]) or bound["keepdim"] or bound["dtype"] is not None:
        return None
    summed = bound["dim"] is None
    if not summed and not over_last_dim(bound["dim"], bound["input"]):
        return None
    product = bound["input"]
    try:
        factors = binary(view, product) if view.name(product) == "mul" else ()
    except NotThis:
        return None
    for hot, source in (factors, factors[::-1]) if factors else ():
        found = one_hot_of(view, hot)
        if found is None or not is_tensor(source) or not same_shape(example(hot), example(source)):
            continue
        if example(source).dtype == example(node).dtype:
            return Picked(node, source, found[0], frozenset([node, product, *found[1]]), summed)
    return None


def one_hot_of(view: View, hot: Any) -> tuple[fx.Node, set[fx.Node]] | None:
    """The classes that ``one_hot(classes, n)`` is of, casts aside, and the nodes that make it."""
    if not is_tensor(hot):
        return None
    node, nodes = hot, set()
    while view.name(node) in ("float", "to", "half", "bfloat16", "double", "type_as") and is_tensor(node.args[0]):
        nodes.add(node)
        node = node.args[0]
    bound = view.arguments_of(node, "one_hot")
    if bound is None or not is_tensor(bound["input"]) or example(bound["input"]).dtype != torch.int64:
        return None
    return bound["input"], {*nodes, node}
