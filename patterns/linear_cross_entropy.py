"""lm_head and loss together, with everything that models write between them -> kernels/linear_cross_entropy.py.

The logits that the model returns beside the loss are *deferred*: they are computed when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.size_hints import elements
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy as op
from fx_fusion.ops.shards import replicated_beside
from fx_fusion.patterns.sites.entropy import entropy_of
from fx_fusion.patterns.sites.head import head_of, leave_to_linear_rows, operands, sources_of_logits, why_again, why_small
from fx_fusion.patterns.sites.loss import find_losses
from fx_fusion.patterns.sites.row_weights import made_again, weighted_sum, weights_of_rows
from fx_fusion.patterns.sites.rows import shaped_as
from fx_fusion.patterns.sites.z_loss import ZLoss, z_loss_of
from fx_fusion.rewrite.deferral import deferrable_outputs, sharing_memory
from fx_fusion.rewrite.editor import Editor


def linear_then_loss(
    x, lm_head, bias, target, weight, count, reduction, ignore_index, label_smoothing, softcap, scale, z_loss, z_over
):  # fmt: skip
    logits = F.linear(x, lm_head, bias)
    z = logits.float() * scale if scale != 1 else logits.float()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    w = None if weight is None else weight.float()
    loss = F.cross_entropy(z, target, w, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    loss = loss if count is None else loss / count
    if not z_loss:
        return loss
    counts = target != ignore_index
    squares = z_loss * torch.logsumexp(z, -1).square()
    squares = squares if z_over == "all" else squares * counts
    if reduction == "mean":
        return loss + squares.sum() / (counts.sum() if z_over == "count" else len(target))
    squares = squares.sum() if reduction == "sum" else squares
    return loss + (squares if count is None else squares / count)


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for site in find_losses(view):
        if entropy_of(view, site) is not None:
            continue  # the entropy shares these logits: token_log_probs fuses both
        head = head_of(view, site, "linear_cross_entropy")
        if isinstance(head, NearMiss):
            yield head
            continue
        z_loss = z_loss_of(view, site)
        if isinstance(z_loss, ZLoss):
            site = replace(site, root=z_loss.root, nodes={*site.nodes, *z_loss.nodes})
            if example(head.seen.source).dtype == torch.float16:
                z_loss = "the gradient of a z-loss could overflow in float16; bfloat16 and float32 are fused"
        count = None
        if site.reduction == "sum" and head.shards is None and (division := _division(view, site.root)) is not None:
            count = division[1]
            site = replace(site, root=division[0], nodes={*site.nodes, division[0]})
        if isinstance(z_loss, str):
            yield NearMiss("linear_cross_entropy", site.root, head.seen.source, z_loss)
            continue
        total = weighted_sum(view, site.root) if site.reduction == "none" and head.shards is None else None
        root, summed = (site.root, []) if total is None else (total.root, total.nodes)
        given, chain = head.inputs, head.chain
        to_logits = [*head.above, *chain]
        deferred, inside = (), ()  # a DTensor is not deferred
        if head.shards is None or not head.shards.scattered:
            deferred, inside = deferrable_outputs(search, to_logits, {*site.nodes, *summed, *to_logits}, head.sources)
        inputs = {**given, "target": site.target}
        if site.weight is not None:
            inputs["weight"] = site.weight
        if count is not None:
            inputs["count"] = count
        yield Match(
            fusion="linear_cross_entropy",
            outputs=(root,),
            nodes=frozenset((*site.nodes, *summed, *chain, *inside)),
            inputs=inputs,
            statics={
                "reduction": site.reduction if total is None else "sum",
                "ignore_index": site.ignore_index,
                "label_smoothing": site.label_smoothing,
                "softcap": head.seen.softcap,
                "scale": head.seen.scale,
                "z_loss": 0.0 if z_loss is None else z_loss.factor,
                "z_over": "" if z_loss is None else z_loss.over,
            },
            deferred=deferred,
            unmade={"logits": head.seen.source},
            sharded=frozenset() if head.shards is None else frozenset(given),
            reading=(site, head, total),
        )


def _division(view: View, total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The division of a sum of losses by one number in a tensor, as Trainer's ``num_items_in_batch``, and that number."""
    (node,) = total.users if len(total.users) == 1 else (None,)
    bound = None if node is None else view.arguments_of(node, "div")
    if bound is None or bound["input"] is not total or bound["rounding_mode"] is not None or not is_tensor(bound["other"]):
        return None
    number, loss, quotient = (example(n) for n in (bound["other"], total, node))
    alike = number.dim() == loss.dim() == 0 and number.device == loss.device and quotient.dtype == loss.dtype
    if not alike or number.requires_grad or view.effects.region[node] != view.effects.region[total]:
        return None
    return node, bound["other"]


