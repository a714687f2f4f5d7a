"""Rows that are taken from logits, as logits of the rows that are taken from the linear layer's input.

    z = linear(x, w)                                            a = linear(x[:, :-1][:, :256], w)
    a, b = z[:, :-1].split(256, 1)             becomes          b = linear(x[:, :-1][:, 256:], w)

Losses over chunks of a sequence, or one sequence after the other, are written so. Each has a region of rows of its own then.
Where no rewrite takes one of them, the graph is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.indices import index_of
from fx_fusion.graph.signatures import names_of
from fx_fusion.graph.size_hints import elements
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.torch_internals.nodes import is_erased, rename

_FEWEST_CLASSES = 4096
_MOST_PARTS = 64  # each part is a product of its own, and adds to the weight's gradient
_SPLITS = {"chunk", "split", "tensor_split", "unbind"}
_PICKS = {"select", "narrow"}
_NAMES = _SPLITS | _PICKS | {"getitem", "to", "float", "bfloat16", "half"}


@dataclass
class Parts:
    """A linear layer, and what takes rows of it.

    Attributes:
        between: the nodes from its result to the parts, which stay in the graph until ``settle``.
        taken: what holds each part now, by the node of ``between`` that held it.
        linears: the linear layers of the parts.
    """

    linear: fx.Node
    between: list[fx.Node]
    taken: dict[fx.Node, fx.Node] = field(default_factory=dict)
    linears: list[fx.Node] = field(default_factory=list)


def take_rows_first(graph: fx.Graph) -> list[Parts]:
    """Rewrite in place what takes several parts of the rows of one linear layer's result. Returns what ``settle`` reads."""
    candidates = [node for node in graph.nodes if _may_be_taken_apart(node)]
    if not candidates:
        return []
    editor = Editor(View(graph))
    return [parts for node in candidates if (parts := _taken_apart(editor, node)) is not None]


def settle(found: Iterable[Parts]) -> int:
    """Make the graph what it was where none of the linear layers of some parts was fused; remove what nothing reads.
    Returns how many linear layers stay apart."""
    count = 0
    for parts in found:
        graph = parts.linear.graph
        if any(is_erased(linear) for linear in parts.linears):
            count += 1
        else:
            for old, new in parts.taken.items():
                new.replace_all_uses_with(old)
        for node in reversed(list(graph.nodes)):
            made = node.meta.get(_MADE) is parts.linear or node in parts.between or node is parts.linear
            if made and not node.users:
                graph.erase_node(node)
    return count


_Taken = tuple[tuple[Any, str], ...]
_MADE = "fx_fusion_rows_of"


def _may_be_taken_apart(node: fx.Node) -> bool:
    """Return True for a linear layer with many classes, all of whose readers may take rows."""
    if names_of(node)[0] != "linear" or not is_tensor(node) or example(node).dim() < 2:
        return False
    classes = example(node).shape[-1]
    if not isinstance(classes, int) or classes < _FEWEST_CLASSES or not node.users:
        return False
    return all(names_of(user)[0] in _NAMES for user in node.users)


def _taken_apart(editor: Editor, linear: fx.Node) -> Parts | None:
    view = editor.view
    bound = view.arguments_of(linear, "linear")
    if bound is None or type(example(linear)) is not type(example(bound["input"])) or hasattr(example(linear), "placements"):
        return None
    chain = _chain(view, linear)
    leaves = [node for node in chain if any(user not in chain for user in node.users)]
    region = view.effects.region
    parts = {chain[leaf]: leaf for leaf in leaves}
    if not all(is_tensor(leaf) and chain[leaf] for leaf in leaves) or not 1 < len(parts) <= _MOST_PARTS:
        return None
    alike = all(region[node] == region[linear] for node in chain)
    sizes = sum(elements(example(leaf)) for leaf in parts.values())
    if not alike or sizes > elements(example(linear)) or _shows_its_memory(view, chain):
        return None
    found, known = Parts(linear, [n for n in chain if n is not linear]), set(editor.graph.nodes)
    linears: dict[_Taken, fx.Node] = {}
    rows: dict[fx.Node, Any] = {linear: bound["input"]}
    try:
        with editor.graph.inserting_before(linear.next):
            for node in chain:
                if node is not linear:
                    rows[node] = _again(editor, view, node, rows)
            for leaf in leaves:
                if chain[leaf] not in linears:
                    operands = (rows[leaf], bound["weight"], *(() if bound["bias"] is None else (bound["bias"],)))
                    linears[chain[leaf]] = editor.call(linear.target, operands, like=leaf)
                found.taken[leaf] = editor.cast(linears[chain[leaf]], example(leaf).dtype, like=leaf)
    except Mismatch:
        editor.erase(n for n in reversed(list(editor.graph.nodes)) if n not in known)
        return None
    for node in editor.graph.nodes:
        if node not in known:
            node.meta[_MADE] = linear
    for leaf, new in found.taken.items():
        leaf.replace_all_uses_with(new, delete_user_cb=lambda user: user not in chain)
    for key, made in linears.items():
        rename(made, f"{parts[key].name}_apart")  # the same in each copy of the graph
    found.linears += linears.values()
    return found


