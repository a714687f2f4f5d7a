"""The sum of a token's rows, one of each of its experts -> kernels/moe_dispatch.py: the gradient is a gather.

What scales the rows (the router's weight) goes in front of the experts' last product, because the router's gradient does not
need what experts return then: no rows of the model's width are saved. A gate in front of that product is computed with the
scale (kernels/moe_down.py). A bias of the experts is added behind the sum, as a product with the matrix of what each token
gives to each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.routing import (
    Grouped,
    Sorting,
    grouped_product,
    inverse_of,
    is_behind_the_groups,
    is_written_before,
    same_length,
    sorting_of,
    written_by_permutation,
)
from fx_fusion.graph.size_hints import too_small, trained
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.moe_dispatch import moe_combine, sum_of_biases
from fx_fusion.kernels.moe_down import moe_down
from fx_fusion.patterns.moe_dispatch import inverse_of_all, pairs_of, rows_at, rows_here, too_many_experts
from fx_fusion.patterns.sites.gates import Gated, gate_of
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.experts_in_autocast import ADVICE, is_cast_by_nobody
from fx_fusion.rewrite.replace import insertion_point

_SECOND_DIM = (1, -2, (1,), (-2,), [1], [-2])


def combined(rows, ids, k):
    perm = torch.sort(ids, stable=True).indices
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0], device=perm.device)
    return rows[inverse].view(-1, k, rows.shape[1]).sum(1)


@dataclass
class Scaled:
    """The ops between a grouped product and the sum: ``scale · (product + bias[keys])``, or 0 behind the groups.

    nodes: all of it; scales: columns (rows, 1); bias: (experts, h); mask: (rows, 1), of the rows behind the groups;
    gated: the gate in front of the product, where one kernel computes it with its scale."""

    product: Grouped
    nodes: set[fx.Node]
    scales: list[fx.Node]
    bias: fx.Node | None = None
    mask: fx.Node | None = None
    gated: Gated | None = None

    @property
    def note(self) -> str:
        """Return what the report says of it."""
        gate = ", with the gate in one kernel" if self.gated is not None else ""
        return f"the router's weight before the last product{gate}"


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        found = _sum_of_rows(view, node) or _added_to_zeros(view, node)
        if found is None:
            continue
        rows, k, sorting, nodes = found
        others, scaled = {"perm": sorting.perm}, _scaled(view, rows, nodes, sorting)
        if scaled is not None:
            nodes |= scaled.nodes
            others |= {f"scale{i}": scale for i, scale in enumerate(scaled.scales)}
            x = scaled.product.x if scaled.gated is None else scaled.gated.h
            given = {"x": x, "weight": scaled.product.weight, "offsets": scaled.product.offsets, "bias": scaled.bias}
            others |= {name: node for name, node in {**given, "mask": scaled.mask}.items() if node is not None}
        yield Match(
            fusion="moe_combine",
            outputs=(node,),
            nodes=frozenset(nodes),
            inputs={"rows": rows, "ids": sorting.keys},
            statics={"k": k},
            others=others,
            reading=scaled,
            note="" if scaled is None else scaled.note,
        )


def _sum_of_rows(view: View, node: fx.Node) -> tuple[fx.Node, int, Sorting, set[fx.Node]] | None:
    """Return rows, k, the sort and the nodes where a node is ``rows[inverse].view(t, k, h).sum(1)``, or None."""
    bound = view.arguments_of(node, "sum")
    if bound is None or bound["keepdim"] or bound["dtype"] is not None or bound["dim"] not in _SECOND_DIM:
        return None
    shaped = bound["input"]
    viewed = view.arguments_of(shaped, "view", "reshape", "unflatten")
    if viewed is None or example(shaped).dim() != 3 or not isinstance(viewed["input"], fx.Node):
        return None
    taken, nodes = rows_at(view, viewed["input"]), {node, shaped, viewed["input"]}
    if taken is not None:
        rows, sorting = taken[0], inverse_of(view, taken[1])
    elif (put := written_by_permutation(view, viewed["input"])) is not None:
        rows, sorting = put.rows, put.sorting
        nodes.add(put.write)
    else:
        return None
    k, h = example(shaped).shape[1:]
    if sorting is None or not isinstance(k, int) or not same_length(rows, sorting.perm):
        return None
    return (rows, k, sorting, nodes) if statically_known_true(h == example(rows).shape[1]) else None


def _added_to_zeros(view: View, node: fx.Node) -> tuple[fx.Node, int, Sorting, set[fx.Node]] | None:
    """Return the same where a node is ``zeros(t, h).index_add(0, perm // k, rows)``, or None."""
    bound = view.arguments_of(node, "index_add")
    if bound is None or bound["dim"] not in (0, -2) or bound["alpha"] != 1 or example(node).dim() != 2:
        return None
    zeros, tokens, rows = bound["input"], bound["index"], bound["source"]
    if view.name(zeros) not in ("zeros", "zeros_like", "new_zeros") or not is_tensor(tokens):
        return None
    perm, k = pairs_of(view, tokens)
    sorting = sorting_of(view, perm)
    if sorting is None or is_written_before(view, tokens, node) or not same_length(rows, sorting.perm):
        return None
    fits = statically_known_true(example(node).shape[0] * k == example(rows).shape[0])
    return (rows, k, sorting, {node, zeros} if len(zeros.users) == 1 else {node}) if fits else None


def _scaled(view: View, rows: fx.Node, readers: set[fx.Node], sorting: Sorting) -> Scaled | None:
    """Read down from the rows to a grouped product. None where something else lies between or is read elsewhere, or where
    nothing scales the rows."""
    found, node = Scaled(None, set(), []), rows  # type: ignore[arg-type]
    clamped = False
    while all(user in readers or user in found.nodes for user in node.users):
        found.nodes.add(node)
        if (product := grouped_product(view, node)) is not None:
            found.product = product
            break
        name, bound = view.name(node), view.arguments(node)
        if bound is None or found.bias is not None:  # what is below the bias is not of the bias
            return None
        node, other = bound.get("input"), bound.get("other")
        if name == "mul":
            node, scale = (node, other) if _is_column(other, rows) else (other, node)
            found.scales.append(scale)
            fits = _is_column(scale, rows)
        elif name == "masked_fill":
            fits = bound["value"] == 0 and found.mask in (None, bound["mask"]) and is_behind_the_groups(view, bound["mask"])
            found.mask = bound["mask"]
        elif name == "add" and (bias := _bias_of(view, other, sorting)) is not None:
            found.bias, clamped = bias
            found.nodes.add(other)
            fits = bound["alpha"] == 1
        else:
            return None
        if not fits or not isinstance(node, fx.Node) or not is_tensor(node):
            return None
    else:
        return None
    if not found.scales or (clamped and found.mask is None) or example(found.product.node).dtype == torch.float16:
        return None  # in float16 a weight above 1 might overflow in front of the product
    found.gated = _gated(view, found.product)
    found.nodes |= found.gated.nodes if found.gated is not None else set()
    return found


def _gated(view: View, product: Grouped) -> Gated | None:
    """Return the gate that only a product of torch's reads, or None."""
    if not product.of_torch or not {example(n).dtype for n in (product.x, product.weight)} <= {torch.bfloat16}:
        return None
    source = view.source(product.x)
    gated = gate_of(view, source.base) if isinstance(source.base, fx.Node) else None
    if gated is None or example(gated.h).dtype != torch.bfloat16:
        return None
    nodes = gated.nodes | {*source.crossed}
    alone = all(user in nodes or user is product.node for node in nodes for user in node.users)
    return replace(gated, nodes=nodes) if alone else None


def _is_column(node: Any, rows: fx.Node) -> bool:
    """Return True for floating-point numbers, one for each row: (rows, 1)."""
    if not isinstance(node, fx.Node) or not is_tensor(node) or not example(node).is_floating_point():
        return False
    return example(node).dim() == 2 and statically_known_true(example(node).shape[1] == 1) and same_length(node, rows)


def _bias_of(view: View, node: Any, sorting: Sorting) -> tuple[fx.Node, bool] | None:
    """Return the table where a node has a row of it for each sorted key, and whether the keys are clamped; or None."""
    taken = rows_at(view, node) if isinstance(node, fx.Node) and len(node.users) == 1 else None
    if taken is None:
        return None
    table, keys = taken
    clamp = view.arguments_of(keys, "clamp")
    if clamp is not None and clamp["min"] is None and statically_known_true(clamp["max"] == example(table).shape[0] - 1):
        keys = clamp["input"]
    if keys not in sorting.sorted_keys or is_written_before(view, keys, node, but=taken):
        return None
    changed = view.effects.written_after(view.order[sorting.perm], [sorting.keys]) is not None
    return None if changed else (table, clamp is not None)


def emit(editor: Editor, match: Match) -> None:
    root, k, scaled, perm = match.root, match.statics["k"], match.reading, match.others["perm"]
    inverse, rows, biases, dtype = inverse_of_all(editor, perm), match.inputs["rows"], None, example(root).dtype
    here = None if scaled is None or scaled.mask is None else rows_here(editor, scaled.mask)
    with editor.graph.inserting_before(insertion_point(match, editor)):
        if scaled is not None:
            scale = _product_of(editor, scaled, root)
            rows = _product_of_scaled(editor, scaled, scale, root)
            biases = None if scaled.bias is None else _biases(editor, match, scale, inverse)
        given = (rows, perm, inverse, here, k, None if example(rows).dtype == dtype else dtype)
        y = editor.call(moe_combine, given, like=root)
        if biases is not None:
            y = editor.call(torch.add, (y, biases), like=root)
        editor.check([root], [y])
    editor.replace(root, y)


def _product_of(editor: Editor, scaled: Scaled, root: fx.Node) -> fx.Node:
    """Return the product of all scales, (rows, 1), 0 for the rows behind the groups."""
    scale, *others = scaled.scales
    for other in others:
        scale = editor.call(torch.mul, (scale, other), like=root)
    return scale if scaled.mask is None else editor.method("masked_fill", (scale, scaled.mask, 0.0), like=root)


def _product_of_scaled(editor: Editor, scaled: Scaled, scale: fx.Node, root: fx.Node) -> fx.Node:
    """Return the grouped product of the rows, each times its scale before."""
    product, gated = scaled.product, scaled.gated
    if gated is not None:
        return editor.call(moe_down, (gated.h, scale, product.weight, product.offsets, *gated.gate.arguments), like=root)
    node, unscaled = product.node, editor.now(product.x)
    x = editor.cast(editor.call(torch.mul, (unscaled, scale), like=root), example(unscaled).dtype, like=root)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: x if given is unscaled else given)
    return editor.call(node.target, args, kwargs, like=node)