def emit(editor: Editor, match: Match) -> None:
    site, head, total = match.reading
    root, seen = match.root, head.seen
    if site.reduction == "none" and total is None and head.shards is None:
        leave_to_linear_rows(editor, match)
    grad = editor.view.effects.region[seen.source][0]
    needs = [bool(grad and n is not None and example(n).requires_grad) for n in (head.x, head.lm_head, head.bias)]
    can_compute = _hands_out_logits(editor, match)
    computes = can_compute and editor.outputs_are_read
    with editor.graph.inserting_before(root):
        x, lm_head, bias, target = operands(editor, head, site)
        more: dict[str, Any] = {}
        if total is not None:
            weights = weights_of_rows(editor, total, target, root)
            uncounted = editor.call(torch.eq, (weights, 0), like=root)
            target = editor.call(torch.where, (uncounted, site.ignore_index, target), like=root)
            more["row_weights"] = weights if site.sign > 0 else editor.method("neg", (weights,), like=root)
        options: tuple[Any, ...] = (
            site.reduction, site.ignore_index, site.label_smoothing, seen.softcap, seen.scale, needs, computes,
            editor.saves_memory, *(() if head.shards is None else head.shards.part),
        )  # fmt: skip
        more |= {name: match.statics[name] for name in ("z_loss", "z_over")} if match.statics["z_loss"] else {}
        if "count" in match.inputs:
            more["count"] = match.inputs["count"]
        call = editor.call(op, (x, lm_head, bias, target, site.weight, *options), more, like=root)
        loss = editor.item(call, 0, like=root)
        if site.sign < 0:
            loss = editor.method("neg", (loss,), like=root)
        if site.reduction == "none":
            loss = shaped_as(editor, loss, site, site.root)
        if total is not None:
            loss = made_again(editor, total, loss)
        loss = editor.cast(loss, example(root).dtype, like=root)
        if head.shards is not None and head.shards.scattered:
            loss = editor.call(replicated_beside, (loss, head.lm_head), like=root)
        sources = sources_of_logits(editor, head, match)
        editor.replace(root, loss)
        if computes:
            logits = editor.item(call, 5, like=root)
            logits = editor.method("view", (logits, *example(seen.source).shape), like=root)
            editor.compute(match.deferred, head.sources, seen.source, logits)
    if not computes:
        editor.defer(match.deferred, sources, like=seen.source, can_compute=can_compute)


def _hands_out_logits(editor: Editor, match: Match) -> bool:
    """Return True if the op can hand out the logits that outputs are made of: all rows of a linear layer as it is written,
    where nothing changes the grad mode before the loss, and outputs that share no memory."""
    site, head, _ = match.reading
    region = editor.view.effects.region
    apart = len(sharing_memory(match.deferred)) == len(match.deferred)
    seen = head.seen
    plain = seen.bias is None and seen.classes is None and not seen.row_slices and head.shards is None
    return bool(match.deferred) and apart and plain and region[head.seen.source] == region[site.root]


def guard(
    x, lm_head, bias, target, weight, count, reduction, ignore_index, label_smoothing, softcap, scale, z_loss=0.0, z_over=""
):  # fmt: skip
    return wrong_dtype(x=x, lm_head=lm_head)


def why_keep(
    x, lm_head, bias, target, weight, count, reduction, ignore_index, label_smoothing, softcap, scale, z_loss=0.0, z_over=""
):  # fmt: skip
    return why_small(x, lm_head, elements(target)) or (why_again(x, lm_head, bias) if reduction == "none" else None)


FUSION = Fusion(
    name="linear_cross_entropy",
    instead="F.cross_entropy(F.linear(x, weight), target)",
    pattern=linear_then_loss,
    inputs={"x": "m h", "lm_head": "v h", "bias": "(v)", "target": "m", "weight": "v", "count": ""},
    integers={"target": "v"},
    ignored={"target": "ignore_index"},
    frozen=("weight", "count"),
    positive=("weight", "count"),
    variants=tuple(
        {
            "reduction": reduction,
            "ignore_index": -100,
            "label_smoothing": smoothing,
            "softcap": softcap,
            "scale": scale,
            "z_loss": 0.0,
            "z_over": "",
            **rest,
        }
        for reduction, smoothing, softcap, scale, rest in (
            ("mean", 0.0, 0.0, 1.0, {"bias": None, "weight": None, "count": None}),
            ("sum", 0.1, 0.0, 1.0, {"weight": None}),
            ("none", 0.0, 30.0, 0.5, {"bias": None, "weight": None, "count": None}),
            ("mean", 0.1, 30.0, 0.5, {"count": None}),
        )
    ),
    find=find,
    of_logits=True,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    before=("linear_rows", "cross_entropy"),
    on_cpu=True,
    cases=(
        case("one_element", m=1, h=1, v=1, bench=False),
        case("odd", m=37, h=19, v=781, bench=False),
        case("chunks", m=40, h=16, v=8500, bench=False),
        case("llama_1b", m=16384, h=2048, v=128256),
        case("llama_8b", m=8192, h=4096, v=128256),
        case("llama_2", m=16384, h=4096, v=32000),
    ),
    source="Malek 2024, github.com/mgmalek/efficient_cross_entropy (gradient in the forward)",
)