_OF_MEMORY = {"as_strided", "set_", "stride", "storage_offset", "is_contiguous", "data_ptr", "untyped_storage", "storage"}


def _shows_its_memory(view: View, chain: Iterable[fx.Node]) -> bool:
    """Return True if something may tell a part that lies in the memory of all rows from one that has its own: a write to
    it or to what may be a view or a copy of it, a result of the graph, an op that is not known."""
    same = {node for node in chain if is_tensor(node)}
    for node in view.graph.nodes:
        below = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if below in same and node not in same and is_tensor(node) and not _mixes(view, node, below):
            same.add(node)
    for node in view.graph.nodes:
        given = [n for n in node.all_input_nodes if n in same]
        if given and node.op != "output" and (view.name(node) is None or view.name(node) in _OF_MEMORY):
            return True
        if given and node.op == "output" and not all(_is_copied(view, n) for n in given):
            return True
        if any(n in same for n in view.effects.mutated(node)):
            return True
    return False


def _mixes(view: View, node: fx.Node, below: fx.Node) -> bool:
    """Return True if a node is no view, cast or copy of ``below``."""
    return elements(example(node)) != elements(example(below)) or view.name(node) not in _LAYOUTS


def _is_copied(view: View, node: fx.Node) -> bool:
    """Return True if a result of the graph has memory of its own, in an order that does not depend on its operand's."""
    return view.name(node) == "clone" and node.kwargs.get("memory_format") is torch.contiguous_format


_LAYOUTS = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "to", "float", "bfloat16",
    "half", "transpose", "permute", "t", "detach", "view_as", "reshape_as", "type_as",
}  # fmt: skip


def _chain(view: View, linear: fx.Node) -> dict[fx.Node, _Taken]:
    """Return the nodes that hold rows of a linear layer's result, and by which calls each took them; tuples of parts are
    among them."""
    chain: dict[fx.Node, _Taken] = {linear: ()}
    for node in view.graph.nodes:
        below = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if below in chain and [n for n in node.all_input_nodes if n in chain] == [below]:
            takes = _takes_rows(view, node, below)
            if takes is not None:
                call = view.name(node), repr((node.args[1:], node.kwargs))
                chain[node] = (*chain[below], call) if takes else chain[below]
    return chain


def _takes_rows(view: View, node: fx.Node, below: fx.Node) -> bool | None:
    """Return whether a node takes some of the rows of ``below``, or only casts it; None where it does something else."""
    name = view.name(node)
    if not is_tensor(below):
        return True if name == "getitem" and isinstance(node.args[1], int) else None
    rank = example(below).dim()
    if view.transparent(node) is below and is_tensor(node):
        same = example(node).shape == example(below).shape and keeps_values(example(below).dtype, example(node).dtype)
        return False if same and name in ("to", "float", "bfloat16", "half") else None
    if name == "getitem":
        index = index_of(node.args[1], rank)
        return True if index is not None and index.takes_rows and not index.tensors else None
    bound = view.arguments(node) if name in _SPLITS | _PICKS else None
    dim = None if bound is None else bound.get("dim")
    return True if isinstance(dim, int) and dim % rank < rank - 1 else None


def _again(editor: Editor, view: View, node: fx.Node, rows: dict[fx.Node, Any]) -> Any:
    """Return what takes the same rows of the linear layer's input; of a cast what it is a cast of."""
    below = node.args[0]
    assert isinstance(below, fx.Node)
    if is_tensor(below) and not _takes_rows(view, node, below):
        return rows[below]
    if view.name(node) in _SPLITS | _PICKS:  # a dim that is counted from the last one is the same
        args, kwargs = (rows[below], *node.args[1:]), dict(node.kwargs)
    else:
        args, kwargs = (rows[below], node.args[1]), {}
    if node.op == "call_method":
        return editor.method(str(node.target), args, kwargs, like=node)
    return editor.call(node.target, args, kwargs, like=node)
