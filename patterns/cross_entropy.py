"""Cross-entropy of logits that exist anyway -> kernels/cross_entropy.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.size_hints import expected, too_small
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.cross_entropy import cross_entropy
from fx_fusion.patterns.sites.entropy import losses_with_entropy
from fx_fusion.patterns.sites.log_probs import is_indexed, one_hot_of
from fx_fusion.patterns.sites.loss import LossSite, find_losses, read_logits, slice_below
from fx_fusion.patterns.sites.rows import rows_of, shaped_as
from fx_fusion.patterns.sites.soft_loss import find_soft_losses
from fx_fusion.rewrite.editor import Editor


def softcapped_cross_entropy(logits, target, weight, ignore_index, label_smoothing, softcap, scale):
    """One loss a row, float32."""
    z = logits.float() * scale if scale != 1 else logits.float()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    w = None if weight is None else weight.float()
    return F.cross_entropy(z, target, w, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for site in find_losses(view):
        seen = read_logits(view, site, to_linear=False)
        if (reason := slice_below(view, seen)) is not None:
            yield NearMiss("cross_entropy", site.root, seen.source, reason)
            continue
        inputs = {"logits": seen.source, "target": site.target}
        if site.weight is not None:
            inputs["weight"] = site.weight
        statics = {
            "ignore_index": site.ignore_index,
            "label_smoothing": site.label_smoothing,
            "softcap": seen.softcap,
            "scale": seen.scale,
        }
        yield Match(
            fusion="cross_entropy",
            outputs=(site.root,),
            nodes=frozenset((*site.nodes, *seen.nodes)),
            inputs=inputs,
            statics=statics,
            reading=site,
        )


_LOSSES = ("cross_entropy", "nll_loss", "kl_div", "log")
_FEWEST_CLASSES = 4096


def unread(view: View) -> Iterator[NearMiss]:
    """Losses in other words."""
    known = {node for site in find_losses(view) for node in site.nodes}
    known |= {node for site in find_soft_losses(view) for node in site.nodes}
    for node in view.graph.nodes:
        name = view.name(node)
        if node not in known and is_indexed(view, node):
            reason = "rows and classes are picked in pairs; the kernel takes arange(rows) and int64 classes, one a row"
            yield NearMiss("cross_entropy", node, node, reason)
        if node not in known and name == "log_softmax" and (read := _read_otherwise(view, node)) is not None:
            yield NearMiss("cross_entropy", node, node, read)
        if node in known or name not in _LOSSES:
            continue
        bound = view.arguments(node)
        if bound is None or not is_tensor(bound["input"]):
            reason = f"{name} is called in an unusual way"
        elif name == "log":
            if inner_term(view, bound["input"], "softmax") is None:
                continue
            reason = "log(softmax(x)) is -inf where log_softmax(x) is not; write log_softmax"
        elif name == "kl_div":
            reason = "the divergence is read of log_softmax(logits) from a tensor of its shape that has no gradient"
        elif any(isinstance(bound.get(number), fx.Node) for number in ("ignore_index", "label_smoothing")):
            reason = "ignore_index or label_smoothing changes between calls; the kernel takes constants"
        elif one_hot_of(view, bound["target"]) is not None and bound["weight"] is not None:
            reason = "one_hot(...) beside class weights is not read; hand over the classes"
        elif is_tensor(bound["target"]) and example(bound["target"]).is_floating_point():
            reason = "targets that are probabilities are read beside (rows, classes), without weights or smoothing"
        elif name == "nll_loss":
            reason = f"{bound['input'].name} is no log_softmax over the last dim, or one in float64"
        else:
            sizes = tuple(example(bound["input"]).shape)
            reason = f"logits of shape {sizes} are read as (rows, classes), or (batch, length, classes) transposed"
        yield NearMiss("cross_entropy", node, node, reason)


def _read_otherwise(view: View, log_probs: fx.Node) -> str | None:
    """Return why log-probabilities over many classes are no part of a loss that is read; None where something else says
    so."""
    large = example(log_probs).requires_grad and expected(example(log_probs).shape[-1]) >= _FEWEST_CLASSES
    readers = [user for user in log_probs.users if user.op != "output"]
    if not large or view.term(log_probs).attrs != (-1,) or not readers or any(view.name(u) in _LOSSES for u in readers):
        return None
    if any(log_probs in together.nodes for _, _, together in losses_with_entropy(view)):
        return None
    names = ", ".join(user.name for user in readers)
    return f"{names} reads all log-probabilities; fused are those of one class a row: log_probs.gather(-1, y[..., None])"


def emit(editor: Editor, match: Match) -> None:
    """The op gives a loss a row; the reduction is left to Inductor (m numbers)."""
    site: LossSite = match.reading
    root = site.root
    with editor.graph.inserting_before(root):
        logits, target = rows_of(editor, match.inputs["logits"], match.reading)
        statics = {**match.statics, "weight": site.weight}
        arguments = (logits, target, *(statics[name] for name in cross_entropy.parameters[2:]))
        op = editor.call(cross_entropy.overload, arguments, like=root)
        editor.replace(root, reduced(editor, site, editor.item(op, 0, like=root), target))


def reduced(editor: Editor, site: LossSite, loss, target):
    """Losses of rows (float32) -> what the root returns: reduction, sign, dtype, shape."""
    root = site.root
    if site.reduction == "sum":
        loss = editor.method("sum", (loss,), like=root)
    elif site.reduction == "mean":
        total = editor.method("sum", (loss,), like=root)
        counts = editor.call(torch.ne, (target, site.ignore_index), like=root)
        if site.weight is None:
            divisor = editor.method("sum", (counts,), like=root)
        else:
            safe = editor.call(torch.where, (counts, target, 0), like=root)
            weights = editor.call(torch.index_select, (site.weight, 0, safe), like=root)
            weights = editor.method("float", (weights,), like=root)
            divisor = editor.method("sum", (editor.call(torch.where, (counts, weights, 0.0), like=root),), like=root)
        loss = editor.call(torch.div, (total, divisor), like=root)
    if site.sign < 0:
        loss = editor.method("neg", (loss,), like=root)
    if site.reduction == "none":
        loss = shaped_as(editor, loss, site, root)
    return editor.cast(loss, example(root).dtype, like=root)


def guard(logits, target, weight, ignore_index, label_smoothing, softcap, scale):
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"logits are {logits.dtype}; the kernel takes float32, bfloat16 and float16"
    return None


def why_keep(logits, target, weight, ignore_index, label_smoothing, softcap, scale):
    if expected(logits.shape[-1]) < _FEWEST_CLASSES:
        return f"{logits.shape[-1]} classes: Inductor's kernels are as good below 4096"
    return too_small(logits)


FUSION = Fusion(
    name="cross_entropy",
    instead="F.cross_entropy(logits, target)",
    pattern=softcapped_cross_entropy,
    inputs={"logits": "m v", "target": "m", "weight": "v"},
    integers={"target": "v"},
    ignored={"target": "ignore_index"},
    frozen=("weight",),
    positive=("weight",),
    variants=tuple(
        {"ignore_index": -100, "label_smoothing": smoothing, "softcap": softcap, "scale": scale, **weight}
        for smoothing, softcap, scale, weight in (
            (0.0, 0.0, 1.0, {"weight": None}),
            (0.1, 0.0, 1.0, {"weight": None}),
            (0.0, 30.0, 0.5, {"weight": None}),
            (0.1, 30.0, 0.5, {}),
        )
    ),
    kernel=cross_entropy,
    find=find,
    of_logits=True,
    unread=unread,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    traffic=("3*m*v*bytes", "4*m*v*bytes"),
    cases=(
        case("one_element", m=1, v=1, bench=False),
        case("odd", m=5, v=781, bench=False),
        case("long", m=3, v=20001, bench=False),
        case("llama_3", m=8192, v=128256),
        case("llama_2", m=16384, v=32000),
        case("short", m=1024, v=128256),
    ),
    source="Milakov and Gimelshein 2018, arXiv:1805.02867",
)
