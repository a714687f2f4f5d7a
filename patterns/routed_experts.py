"""Experts that a model computes for every token, most of them times 0 (Llama 4): only the chosen ones are computed.

A factor is exactly 0 where the router's score is sigmoid(-inf). Such a row is 0 behind a product without a bias, behind its
gate, and behind the second product, and so are its gradients. Of 16 experts with one a token a 16th of the products is left.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.devices import device_type
from fx_fusion.graph.routing import is_changed, reshaped_from
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.moe_dispatch import inverse_permutation, moe_combine, moe_dispatch
from fx_fusion.kernels.moe_down import Gate, moe_down, moe_up
from fx_fusion.kernels.moe_sort import moe_sort
from fx_fusion.patterns.moe_dispatch import too_many_experts
from fx_fusion.patterns.sites.gates import gate_of
from fx_fusion.rewrite.editor import Editor


def every_expert(x, logits, up, down, k):
    experts, width = up.shape[:2]
    chosen = torch.topk(logits, k, dim=1)
    scores = torch.full_like(logits, -math.inf).scatter_(1, chosen.indices, chosen.values)
    scores = torch.sigmoid(scores.float()).to(logits.dtype)
    rows = x.repeat(experts, 1) * scores.transpose(0, 1).reshape(-1, 1)
    gate, also = torch.bmm(rows.view(experts, -1, width), up).chunk(2, dim=-1)
    y = torch.bmm(also * F.silu(gate), down)
    return y.view(-1, width).reshape(experts, -1, width).sum(dim=0)


@dataclass(frozen=True)
class Routed:
    """logits: (tokens, experts); values, ids: (tokens, k), of their topk; after: the nodes from what is scattered to the
    scores, in order."""

    logits: fx.Node
    values: fx.Node
    ids: fx.Node
    after: tuple[fx.Node, ...]
    gate: Gate
    k: int


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        bound = view.arguments_of(node, "sum")
        if bound is not None and bound["dim"] in (0, (0,), [0]) and not bound["keepdim"] and bound["dtype"] is None:
            found = _read(view, node, bound["input"])
            if found is not None:
                yield found


def _read(view: View, root: fx.Node, summed: Any) -> Match | None:
    """Read down from the sum over experts to x and the router's choices; None where something else is computed."""
    node, nodes = reshaped_from(view, summed)
    second = view.arguments_of(node, "bmm")
    gated = None if second is None else gate_of(view, second["input"])
    first = None if gated is None else view.arguments_of(gated.h, "bmm")
    if second is None or gated is None or first is None:
        return None
    rows, more = reshaped_from(view, first["input"])
    factors = view.arguments_of(rows, "mul")
    if factors is None:
        return None
    nodes |= {root, node, gated.h, rows} | gated.nodes | more
    operands, experts = (factors["input"], factors["other"]), example(first["mat2"]).shape[0]
    for repeated, column in (operands, operands[::-1]):
        copies, of_column = view.arguments_of(repeated, "repeat"), _of_column(view, column)
        if copies is None or of_column is None or not is_tensor(copies["input"]):
            continue
        (scores, turned), x = of_column, copies["input"]
        routed = _routed(view, scores, gated.gate, view.effects.region[root])
        sizes = [example(summed).shape[0], *_sizes_of(view, copies["sizes"]), *example(scores).shape]
        if routed is None or not _are(sizes, [experts, experts, 1, example(x).shape[0], experts]):
            continue
        alone = {n for n in (repeated, *turned) if all(user in nodes or user in turned for user in n.users)}
        return Match(
            fusion="routed_experts",
            outputs=(root,),
            nodes=frozenset(nodes | alone),
            inputs={"x": x, "logits": routed.logits, "up": first["mat2"], "down": second["mat2"]},
            statics={"k": routed.k},
            others={"values": routed.values, "ids": routed.ids},
            reading=routed,
        )
    return None


def _sizes_of(view: View, sizes: Any) -> tuple[Any, ...]:
    """Return the numbers that ``repeat`` is given, one by one or as a tuple."""
    folded = view.folded(tuple(sizes))
    return tuple(folded[0]) if len(folded) == 1 and isinstance(folded[0], (tuple, list)) else folded


def _are(sizes: list[Any], wanted: list[Any]) -> bool:
    return len(sizes) == len(wanted) and all(statically_known_true(a == b) for a, b in zip(sizes, wanted, strict=True))


def _of_column(view: View, column: Any) -> tuple[fx.Node, set[fx.Node]] | None:
    """Return the scores, (tokens, experts), of ``scores.transpose(0, 1).reshape(-1, 1)``, and the nodes in between."""
    if not is_tensor(column) or example(column).dim() != 2 or example(column).shape[1] != 1:
        return None
    turned, crossed = reshaped_from(view, column)
    bound = view.arguments_of(turned, "transpose", "t", "T", "mT")
    if bound is None or ("dim0" in bound and {bound["dim0"] % 2, bound["dim1"] % 2} != {0, 1}):
        return None
    scores = bound["input"]
    return (scores, {*crossed, turned}) if is_tensor(scores) and example(scores).dim() == 2 else None


