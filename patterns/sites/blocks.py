"""The blocks of queries and keys that a structured mask shows, and what is read of it when the model runs, in the graph."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.match import Match
from fx_fusion.graph.masks.structure import Label, Shown, Structure
from fx_fusion.graph.outside import carried_in
from fx_fusion.graph.size_hints import expected
from fx_fusion.graph.terms import example
from fx_fusion.kernels.block_sparse_attention import hidden_rows, visible_blocks
from fx_fusion.rewrite.editor import Editor, Mismatch

DTYPES = (torch.bfloat16, torch.float16)


def too_few_scores(query: Tensor, key: Tensor, fewest: int) -> str | None:
    """Return why Inductor is as good without blocks: for queries (b, h, s, d) and keys (b, g, t, d), or None."""
    if query.is_cuda and torch.cuda.is_available() and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "the kernels of FlexAttention are made for compute capability 8.0 and up"
    b, h, s, _ = query.shape
    if expected(b) * expected(h) * expected(s) * expected(key.shape[2]) < fewest:
        return f"Inductor is as fast below {fewest} scores (measured on an H200)"
    return None


def operands(editor: Editor, match: Match) -> tuple[fx.Node, ...]:
    """Query, key and value in the dtype of the result; under autocast the inputs may have another."""
    dtype = example(match.root).dtype
    if dtype not in DTYPES:
        raise Mismatch(f"attention is computed in {dtype}; the kernels take bfloat16 or float16")
    return tuple(editor.cast(match.inputs[name], dtype, like=match.root) for name in ("query", "key", "value"))


def read_when_it_runs(structure: Structure) -> list[fx.Node]:
    """The nodes of labels and of padding."""
    shown = [shown.label for shown in (*structure.keys, *structure.queries)]
    return [label.node for label in (*structure.labels, *shown) if isinstance(label, Label)]


class Read(NamedTuple):
    """Return what the kernels are given of a mask: blocks, labels, keys, queries and bounds; and its hidden rows, if they
    are not zeros."""

    mask: tuple[fx.Node | tuple[fx.Node, ...] | int | None, ...]
    hidden: fx.Node | None


def read_mask(editor: Editor, query: fx.Node, key: fx.Node, structure: Structure, root: fx.Node) -> Read:
    """Nodes that read a mask when the model runs: once for all layers of a model."""
    sizes = (str(example(t).shape[2]) for t in (query, key))
    return editor.once((structure, *sizes, example(query).device), lambda: _read(editor, query, key, structure, root))


def _read(editor: Editor, query: fx.Node, key: fx.Node, structure: Structure, root: fx.Node) -> Read:
    labels = tuple(_label(editor, query, key, label, root) for label in structure.labels)
    keys = tuple(_shown(editor, key, shown, root) for shown in structure.keys)
    queries = tuple(_shown(editor, query, shown, root) for shown in structure.queries)
    bounds, hidden = (structure.low, structure.high), None
    if structure.hidden_rows:
        hidden = editor.call(hidden_rows, (query, key, keys, queries, *bounds), like=root)
    blocks = editor.call(visible_blocks, (query, key, labels, keys, queries, *bounds, hidden), like=root)
    return Read((blocks, labels, keys, queries, *bounds), hidden)


def _label(editor: Editor, query: fx.Node, key: fx.Node, label: Label | int, root: fx.Node) -> fx.Node:
    """(s), or (b, s) with a row for each row of the query: what the kernel indexes."""
    if not statically_known_true(example(query).shape[2] == example(key).shape[2]):
        raise Mismatch("a label belongs to a query and to a key, and there must be as many keys as queries")
    if isinstance(label, Label):
        return _by_position(editor, query, label, root)
    length = editor.method("size", (query, 2), like=root)
    positions = editor.call(torch.arange, (length,), {"device": example(query).device}, like=root)
    return editor.call(torch.floor_divide, (positions, label), like=root)


def _shown(editor: Editor, positions: fx.Node, shown: Shown, root: fx.Node) -> fx.Node:
    """Booleans (s) or (b, s): which positions of ``positions``, query or key, are not padding."""
    values = _by_position(editor, positions, shown.label, root)
    return editor.call(getattr(torch, shown.compare), (values, shown.value), like=root)


def _by_position(editor: Editor, positions: fx.Node, label: Label, root: fx.Node) -> fx.Node:
    if example(label.node).dim() == 4:
        return _shown_by(editor, positions, label, root)
    given, (b, _, s, _) = example(label.node).shape, example(positions).shape
    rows = () if label.row is not None or len(given) == 1 else (b,)
    if not all(statically_known_true(n == m) for n, m in zip(given[-1 - len(rows) :], (*rows, s), strict=True)):
        raise Mismatch(f"{label} has shape {tuple(given)}, the mask reads a part of it")
    node = carried_in(editor.view, label.node)
    return node if label.row is None else editor.call(operator.getitem, (node, label.row), like=root)


def _shown_by(editor: Editor, positions: fx.Node, label: Label, root: fx.Node) -> fx.Node:
    """Return which keys a mask (batch or 1, 1, queries, keys) shows to any query: (batch, keys), or (keys) for one row of
    it."""
    (masks, _, _, length), (b, _, s, _) = example(label.node).shape, example(positions).shape
    row = 0 if statically_known_true(masks == 1) else label.row
    if not statically_known_true(length == s) or (row is None and not statically_known_true(masks == b)):
        raise Mismatch(f"{label} has shape {tuple(example(label.node).shape)}, the mask reads a part of it")
    shown = editor.call(torch.any, (carried_in(editor.view, label.node), 2), like=root)
    return editor.call(operator.getitem, (shown, (slice(None) if row is None else row, 0)), like=root)
