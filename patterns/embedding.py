"""``F.embedding`` whose table is trained -> kernels/embedding.py: the gather stays Inductor's, the gradient is ours.

A scale behind it (Gemma's sqrt of the width) stays in the graph, where its neighbors absorb it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.size_hints import trained
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis
from fx_fusion.kernels.embedding import embedding
from fx_fusion.ops.shards import redistributed, rows_of_all_ranks
from fx_fusion.patterns.sites.log_probs import one_hot_of
from fx_fusion.patterns.sites.products import Product, product_of
from fx_fusion.patterns.sites.table_parts import TableParts, table_parts
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.parts import own

NO_PADDING = -1


def torch_embedding(ids, weight, padding_idx):
    return F.embedding(ids, weight, None if padding_idx == NO_PADDING else padding_idx)


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        if (indexed := _indexed(view, node)) is not None:
            yield indexed
            continue
        bound = view.arguments_of(node, "embedding")
        if bound is None or not is_tensor(bound["weight"]) or not is_tensor(bound["input"]):
            continue
        if bound["max_norm"] is not None or bound["scale_grad_by_freq"] or bound["sparse"]:
            reason = "max_norm, scale_grad_by_freq and sparse change the table or its gradient"
            yield NearMiss("embedding", node, node, reason)
            continue
        padding = view.folded(bound["padding_idx"])
        if isinstance(padding, int) and padding < 0:
            padding += example(bound["weight"]).shape[0]
        if padding is not None and not isinstance(padding, int):
            yield NearMiss("embedding", node, node, f"padding_idx is {padding}, which is no constant")
            continue
        inputs = {"ids": bound["input"], "weight": bound["weight"]}
        statics = {"padding_idx": NO_PADDING if padding is None else padding}
        try:
            parts = table_parts(node, bound["input"], bound["weight"])
        except NotThis as why:
            yield NearMiss("embedding", node, node, str(why))
            continue
        lies = {} if parts is None else parts.gradients
        root = node if parts is None or parts.summed is None else parts.summed
        yield Match("embedding", (root,), frozenset([node, root]), inputs, statics, parts=lies, reading=parts)


def _indexed(view: View, node: fx.Node) -> Match | None:
    """``weight[ids]``, ``index_select(weight, 0, ids)`` and ``one_hot(ids) @ weight``, rows of a parameter."""
    if (product := product_of(view, node)) is not None:
        return _one_hot(view, node, product)
    bound = view.arguments_of(node, "getitem", "index_select")
    if bound is None or not is_tensor(bound["input"]) or not is_tensor(bound["index"]):
        return None
    weight, ids = bound["input"], bound["index"]
    if view.name(node) == "getitem" and example(ids).dim() == 0:
        return None  # one row: a view
    if not _is_table(weight) or bound.get("dim", 0) != 0 or example(ids).dtype not in (torch.int64, torch.int32):
        return None
    statics, counts = {"padding_idx": NO_PADDING}, view.name(node) == "getitem"
    return Match(
        "embedding", (node,), frozenset([node]), {"ids": ids, "weight": weight}, statics, reading=counts or None
    )  # fmt: skip


def _one_hot(view: View, node: fx.Node, product: Product) -> Match | None:
    hot, weight = one_hot_of(view, product.left), product.right
    plain = (product.left_order, product.right_order, product.added, product.alpha) == (None, None, None, 1)
    if hot is None or not plain or not _is_table(weight) or example(node).dtype != example(weight).dtype:
        return None
    if not statically_known_true(example(product.left).shape[-1] == example(weight).shape[0]):
        return None
    nodes = frozenset((node, *hot[1]))
    return Match("embedding", (node,), nodes, {"ids": hot[0], "weight": weight}, {"padding_idx": NO_PADDING})


def _is_table(weight: fx.Node) -> bool:
    return example(weight).dim() == 2 and weight.op in ("placeholder", "get_attr") and example(weight).is_leaf


def unread(view: View) -> Iterator[NearMiss]:
    """Rows of a table in other words."""
    for node in view.graph.nodes:
        if view.name(node) == "embedding_bag":
            yield NearMiss("embedding", node, node, "sums of rows (embedding_bag) have no kernel")
        product = product_of(view, node)
        if product is not None and one_hot_of(view, product.left) is not None:
            yield NearMiss("embedding", node, product.left, "one_hot(ids) @ table multiplies by zeros; write F.embedding")


def emit(editor: Editor, match: Match) -> None:
    with editor.graph.inserting_before(match.root):
        if isinstance(match.reading, TableParts):
            call = _of_own_rows(editor, match, match.reading)
            editor.replace(match.root, call)
            return
        ids, weight = match.inputs["ids"], match.inputs["weight"]
        if match.reading:  # an index below 0 counts from the end
            behind = editor.call(torch.add, (ids, example(weight).shape[0]), like=match.root)
            ids = editor.call(torch.where, (editor.call(torch.lt, (ids, 0), like=match.root), behind, ids), like=match.root)
        call = editor.call(embedding, (ids, weight, match.statics["padding_idx"]), like=match.root)
        editor.check([match.root], [call])
    editor.replace(match.root, call)


def _of_own_rows(editor: Editor, match: Match, parts: TableParts) -> fx.Node:
    """Return what this rank looks up in its part of the table, as the DTensor that ``rows`` says. A row that another rank
    has is looked up as row 0 here, and zeros then."""
    root, padding, here = match.root, match.statics["padding_idx"], None
    ids, weight = own(editor, match, "ids"), own(editor, match, "weight")
    if parts.own is not None:
        padding = padding - parts.first if parts.first <= padding < parts.first + parts.own else NO_PADDING
        ids = editor.call(torch.sub, (ids, parts.first), like=root)
        inside = editor.call(torch.ge, (ids, 0), like=root), editor.call(torch.lt, (ids, parts.own), like=root)
        here = editor.call(torch.logical_and, inside, like=root)
        ids = editor.call(torch.where, (here, ids, 0), like=root)
    looked_up = editor.call(embedding, (ids, weight, padding), like=root)
    if here is not None:
        looked_up = editor.call(torch.where, (editor.method("unsqueeze", (here, -1), like=root), looked_up, 0.0), like=root)
    given = looked_up, match.inputs["ids"], match.inputs["weight"], parts.rows
    rows = editor.call(rows_of_all_ranks, given, like=root)
    if parts.summed is None:
        return rows
    redistribute = redistributed if root.op == "call_method" else root.target
    return editor.call(redistribute, (rows, *root.args[1:]), dict(root.kwargs), like=root)


def guard(ids, weight, padding_idx):
    if ids.dtype not in (torch.int64, torch.int32):
        return f"ids are {ids.dtype}; the kernel takes int64 and int32"
    if weight.dim() != 2 or not statically_known_true(weight.stride(1) == 1):
        return f"the table has shape {tuple(weight.shape)} and strides {tuple(weight.stride())}; expected rows"
    return wrong_dtype(weight=weight)


def why_keep(ids, weight, padding_idx):
    if not trained(weight):
        return "the table needs no gradient; the gather alone is Inductor's"
    return None


FUSION = Fusion(
    name="embedding",
    instead="F.embedding(ids, weight)",
    pattern=torch_embedding,
    inputs={"ids": "...", "weight": "v n"},
    integers={"ids": "v"},
    variants=({"padding_idx": NO_PADDING}, {"padding_idx": 3}),
    find=find,
    unread=unread,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    traffic=("(3*m*n + v*n)*bytes", "(3*m*n + v*n)*bytes + 6*(4 - bytes)*v*n"),
    cases=(
        case("one_element", m=1, v=5, n=1, bench=False),
        case("odd", m=37, v=50, n=19, bench=False),
        case("long_segments", m=3001, v=7, n=5, bench=False),
        case("llama_2", m=16384, v=32000, n=4096),
        case("llama_3", m=16384, v=128256, n=4096),
        case("llama_3_long", m=65536, v=128256, n=4096),
        case("gpt2", m=65536, v=50257, n=768),
    ),
    source="torch.nn.functional.embedding",
)