def _routed(view: View, scores: fx.Node, gate: Gate, region: Any) -> Routed | None:
    """Return how scores are made, in the grad mode of ``region``: those that topk chose, sigmoid(-inf) for the others."""
    after, node = [], scores
    while view.name(node) in ("to", "float", "type_as", "bfloat16", "sigmoid"):
        after.append(node)
        node = node.args[0]  # type: ignore[assignment]
    scattered = view.arguments_of(node, "scatter")
    base = None if scattered is None else view.arguments_of(scattered["input"], "full_like")
    if scattered is None or base is None or scattered["dim"] not in (1, -1) or scattered["reduce"] is not None:
        return None
    if [view.name(n) for n in after].count("sigmoid") != 1 or base["fill_value"] != -math.inf:
        return None
    values, ids = scattered["src"], scattered["index"]
    if not all(isinstance(n, fx.Node) and n.target is operator.getitem for n in (values, ids)):
        return None
    call, chosen, k = values.args[0], view.arguments_of(values.args[0], "topk"), example(values).shape[1]
    if chosen is None or chosen["dim"] not in (1, -1) or (values.args, ids.args) != ((call, 0), (call, 1)):
        return None
    made = (*after, node, values, ids)
    if any(view.effects.region[n] != region or is_changed(view, n) for n in made) or not isinstance(k, int):
        return None
    return Routed(chosen["input"], values, ids, tuple(reversed(after)), gate, k)


def emit(editor: Editor, match: Match) -> None:
    root, routed = match.root, match.reading
    x, up, down = (match.inputs[name] for name in ("x", "up", "down"))
    with editor.graph.inserting_before(root):
        ids = editor.method("reshape", (routed.ids, -1), like=root)
        results = editor.call(moe_sort, (ids, example(up).shape[0]), like=root)
        _, perm, offsets = (editor.item(results, i, like=root) for i in range(3))
        inverse = editor.call(inverse_permutation, (perm,), like=root)
        scores = routed.values
        for node in routed.after:  # the chosen ones alone
            args = (scores, *node.args[1:])
            make = editor.method if node.op == "call_method" else editor.call
            scores = make(node.target, args, dict(node.kwargs), like=node)
        scale = editor.call(torch.index_select, (editor.method("reshape", (scores, -1), like=root), 0, perm), like=root)
        scale = editor.method("unsqueeze", (scale, -1), like=root)
        rows = editor.call(moe_dispatch, (x, perm, inverse, None, routed.k), like=root)
        rows = editor.cast(editor.call(torch.mul, (rows, scale), like=root), example(x).dtype, like=root)
        h = editor.call(moe_up, (rows, up, offsets), like=root)
        ones = editor.call(torch.ones_like, (scale,), {"requires_grad": False}, like=root)
        rows = editor.call(moe_down, (h, ones, down, offsets, *routed.gate.arguments), like=root)
        y = editor.call(moe_combine, (rows, perm, inverse, None, routed.k, None), like=root)
        editor.check([root], [y])
    editor.replace(root, y)


def guard(x, logits, up, down, k):
    if (reason := too_many_experts(k)) is not None:
        return reason
    dtypes = {x.dtype, up.dtype, down.dtype}
    if len(dtypes) > 1 or torch.is_autocast_enabled(device_type(x)):
        return "x and the experts are of several dtypes, or autocast casts them"
    if device_type(x) == "cuda" and x.dtype != torch.bfloat16:
        return f"x is {x.dtype}; grouped products take bfloat16"
    if not all(weight.is_contiguous() or weight.mT.is_contiguous() for weight in (up, down)):
        return "the weights of the experts have gaps"
    if not all(statically_known_true(size * x.dtype.itemsize % 16 == 0) for size in (*up.shape[1:], *down.shape[1:])):
        sizes = ", ".join(map(str, (up.shape[1], up.shape[2], down.shape[1])))
        return f"rows of {sizes} elements; grouped products take multiples of 16 bytes"
    if 2 * k > up.shape[0]:
        return f"{k} of {up.shape[0]} experts are chosen"
    return None


FUSION = Fusion(
    name="routed_experts",
    pattern=every_expert,
    inputs={"x": "t h", "logits": "t e", "up": "e h j", "down": "e i h"},
    variants=({"k": 1}, {"k": 2}),
    find=find,
    emit=emit,
    guard=guard,
    traffic=(  # a FLOP of a product takes as long as 0.007 bytes (H200), and each has two in its backward
        "2*e*h*(j + i)*bytes + 0.042*t*h*(j + i)",
        "(6*e*t*(h + i) + 2*e*h*(j + i))*bytes + 0.042*e*t*h*(j + i)",
    ),
    before=("swiglu", "geglu", "swish", "moe_combine", "moe_dispatch", "moe_sort"),
    cases=(
        case("one_token", t=1, e=4, h=8, j=16, i=8, bench=False),
        case("odd", t=19, e=6, h=16, j=48, i=24, bench=False),
        case("llama4_scout", t=8192, e=16, h=5120, j=16384, i=8192, statics={"k": 1}),
    ),
    source="Shazeer et al. 2017, arXiv:1701.06538",
)