def _biases(editor: Editor, match: Match, scale: fx.Node, inverse: fx.Node) -> fx.Node:
    """Return the sum of a token's biases, each times its scale, (t, h)."""
    root, k, scaled = match.root, match.statics["k"], match.reading
    ids = editor.method("view", (match.inputs["ids"], -1, k), like=root)
    if scaled.mask is not None:  # those of experts that other ranks have are scaled by 0
        ids = editor.method("clamp", (ids,), {"max": example(scaled.bias).shape[0] - 1}, like=root)
    apart = editor.call(torch.index_select, (editor.method("reshape", (scale, -1), like=root), 0, inverse), like=root)
    share = editor.method("view", (apart, -1, k), like=root)
    return editor.call(sum_of_biases, (scaled.bias, ids, share, example(root).dtype), like=root)


def unread(view: View) -> Iterator[NearMiss]:
    """Experts whose weights autocast does not cast."""
    for node in view.graph.nodes:
        if is_cast_by_nobody(view, node):
            yield NearMiss("moe_combine", node, node, ADVICE)


def guard(rows, ids, k):
    return too_many_experts(k) or wrong_dtype(rows=rows)


def why_keep(rows, ids, k):
    if not trained(rows):
        return "its rows need no gradient; the sum alone is Inductor's"
    return too_small(rows, symbolic=True)


FUSION = Fusion(
    name="moe_combine",
    instead="rows[inverse].view(-1, k, h).sum(1)",
    pattern=combined,
    inputs={"rows": "s h", "ids": "s"},
    integers={"ids": "s"},
    variants=({"k": 3},),
    find=find,
    unread=unread,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    traffic=("2*s*h*bytes", "6*s*h*bytes"),
    before=("embedding", "swiglu", "geglu", "swish"),
    cases=(
        case("one_token", s=3, h=1, bench=False),
        case("odd", s=111, h=19, bench=False),
        case("wide", s=15, h=1111, bench=False),
        case("mixtral", s=16384, h=4096, statics={"k": 2}),
        case("qwen3_moe", s=65536, h=2048, statics={"k": 8}),
        case("gpt_oss", s=32768, h=2880, statics={"k": 4}),
    ),
    source="Shazeer et al. 2017, arXiv:1701.06538",
)
