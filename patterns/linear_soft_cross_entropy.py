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
from fx_fusion.patterns.sites.row_weights import WeightedSum, weight_below, weighted_sum, weights_of_rows
from fx_fusion.patterns.sites.rows import one_a_row
from fx_fusion.patterns.sites.soft_loss import find_soft_losses
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
        root, nodes, others, chain = loss.root, {*loss.nodes, *head.chain}, [*site.total.others], head.chain
        if hard is not None:
            root, nodes, others = hard.above.root, nodes | hard.nodes, [*others, *hard.others]
            chain = [*chain, *hard.head.chain]
        deferred, inside = deferrable_outputs(search, chain, nodes, head.sources)
        yield Match(
            fusion="linear_soft_cross_entropy",
            outputs=(root,),
            nodes=frozenset((*nodes, *inside)),
            inputs={**head.inputs, "values": q.values},
            others={f"other_{i}": node for i, node in enumerate(others)},
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

    @property
    def others(self) -> list[fx.Node]:
        return [self.site.target, *self.total.others, *self.above.others]


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
        same = not isinstance(found, NearMiss) and (found.seen.source, found.seen.row_slices, found.bias) == (
            head.seen.source, head.seen.row_slices, head.bias
        )  # fmt: skip
        above = weighted_sum(view, both)
        plain = site.weight is None and not site.label_smoothing
        if isinstance(found, NearMiss) or not same or not plain or above is None or found.seen.softcap or found.seen.classes:
            continue
        return _Hard(site, found, total, above, (signs[soft.root], signs[total.root]))
    return None


def emit(editor: Editor, match: Match) -> None:
    site, head, hard = match.reading
    root, statics = match.root, match.statics
    grad = editor.view.effects.region[head.seen.source][0]
    needs = [bool(grad and n is not None and example(n).requires_grad) for n in (head.x, head.lm_head, head.bias)]
    with editor.graph.inserting_before(root):
        x, lm_head, bias = linear_operands(editor, head)
        alike = editor.method("select", (x, 1, 0), like=root)
        first = None if hard is None else weight_below(editor, hard.above, root)
        weights = weights_of_rows(
            editor, site.total, site.terms, alike, root, of_classes=site.of_classes, divisors=site.divisors, first=first
        )  # fmt: skip
        sign = site.sign * (1 if hard is None else hard.signs[0])
        weights = weights if sign > 0 else editor.method("neg", (weights,), like=root)
        given: tuple[Any, ...] = (
            x, lm_head, bias, match.inputs["values"], weights, statics["kind"], statics["divergence"],
            float(statics["values_scale"]), float(statics["scale"]), needs, editor.saves_memory,
        )  # fmt: skip
        count = None
        if hard is not None:
            target, of_hard, count = _hard_weights(editor, hard, alike, first, root)
            given = (*given, target, of_hard, float(hard.head.seen.scale))
        loss = editor.item(editor.call(op, given, like=root), 0, like=root)
        if count is not None:  # PyTorch's mean over no class is 0 / 0
            none = editor.call(torch.eq, (count, 0), like=root)
            loss = editor.call(torch.add, (loss, editor.call(torch.where, (none, float("nan"), 0.0), like=root)), like=root)
        loss = editor.cast(loss, example(root).dtype, like=root)
        sources = sources_of_logits(editor, head, match)
        editor.replace(root, loss)
    editor.defer(match.deferred, sources, like=head.seen.source)
    editor.erase([*match.nodes, *match.crossed])


def _hard_weights(editor: Editor, hard: _Hard, alike: fx.Node, first: fx.Node | None, like: fx.Node) -> tuple[Any, ...]:
    """The classes (m) of rows, the weights (m) of their losses, 0 where a class is ignored; under a mean the number of those
    that are not."""
    site, count = hard.site, None
    target = one_a_row(editor, site)
    weights = weights_of_rows(editor, hard.total, site.root, alike, like, first=first)
    weights = weights if site.sign * hard.signs[1] > 0 else editor.method("neg", (weights,), like=like)
    ignored = editor.call(torch.eq, (target, site.ignore_index), like=like)
    if site.reduction == "mean":
        count = editor.method("sum", (editor.call(torch.ne, (target, site.ignore_index), like=like),), like=like)
        weights = editor.call(torch.div, (weights, count), like=like)
    return target, editor.call(torch.where, (ignored, 0.0, weights), like=like), count


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
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    before=("linear_cross_entropy", "cross_entropy"),
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
