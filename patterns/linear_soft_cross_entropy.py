"""lm_head and a loss against distributions without a gradient -> kernels/linear_soft_cross_entropy.py: distillation.

The teacher's softmax is part of it where nothing else reads that. What the number gets of each row, a mask over tokens or a
mean, is read off the graph: it must be linear in the losses of rows, so that the gradients can be computed beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.size_hints import elements, expected
from fx_fusion.graph.terms import example
from fx_fusion.graph.view import View
from fx_fusion.kernels.linear_soft_cross_entropy import linear_soft_cross_entropy as op
from fx_fusion.patterns.sites.head import Head, head_of, linear_operands, sources_of_logits, why_small
from fx_fusion.patterns.sites.loss import LossSite, find_losses
from fx_fusion.patterns.sites.row_weights import (
    WeightedSum,
    divided,
    is_written,
    made_again,
    over_classes,
    weight_below,
    weighted_sum,
    weights_of_rows,
)
from fx_fusion.patterns.sites.rows import one_a_row, shaped_as
from fx_fusion.patterns.sites.soft_loss import SoftSite, find_soft_losses
from fx_fusion.rewrite.deferral import deferrable_outputs
from fx_fusion.rewrite.editor import Editor


def linear_then_divergence(x, lm_head, bias, values, kind, divergence, values_scale, scale):
    log_probs = F.log_softmax(F.linear(x, lm_head, bias).float() * scale, dim=-1)
    if kind == "logits":
        q = torch.softmax(values.float() * values_scale, dim=-1)
    else:
        q = values.float().exp() if kind == "log_probabilities" else values.float()
    if not divergence:
        return -(q * log_probs).sum(-1).mean()
    if kind == "log_probabilities":
        return F.kl_div(log_probs, values.float(), reduction="batchmean", log_target=True)
    return F.kl_div(log_probs, q, reduction="batchmean")


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    hard_losses = list(find_losses(view))
    for site in find_soft_losses(view):
        loss = site.as_loss()
        if site.total is None:
            reader = next(iter(site.terms.users), site.terms)
            reason = f"{reader.name} is no number that is linear in each row's loss: its gradients need all logits"
            yield NearMiss("linear_soft_cross_entropy", site.terms, reader, reason)
            continue
        head = head_of(view, loss, "linear_soft_cross_entropy")
        if isinstance(head, NearMiss):
            yield head
            continue
        if head.shards is not None or head.seen.softcap:
            what = "its classes lie on several ranks" if head.shards is not None else "its logits are capped"
            reason = f"{what}; that is fused for classes alone"
            yield NearMiss("linear_soft_cross_entropy", loss.root, head.seen.source, reason)
            continue
        q, hard = site.distribution, _hard_loss(view, site.total, head, hard_losses)
        root, nodes, chain = loss.root, {*loss.nodes, *head.chain}, head.chain
        if hard is not None:
            root, nodes, chain = hard.above.root, nodes | hard.nodes, [*chain, *hard.head.chain]
        deferred, inside = deferrable_outputs(search, chain, nodes, head.sources)
        yield Match(
            fusion="linear_soft_cross_entropy",
            outputs=(root,),
            nodes=frozenset((*nodes, *inside)),
            inputs={**head.inputs, "values": q.values},
            others={} if hard is None else {"target": hard.site.target},
            statics={"kind": q.kind, "divergence": site.divergence, "values_scale": q.scale, "scale": head.seen.scale},
            crossed=frozenset(q.crossed),
            deferred=deferred,
            unmade={"logits": head.seen.source},
            reading=(site, head, hard),
            note="" if hard is None else "with the cross-entropy of classes that is added to it",
        )


@dataclass
class _Hard:
    """A cross-entropy of the same logits that is added to the soft one, ``total`` of it; ``above``: of their sum. ``signs``:
    those of the soft one and of this one in the sum, which may be a difference."""

    site: LossSite
    head: Head
    total: WeightedSum
    above: WeightedSum
    signs: tuple[int, int]

    @property
    def nodes(self) -> set[fx.Node]:
        own = {*self.site.nodes, *self.head.chain, *self.total.nodes}
        return {*own, *self.above.nodes, *self.total.root.users}


def _hard_loss(view: View, soft: WeightedSum, head: Head, losses: list[LossSite]) -> _Hard | None:
    """The cross-entropy of the logits that ``head`` makes too, if the two are added."""
    (both,) = soft.root.users if len(soft.root.users) == 1 else (None,)
    term = None if both is None else view.term(both)
    if both is None or term is None or term.op not in ("add", "sub") or len(term.nodes) > 1:
        return None
    signs = dict(zip(term.operands, (1, 1 if term.op == "add" else -1), strict=True))
    for site in losses:
        total = weighted_sum(view, site.root)
        if total is None or {total.root, soft.root} != signs.keys() or len(total.root.users) != 1:
            continue
        found = head_of(view, site, "linear_soft_cross_entropy")
        same = not isinstance(found, NearMiss) and _made_by(found) == _made_by(head)
        above = weighted_sum(view, both)
        plain = site.weight is None and not site.label_smoothing
        if above is not None and any(is_written(view, t.rows, above.root, t.others) for t in (soft, total)):
            continue
        if isinstance(found, NearMiss) or not same or not plain or above is None or found.seen.softcap:
            continue
        return _Hard(site, found, total, above, (signs[soft.root], signs[total.root]))
    return None


def _made_by(head: Head) -> tuple[Any, ...]:
    """Return what two losses of the same logits share."""
    return head.seen.source, head.seen.row_slices, head.seen.classes, head.bias


def emit(editor: Editor, match: Match) -> None:
    site, head, hard = match.reading
    root, statics = match.root, match.statics
    grad = editor.view.effects.region[head.seen.source][0]
    needs = [bool(grad and n is not None and example(n).requires_grad) for n in (head.x, head.lm_head, head.bias)]
    with editor.graph.inserting_before(root):
        x, lm_head, bias = linear_operands(editor, head)
        alike = editor.method("select", (x, 1, 0), like=root)
        first = None if hard is None else weight_below(editor, hard.above, alike, root)
        weights = weights_of_rows(
            editor, site.total, alike, root, of_classes=site.of_classes, divisors=site.divisors, first=first
        )  # fmt: skip
        weights = _signed(editor, weights, site.sign * (1 if hard is None else hard.signs[0]), root)
        given: tuple[Any, ...] = (
            x, lm_head, bias, match.inputs["values"], weights, statics["kind"], statics["divergence"],
            float(statics["values_scale"]), float(statics["scale"]), needs, editor.saves_memory,
        )  # fmt: skip
        if hard is None:
            call = editor.call(op, given, like=root)
            loss = _soft_number(editor, site, editor.item(call, 0, like=root), root)
        else:
            of_hard = _hard_operands(editor, hard, alike, first, root)
            call = editor.call(op, (*given, *of_hard, float(hard.head.seen.scale)), like=root)
            soft = _soft_number(editor, site, editor.item(call, 0, like=root), root)
            loss = _with_hard_number(editor, hard, soft, editor.item(call, 1, like=root), of_hard[0], root)
        loss = editor.cast(loss, example(root).dtype, like=root)
        sources = sources_of_logits(editor, head, match)
        editor.replace(root, loss)
    editor.defer(match.deferred, sources, like=head.seen.source)
    editor.erase([*match.nodes, *match.crossed])


def _signed(editor: Editor, node: fx.Node, sign: int, like: fx.Node) -> fx.Node:
    return node if sign > 0 else editor.method("neg", (node,), like=like)


def _soft_number(editor: Editor, site: SoftSite, rows: fx.Node, like: fx.Node) -> fx.Node:
    """The number that the graph makes of the terms, from one soft loss (m) a row."""
    assert site.total is not None
    rows = _signed(editor, rows, site.sign, like)
    if site.of_classes:
        value, start = over_classes(editor, site.total, rows, like)
        return made_again(editor, site.total, value, start)
    if example(site.terms).dim() == 0:
        rows = divided(editor, editor.method("sum", (rows,), like=like), site.divisors, rows, like)
    return made_again(editor, site.total, rows)


def _hard_operands(editor: Editor, hard: _Hard, alike: fx.Node, first: fx.Node | None, like: fx.Node) -> tuple[fx.Node, ...]:
    """The classes (m) of rows, and the weights (m) of their losses, 0 where a class is ignored."""
    site = hard.site
    target = one_a_row(editor, site)
    weights = weights_of_rows(editor, hard.total, alike, like, first=first)
    weights = _signed(editor, weights, site.sign * hard.signs[1], like)
    if site.reduction == "mean":
        weights = editor.call(torch.div, (weights, _number_of(editor, target, site, like)), like=like)
    ignored = editor.call(torch.eq, (target, site.ignore_index), like=like)
    return target, editor.call(torch.where, (ignored, 0.0, weights), like=like)


def _with_hard_number(
    editor: Editor, hard: _Hard, soft: fx.Node, rows: fx.Node, target: fx.Node, like: fx.Node
) -> fx.Node:  # fmt: skip
    """The number above the sum of both, from the soft one and one hard loss (m) a row."""
    site = hard.site
    value = _signed(editor, rows, site.sign, like)
    if site.reduction == "none":
        value = shaped_as(editor, value, site, site.root)
    else:
        value = editor.method("sum", (value,), like=like)
    if site.reduction == "mean":
        value = editor.call(torch.div, (value, _number_of(editor, target, site, like)), like=like)
    value = made_again(editor, hard.total, value)
    soft, value = (_signed(editor, n, sign, like) for n, sign in zip((soft, value), hard.signs, strict=True))
    return made_again(editor, hard.above, editor.call(torch.add, (soft, value), like=like))


def _number_of(editor: Editor, target: fx.Node, site: LossSite, like: fx.Node) -> fx.Node:
    return editor.method("sum", (editor.call(torch.ne, (target, site.ignore_index), like=like),), like=like)


def guard(x, lm_head, bias, values, kind, divergence, values_scale, scale):
    if torch.float16 in (x.dtype, lm_head.dtype):
        return "a gradient of soft targets could underflow in float16; bfloat16 and float32 are fused"
    return wrong_dtype(x=x, lm_head=lm_head)


def why_keep(x, lm_head, bias, values, kind, divergence, values_scale, scale):
    return why_small(x, lm_head, elements(values) / max(expected(values.shape[-1]), 1))


FUSION = Fusion(
    name="linear_soft_cross_entropy",
    instead="F.kl_div(F.log_softmax(F.linear(x, weight), -1), probabilities, reduction='batchmean')",
    pattern=linear_then_divergence,
    inputs={"x": "m h", "lm_head": "v h", "bias": "(v)", "values": "m v"},
    frozen=("values",),
    positive=("values",),
    variants=tuple(
        {"kind": kind, "divergence": divergence, "values_scale": values_scale, "scale": scale, **rest}
        for kind, divergence, values_scale, scale, rest in (
            ("logits", True, 1.0, 1.0, {"bias": None}),
            ("logits", False, 0.5, 0.5, {}),
            ("probabilities", True, 1.0, 0.5, {"bias": None}),
            ("probabilities", False, 1.0, 1.0, {"bias": None}),
            ("log_probabilities", True, 1.0, 1.0, {}),
        )
    ),
    find=find,
    of_logits=True,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    before=("linear_cross_entropy", "linear_rows", "cross_entropy"),
    on_cpu=True,
    cases=(
        case("one_element", m=1, h=1, v=1, bench=False),
        case("odd", m=37, h=19, v=781, bench=False),
        case("chunks", m=40, h=16, v=8500, bench=False),
        case("llama_1b", m=8192, h=2048, v=128256),
        case("qwen", m=4096, h=1024, v=151936),
    ),
    source="Hinton et al. 2015, arXiv:1503.02531; gradient in the forward, in chunks, as linear_cross_entropy",
)
