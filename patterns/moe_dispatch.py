"""Rows of tokens in the order of their experts -> kernels/moe_dispatch.py: the gradient sums k rows, without atomics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.indices import WHOLE, index_of
from fx_fusion.graph.routing import is_behind_the_groups, is_written_before, sorting_of
from fx_fusion.graph.size_hints import too_small, trained
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.moe_dispatch import MOST_EXPERTS, count_of_rows, inverse_permutation, moe_dispatch
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.replace import insertion_point


def dispatched(x, ids, k):
    perm = torch.sort(ids, stable=True).indices
    return x[perm // k]


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        rows = rows_at(view, node)
        if rows is None:
            continue
        x, index = rows
        perm, k = pairs_of(view, index)
        sorting = sorting_of(view, perm)
        if sorting is None or is_written_before(view, index, node):
            continue
        if not statically_known_true(example(x).shape[0] * k == example(perm).shape[0]):
            continue
        root, others = node, {"perm": perm}
        nodes = {node, *([index] if k > 1 and len(index.users) == 1 else [])}
        if (masked := _masked(view, node)) is not None:
            root, others["mask"] = masked
        bound = {"x": x, "ids": sorting.keys}
        yield Match("moe_dispatch", (root,), frozenset({root, *nodes}), bound, {"k": k}, others=others)


def rows_at(view: View, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return x and index where a node is ``x[index]`` of a matrix and integers, or None."""
    bound = view.arguments_of(node, "getitem", "index_select")
    if bound is None or not is_tensor(bound["input"]) or example(bound["input"]).dim() != 2:
        return None
    index = index_of(bound["index"], 2) if view.name(node) == "getitem" else None
    at = bound["index"] if index is None else index.items[0]
    if index is None and (view.name(node) == "getitem" or bound["dim"] not in (0, -2)):
        return None
    if index is not None and (index.new_axes or index.items[1] != WHOLE):
        return None
    is_vector = isinstance(at, fx.Node) and is_tensor(at) and example(at).dim() == 1
    return (bound["input"], at) if is_vector and not example(at).dtype.is_floating_point else None


def pairs_of(view: View, index: fx.Node) -> tuple[Any, int]:
    """Return the numbers of pairs whose tokens are indexed, and how many pairs a token has: ``pairs // k``."""
    bound = view.arguments_of(index, "floor_divide", "div")
    if bound is None or bound.get("rounding_mode", "floor") not in ("floor", "trunc"):
        return index, 1
    k = view.folded(bound["other"])
    return (bound["input"], k) if isinstance(k, int) and k > 0 else (index, 1)


def _masked(view: View, rows: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the call that makes the last rows, of experts that other ranks have, 0, and the mask of these rows."""
    masked = next(iter(rows.users)) if len(rows.users) == 1 else rows
    bound = view.arguments_of(masked, "masked_fill")
    if bound is None or bound["input"] is not rows or bound["value"] != 0:
        return None
    return (masked, bound["mask"]) if is_behind_the_groups(view, bound["mask"]) else None


def emit(editor: Editor, match: Match) -> None:
    perm, root = match.others["perm"], match.root
    inverse = inverse_of_all(editor, perm)
    here = None if "mask" not in match.others else rows_here(editor, match.others["mask"])
    with editor.graph.inserting_before(insertion_point(match, editor)):
        given = (match.inputs["x"], perm, inverse, here, match.statics["k"])
        rows = editor.call(moe_dispatch, given, like=root)
        editor.check([root], [rows])
    editor.replace(root, rows)


def inverse_of_all(editor: Editor, perm: fx.Node) -> fx.Node:
    """Return the inverse of a permutation, made behind it, once for all sites."""

    def make() -> fx.Node:
        with editor.graph.inserting_after(perm):
            return editor.call(inverse_permutation, (perm,), like=perm)

    return editor.once(("inverse of", perm), make)


def rows_here(editor: Editor, mask: fx.Node) -> fx.Node:
    """Return how many rows a mask of the last ones does not hide, counted once for all sites, behind it."""

    def make() -> fx.Node:
        with editor.graph.inserting_after(mask):
            return editor.call(count_of_rows, (mask,), like=mask)

    return editor.once(("rows that are not of", mask), make)


def too_many_experts(k: int) -> str | None:
    """Return why the kernel can't sum the rows of ``k`` experts, or None."""
    return f"{k} experts a token; the kernel sums up to {MOST_EXPERTS} rows" if k > MOST_EXPERTS else None


def guard(x, ids, k):
    return too_many_experts(k) or wrong_dtype(x=x)


def why_keep(x, ids, k):
    if not trained(x):
        return "x needs no gradient; the gather alone is Inductor's"
    return too_small(x, symbolic=True)


FUSION = Fusion(
    name="moe_dispatch",
    instead="x[torch.sort(ids, stable=True).indices // k]",
    pattern=dispatched,
    inputs={"x": "t h", "ids": "s"},
    integers={"ids": "t"},
    variants=({"k": 3},),
    find=find,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    traffic=("2*(s + t)*h*bytes", "(5*s + 3*t)*h*bytes"),
    cases=(
        case("one_row", t=1, s=3, h=1, bench=False),
        case("odd", t=37, s=111, h=19, bench=False),
        case("wide", t=5, s=15, h=1111, bench=False),
        case("mixtral", t=8192, s=16384, h=4096, statics={"k": 2}),
        case("qwen3_moe", t=8192, s=65536, h=2048, statics={"k": 8}),
        case("gpt_oss", t=8192, s=32768, h=2880, statics={"k": 4}),
    ),
    source="Shazeer et al. 2017, arXiv:1701.06538",
)
