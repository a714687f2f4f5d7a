"""Find where a graph compares log-probabilities with distributions that have no gradient: distillation, soft targets.

    F.kl_div(log_softmax(z / t), softmax(teacher / t), reduction="batchmean")        -(q * log_softmax(z)).sum(-1).mean()
    F.cross_entropy(z, probabilities)                  (q * (log_q - log_softmax(z))).sum(-1), masked, and a mean of it

Each is read from the product (or the call) up to a number that is linear in it (``row_weights``), and down to the logits
and to the distribution; where that is a softmax which nothing else reads, to what the softmax is of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.kernels.logits.logit_rows import NO_IGNORE
from fx_fusion.patterns.sites.log_probs import logits_of, one_hot_of
from fx_fusion.patterns.sites.loss import LossSite, read_logits
from fx_fusion.patterns.sites.row_weights import WeightedSum, weighted_sum


@dataclass
class Distribution:
    """``values`` of a kind of ``kernels.logits.soft_rows``, with a ``scale`` where they are logits. ``crossed`` makes of
    them what the loss reads."""

    values: fx.Node
    kind: str
    scale: float = 1.0
    crossed: set[fx.Node] = field(default_factory=set)


@dataclass
class SoftSite:
    """Logits compared with a distribution: ``terms`` is one number a class (``of_classes``), a row, or a number alone, which
    is divided by the sizes ``divisors``; times ``sign``. ``total``: the number that is made of it, if there is one."""

    terms: fx.Node
    logits: fx.Node
    distribution: Distribution
    divergence: bool
    nodes: set[fx.Node]
    sign: int = 1
    of_classes: bool = True
    divisors: tuple[Any, ...] = ()
    total: WeightedSum | None = None

    @property
    def root(self) -> fx.Node:
        """Return what gets replaced."""
        return self.terms if self.total is None else self.total.root

    def as_loss(self) -> LossSite:
        """The site as the readers of logits take it."""
        nodes = {*self.nodes, *(() if self.total is None else self.total.nodes)}
        return LossSite(self.root, self.logits, self.distribution.values, None, "sum", NO_IGNORE, 0.0, nodes)


def find_soft_losses(view: View) -> Iterator[SoftSite]:
    """Every comparison of a graph, whatever its spelling."""
    for node in view.graph.nodes:
        name = view.name(node)
        if name == "kl_div":
            site = _of_kl_div(view, node)
        elif name == "cross_entropy":
            site = _of_cross_entropy(view, node)
        else:
            site = _of_product(view, node) if name == "mul" else None
        if site is not None:
            site.total = weighted_sum(view, site.terms)
            yield site


def _of_kl_div(view: View, node: fx.Node) -> SoftSite | None:
    bound = view.arguments(node)
    if bound is None or bound["size_average"] is not None or bound["reduce"] is not None:
        return None
    log_probs, q, of_log = bound["input"], bound["target"], bound["log_target"]
    inner = _trained_logits(view, log_probs)
    if inner is None or not isinstance(of_log, bool) or not _is_constant(q, log_probs):
        return None
    shape, divisors = example(log_probs).shape, {"mean": None, "batchmean": 1, "sum": 0, "none": 0}
    if bound["reduction"] not in divisors:
        return None
    found = _distribution(view, q, node, log=of_log)
    return SoftSite(
        node, inner[0], found, True, {node, *inner[1]}, of_classes=bound["reduction"] == "none",
        divisors=tuple(shape[: divisors[bound["reduction"]]]),
    )  # fmt: skip


def _of_cross_entropy(view: View, node: fx.Node) -> SoftSite | None:
    bound = view.arguments(node)
    if bound is None or bound["size_average"] is not None or bound["reduce"] is not None or bound["weight"] is not None:
        return None
    logits, q = bound["input"], bound["target"]
    smooths = not isinstance(bound["label_smoothing"], (int, float)) or bound["label_smoothing"] > 0
    if not is_tensor(logits) or example(logits).dim() != 2 or smooths or not _is_constant(q, logits):
        return None
    if not example(logits).requires_grad or bound["reduction"] not in ("mean", "sum", "none"):
        return None
    divisors = tuple(example(logits).shape[:1]) if bound["reduction"] == "mean" else ()
    if one_hot_of(view, q) is not None:
        return None  # read as classes
    return SoftSite(node, logits, _distribution(view, q, node), False, {node}, of_classes=False, divisors=divisors)


def _of_product(view: View, node: fx.Node) -> SoftSite | None:
    """``q * log_p``, ``q * (log_q - log_p)`` and what is minus that."""
    try:
        operands = binary(view, node)
    except NotThis:
        return None
    for q, factor in (operands, operands[::-1]):
        if not is_tensor(q) or not is_tensor(factor) or one_hot_of(view, q) is not None:
            continue
        if not _is_constant(q, factor) or not same_shape(example(node), example(factor)):
            continue
        for read in (_log_probs, _difference):
            if (site := read(view, node, q, factor)) is not None:
                return site
    return None


def _log_probs(view: View, node: fx.Node, q: fx.Node, factor: fx.Node) -> SoftSite | None:
    minus = inner_term(view, factor, "neg")
    inner = _trained_logits(view, factor if minus is None else minus.operands[0])
    if inner is None:
        return None
    nodes = {node, *inner[1], *(() if minus is None else minus.nodes)}
    return SoftSite(node, inner[0], _distribution(view, q, node), False, nodes, sign=-1 if minus is None else 1)


def _difference(view: View, node: fx.Node, q: fx.Node, factor: fx.Node) -> SoftSite | None:
    """``q * (log_q - log_p)``, where log_q is the logarithm of q."""
    term = inner_term(view, factor, "sub")
    if term is None or not all(map(is_tensor, term.operands)):
        return None
    for log_q, log_p, sign in ((*term.operands, 1), (*term.operands[::-1], -1)):
        inner = _trained_logits(view, log_p)
        if inner is None or not same_shape(example(log_q), example(log_p)):
            continue
        nodes = {node, *inner[1], *term.nodes}
        logarithm, of_log = inner_term(view, log_q, "log"), inner_term(view, log_q, "log_softmax")
        if logarithm is not None and view.same_value(logarithm.operands[0], q):
            found = Distribution(q, "probabilities")
            return SoftSite(node, inner[0], found, True, {*nodes, *logarithm.nodes}, sign=sign)
        power, of_q = inner_term(view, q, "exp"), inner_term(view, q, "softmax")
        if power is not None and view.same_value(power.operands[0], log_q):
            found = _distribution(view, log_q, node, log=True, inside={node, *term.nodes, *power.nodes})
            found.crossed.update(power.nodes)
            return SoftSite(node, inner[0], found, True, nodes, sign=sign)
        if of_log is None or of_q is None or not of_log.attrs == of_q.attrs == (-1,):
            continue
        if view.same_value(of_log.operands[0], of_q.operands[0]):
            found = _distribution(view, log_q, node, log=True, inside={node, *term.nodes, *of_q.nodes})
            found.crossed.update(of_q.nodes)
            return SoftSite(node, inner[0], found, True, nodes, sign=sign)
    return None


def _trained_logits(view: View, log_probs: Any) -> tuple[fx.Node, set[fx.Node]] | None:
    """Logits with a gradient whose log-probabilities a node holds, and the nodes that make these of them."""
    inner = logits_of(view, log_probs)
    return inner if inner is not None and example(inner[0]).requires_grad else None


def _is_constant(q: Any, beside: fx.Node) -> bool:
    """Return True if q may be a distribution for each row: floats without a gradient, one for each class."""
    if not is_tensor(q) or example(q).requires_grad or not same_shape(example(q), example(beside)):
        return False
    return example(q).dtype in (torch.float32, torch.bfloat16, torch.float16) and example(q).device == example(beside).device


def _distribution(
    view: View, q: fx.Node, reader: fx.Node, *, log: bool = False, inside: set[fx.Node] | None = None
) -> Distribution:  # fmt: skip
    """q, or log q, as what it is a softmax of, where nothing but ``reader`` (and what is ``inside``) reads it."""
    plain = Distribution(q, "log_probabilities" if log else "probabilities")
    term = inner_term(view, q, "log_softmax" if log else "softmax")
    if term is None or term.attrs != (-1,) or not is_tensor(term.operands[0]):
        return plain
    readers, nodes = {reader, *(inside or ())}, set(term.nodes)
    if any(user not in readers | nodes for node in nodes for user in node.users):
        return plain
    t = term.operands[0]
    seen = read_logits(view, LossSite(q, t, t, None, "sum", NO_IGNORE, 0.0, nodes | readers), to_linear=False)
    if seen.softcap or example(seen.source).dtype == torch.float64:
        return Distribution(t, "logits", 1.0, nodes) if example(t).dtype != torch.float64 else plain
    return Distribution(seen.source, "logits", seen.scale, {*nodes, *seen.nodes})
