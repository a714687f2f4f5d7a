"""Find where a graph computes a cross-entropy, and what its logits are made of.

A loss has too many independent options (bias, scale, softcap, cast, shift, reduction, smoothing, weights, three
spellings) for one function an option set, so it is read from the loss down: first the loss itself, then, one step at
a time, what lies between it and the lm_head. Both loss fusions start here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.linear import linear_of
from fx_fusion.graph.terms import Term, example, is_tensor, over_last_dim, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import source_of
from fx_fusion.kernels.logits.logit_rows import NO_IGNORE
from fx_fusion.patterns.sites.log_probs import logits_of, one_hot_of, picked
from fx_fusion.patterns.sites.row_choices import below_a_choice_of_rows, below_a_slice_of_classes, with_one_class


@dataclass
class LossSite:
    """One cross-entropy.

    ``root`` is what gets replaced: a loss as ``F.cross_entropy`` returns it times ``sign``; for the gather spelling
    without a reduction, the gathered log-probabilities themselves (``sign`` -1, trailing dim 1).
    """

    root: fx.Node
    logits: fx.Node
    target: fx.Node
    weight: fx.Node | None
    reduction: str
    ignore_index: int
    label_smoothing: float
    nodes: set[fx.Node]
    sign: int = 1
    gathered: bool = False
    unreduced: LossSite | None = None  # the log-probabilities that a mean or sum is of
    from_end: bool = False  # a target below 0 counts from the end


@dataclass
class Logits:
    """The steps to the logits of a site: steps from the loss downwards, as far as they are understood."""

    source: fx.Node  # the node that the steps end at
    nodes: list[fx.Node] = field(default_factory=list)  # the steps, from the loss down
    row_slices: list[fx.Node] = field(default_factory=list)  # choices and orders of rows, from the loss down
    softcap: float = 0.0
    scale: float = 1.0
    bias: fx.Node | None = None
    classes: int | None = None  # the first so many alone, of a vocabulary that was padded
    stopped: str = ""  # why it goes no deeper


def find_losses(view: View) -> Iterator[LossSite]:
    """Every cross-entropy of a graph, whatever its spelling."""
    for node in view.graph.nodes:
        name = view.name(node)
        if name in ("cross_entropy", "nll_loss"):
            site = _of_call(view, node, name)
        elif name == "sub":
            site = _of_difference(view, node)
        else:
            site = _of_picked(view, node)
        if site is not None:
            yield site


def _of_call(view: View, node: fx.Node, name: str) -> LossSite | None:
    bound = view.arguments(node)
    if bound is None or bound["size_average"] is not None or bound["reduce"] is not None:
        return None
    if not isinstance(bound["ignore_index"], int) or bound["reduction"] not in ("mean", "sum", "none"):
        return None
    target, weight, ignored, nodes = bound["target"], bound["weight"], bound["ignore_index"], {node}
    logits = _classes_last(view, bound["input"], nodes)
    if name == "cross_entropy" and weight is None and (hot := one_hot_of(view, target)) is not None:
        if logits is None or not same_shape(example(target), example(bound["input"])) or logits is not bound["input"]:
            return None
        target, ignored = hot[0], NO_IGNORE  # the mean is over all rows
        nodes.update(hot[1])
    if logits is None or not is_tensor(target) or example(target).dim() != example(logits).dim() - 1:
        return None
    if example(target).dim() > 1 and not same_shape(example(logits)[..., 0], example(target)):
        return None
    if example(target).dtype != torch.int64:
        return None
    if name == "nll_loss":
        inner = logits_of(view, logits)
        if inner is None:
            return None
        nodes.update(inner[1])
        logits = inner[0]
    smoothing = bound.get("label_smoothing", 0.0)
    if not isinstance(smoothing, (int, float)):
        return None
    smoothing = float(smoothing) if smoothing > 0 else 0.0  # as torch has it: what is negative, or NaN, smooths nothing
    return LossSite(node, logits, target, weight, bound["reduction"], ignored, smoothing, nodes)


def _classes_last(view: View, logits: Any, nodes: set[fx.Node]) -> fx.Node | None:
    """Logits (classes), (rows, classes), or (batch, length, classes) behind the transposition that ``F.cross_entropy``
    wants, whose nodes are added; None for others."""
    if not is_tensor(logits) or example(logits).dim() not in (1, 2, 3):
        return None
    if example(logits).dim() < 3:
        return logits
    term = view.term(logits)
    if (term.op, term.attrs) not in (("transpose", (-2, -1)), ("permute", (-3, -1, -2))):
        return None
    nodes.update(term.nodes)
    return term.operands[0]


def _of_picked(view: View, node: fx.Node) -> LossSite | None:
    """A class picked of each row of log-probabilities, and what is done with it as far as it is -, mean or sum."""
    chosen = picked(view, node)
    inner = None if chosen is None else logits_of(view, chosen.source)
    if chosen is None or inner is None:
        return None
    nodes = {*chosen.nodes, *inner[1]}
    if chosen.summed:
        site = LossSite(node, inner[0], chosen.target, None, "sum", NO_IGNORE, 0.0, nodes, -1)
        return _negated(view, site)
    site = LossSite(node, inner[0], chosen.target, None, "none", NO_IGNORE, 0.0, nodes, -1, True, from_end=chosen.from_end)
    return _reduced(view, site)


def _reduced(view: View, site: LossSite) -> LossSite:
    """The site with the mean or the sum that is taken of it alone, and its sign."""
    path: list[fx.Node] = []
    sign, above = site.sign, site.root
    while len(above.users) == 1:
        below, above = above, next(iter(above.users))
        path.append(above)
        term = view.term(above)
        is_view = view.name(above) in ("view", "reshape", "flatten", "squeeze") and source_of(above) is below
        if term.op == "neg" or is_view:  # other.view_as(below) is none of it
            sign = -sign if term.op == "neg" else sign
            continue
        if term.op in ("mean", "sum") and example(above).dim() == 0:
            nodes = {*site.nodes, *path}
            return _negated(view, replace(
                site, root=above, reduction=term.op, sign=sign, gathered=False, nodes=nodes, unreduced=site
            ))  # fmt: skip
        break
    return site


def _negated(view: View, site: LossSite) -> LossSite:
    """The site with the minus behind it, if there is one."""
    above = next(iter(site.root.users)) if len(site.root.users) == 1 else None
    if above is not None and view.term(above).op == "neg":
        site.root, site.sign = above, -site.sign
        site.nodes.add(above)
    return site


def _of_difference(view: View, node: fx.Node) -> LossSite | None:
    """``l.gather(-1, t.unsqueeze(-1)).squeeze(-1) - l.logsumexp(-1)``, or the other way round: log-probabilities without a
    log_softmax."""
    term = view.term(node)
    if term.op != "sub" or not all(isinstance(o, fx.Node) and is_tensor(o) for o in term.operands):
        return None
    for squeezed, total, sign in ((*term.operands, -1), (*term.operands[::-1], 1)):
        bound = view.arguments_of(total, "logsumexp")
        found = picked(view, with_one_class(view, squeezed))
        if bound is None or found is None or found.summed or bound["input"] is not found.source:
            continue
        if not over_last_dim(bound["dim"], found.source) or example(squeezed).dim() != example(total).dim():
            continue
        if not same_shape(example(node), example(squeezed)) or not same_shape(example(node), example(total)):
            continue
        nodes = {node, squeezed, *found.nodes, total}
        site = LossSite(node, found.source, found.target, None, "none", NO_IGNORE, 0.0, nodes, sign, True)
        return _reduced(view, replace(site, from_end=found.from_end))
    return None


def read_logits(view: View, site: LossSite, *, to_linear: bool) -> Logits:
    """Follow the logits down. Without ``to_linear``: only through values that nothing else uses, and not through slices."""
    seen = Logits(site.logits)
    inside = set(site.nodes)
    while True:
        node = seen.source
        if not to_linear and any(user not in inside for user in node.users):
            seen.stopped = f"{node.name} is also used outside the loss"
            return seen
        step = _step(view, node, seen, to_linear)
        if step is None:
            return seen
        below, crossed = step
        seen.nodes.extend(crossed)
        inside.update(crossed)
        seen.source = below


def slice_below(view: View, seen: Logits) -> str | None:
    """Return True if logits that stay are a slice: Inductor reads it where it lies, a kernel would need a copy of it."""
    if view.name(seen.source) != "getitem" or not is_tensor(seen.source.args[0]) or not seen.nodes:
        return None
    return f"{seen.source.name} is a slice of larger logits"


def _step(view: View, node: fx.Node, seen: Logits, to_linear: bool) -> tuple[fx.Node, list[fx.Node]] | None:
    """One step down from ``node``: the node below and the nodes that the step covers; None where it ends."""
    name, term = view.name(node), view.term(node)
    below = view.transparent(node)
    if below is not None and is_tensor(below):
        if example(node).dtype == torch.float64:
            seen.stopped = f"{node.name} is float64; the kernel computes in float32"
            return None
        if not keeps_values(example(below).dtype, example(node).dtype):
            seen.stopped = f"{node.name} rounds the logits to {example(node).dtype}"
            return None
        return below, [node]
    if name in ("view", "reshape", "flatten", "contiguous"):
        below = source_of(node)
        if below is None or not is_tensor(below) or example(below).dim() == 0 or example(node).dim() == 0:
            return None
        if not statically_known_true(example(below).shape[-1] == example(node).shape[-1]):
            seen.stopped = f"{node.name} changes the vocabulary dim"
            return None
        if seen.row_slices and not same_shape(example(below), example(node)):
            if example(node).dim() == 2:  # all rows, one behind the other: the input's rows can be laid out alike
                seen.row_slices.append(node)
                return below, [node]
            seen.stopped = f"{node.name} lays out the rows anew below {seen.row_slices[-1].name}, which takes some of them"
            return None
        return below, [node]
    if term.op in ("mul", "div") and len(term.operands) == 2:
        return _scalar_step(view, node, term, seen)
    if not to_linear:
        return None
    if (rows := below_a_choice_of_rows(view, node)) is not None:
        seen.row_slices.append(node)
        return rows, [node]
    if (cut := below_a_slice_of_classes(view, node)) is not None and seen.bias is None:
        seen.classes = cut[1] if seen.classes is None else seen.classes
        return cut[0], [node]
    if term.op == "add" and seen.bias is None and seen.softcap == 0 and seen.scale == 1:
        return _bias_step(view, node, term, seen)
    return None


def _scalar_step(view: View, node: fx.Node, term: Term, seen: Logits) -> tuple[fx.Node, list[fx.Node]] | None:
    tensor, number = _tensor_and_number(view, term)
    if tensor is None or number is None or number == 0:
        return None
    inner = view.edge(tensor)
    if term.op == "mul" and not inner.roundings and isinstance(inner.base, fx.Node):
        bent = view.term(inner.base)
        if bent.op == "tanh" and seen.softcap == 0 and seen.scale == 1 and number > 0:
            arg = view.edge(bent.operands[0])
            scaled = view.term(arg.base) if isinstance(arg.base, fx.Node) else None
            if scaled is not None and not arg.roundings and scaled.op in ("div", "mul"):
                below, divisor = _tensor_and_number(view, scaled)
                divisor = 1 / divisor if divisor and scaled.op == "mul" else divisor
                if below is not None and divisor == number:
                    seen.softcap = float(number)
                    return below, [node, *inner.crossed, inner.base, *arg.crossed, *scaled.nodes]
            seen.stopped = f"{inner.base.name} is a tanh, but not of logits / {number}"
            return None
    seen.scale *= float(number) if term.op == "mul" else 1 / float(number)
    return tensor, [node]


def _tensor_and_number(view: View, term: Term) -> tuple[fx.Node | None, float | None]:
    a, b = term.operands
    if isinstance(b, (int, float)) and is_tensor(a):
        return a, b
    if isinstance(a, (int, float)) and is_tensor(b) and term.op == "mul":
        return b, a
    return None, None


def _bias_step(view: View, node: fx.Node, term: Term, seen: Logits) -> tuple[fx.Node, list[fx.Node]] | None:
    for tensor, bias in (term.operands, term.operands[::-1]):
        if not is_tensor(tensor) or not is_tensor(bias) or linear_of(view, view.edge(tensor).base) is None:
            continue
        shape = example(bias).shape
        product = example(view.edge(tensor).base).dtype
        if example(tensor).dtype != example(node).dtype or not keeps_values(example(bias).dtype, product):
            seen.stopped = f"{node.name} adds a bias in {example(node).dtype}"
            continue
        if shape and shape[-1] == example(node).shape[-1] and all(s == 1 for s in shape[:-1]):
            seen.bias = bias
            return tensor, [node]
    return None
