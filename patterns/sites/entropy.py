"""The entropy of rows of logits, beside the log-probabilities that were gathered from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.match import Match
from fx_fusion.graph.forms import inner_term, multiplied_and_summed
from fx_fusion.graph.terms import example, is_tensor, over_last_dim, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary, source_of
from fx_fusion.patterns.sites.log_probs import logits_of
from fx_fusion.patterns.sites.loss import LossSite, find_losses
from fx_fusion.patterns.sites.rows import shaped_as
from fx_fusion.rewrite.editor import Editor, Mismatch


@dataclass
class EntropySite:
    """``root`` is ``sign`` times the entropy of each row (shaped as the rows); ``nodes`` make it, from the logits on."""

    root: fx.Node
    sign: int
    nodes: set[fx.Node]


def first_root(editor: Editor, match: Match) -> fx.Node:
    """Return where one call for both results has to stand."""
    order = editor.view.order
    first = min(match.outputs, key=lambda n: order[n])
    for node in match.inputs.values():
        if order[node] > order[first]:
            raise Mismatch(f"{node.name} does not exist yet where {first.name} is needed")
    return first


def replaced(editor: Editor, site: LossSite, entropy: EntropySite, call: fx.Node) -> None:
    """Put the log-probabilities and entropies (m, fp32) that ``call`` returns where the graph has its own."""
    roots, made = (site.root, entropy.root), []
    for i, (root, sign) in enumerate(zip(roots, (-site.sign, entropy.sign), strict=True)):
        result = editor.item(call, i, like=root)
        result = result if sign > 0 else editor.method("neg", (result,), like=root)
        result = shaped_as(editor, result, site, root)
        made.append(editor.cast(result, example(root).dtype, like=root))
    editor.check(roots, made)
    for root, result in zip(roots, made, strict=True):
        editor.replace(root, result)


def losses_with_entropy(view: View) -> Iterator[tuple[LossSite, EntropySite, LossSite]]:
    """Log-probabilities, the entropy of the same logits, and a site with the nodes of both."""
    for found in find_losses(view):
        site, entropy = found.unreduced or found, entropy_of(view, found)
        if entropy is not None:
            yield site, entropy, replace(site, nodes={*site.nodes, *entropy.nodes})


def entropy_of(view: View, site: LossSite) -> EntropySite | None:
    """The first entropy of the logits that a site gathers from, in the grad mode of the site."""
    site = site.unreduced or site
    if not site.gathered:
        return None
    region = view.effects.region
    candidates = (n for n in view.graph.nodes if region[n] == region[site.root])
    return next((found for node in candidates if (found := _at(view, node, site.logits)) is not None), None)


def _at(view: View, node: fx.Node, logits: fx.Node) -> EntropySite | None:
    """``sum(p · log p)``, the negative entropy, or ``logsumexp(l) - sum(p · l)``."""
    if view.name(node) == "sub":
        term = view.term(node)
        if term.op != "sub" or not all(isinstance(o, fx.Node) and is_tensor(o) for o in term.operands):
            return None
        total, expected = term.operands
        found = _sum_of_products(view, expected, logits)
        if found is None or found[0] != {"p", "logits"} or not _is_over_classes(view, total, "logsumexp"):
            return None
        nodes = {node, total, expected, *found[1]}
        fits = _same_rows(view, source_of(total), logits, nodes) and same_shape(example(total), example(expected))
        return EntropySite(node, 1, nodes) if fits else None
    found = _sum_of_products(view, node, logits)
    if found is None or found[0] not in ({"p", "log_p"}, {"p", "-log_p"}):
        return None
    return EntropySite(node, 1 if "-log_p" in found[0] else -1, {node, *found[1]})


def _is_over_classes(view: View, node: fx.Node, name: str) -> bool:
    """Return True if a node reduces the last dim of its input, without keeping it or changing the dtype."""
    bound = view.arguments_of(node, name)
    if bound is None or not is_tensor(bound["input"]) or bound["keepdim"] or bound.get("dtype") is not None:
        return False
    return over_last_dim(bound["dim"], bound["input"])


def _sum_of_products(view: View, node: fx.Node, logits: fx.Node) -> tuple[set[str], set[fx.Node]] | None:
    """Return what two factors are summed over classes, ``p``, ``log_p``, ``-log_p`` or ``logits``, and the nodes that make
    the products."""
    nodes: set[fx.Node] = set()
    if (inner := view.arguments_of(node, "einsum")) is not None:
        factors = multiplied_and_summed(inner)
    else:
        product = source_of(node) if _is_over_classes(view, node, "sum") else None
        if product is None or view.name(product) != "mul":
            return None
        nodes.add(product)
        try:
            factors = binary(view, product)
        except NotThis:
            return None
    kinds = {kind for factor in factors for kind in _kind(view, factor, logits, nodes)}
    return kinds, nodes


def _kind(view: View, factor: fx.Node, logits: fx.Node, nodes: set[fx.Node]) -> Iterator[str]:
    if not is_tensor(factor) or example(factor).dtype == torch.float64:  # the kernels compute in float32
        return
    if _same_rows(view, factor, logits, nodes):
        yield "logits"
        return
    if (negative := inner_term(view, factor, "neg")) is not None:
        kinds = list(_kind(view, negative.operands[0], logits, nodes))
        nodes.update(negative.nodes)
        yield from ("-log_p" for kind in kinds if kind == "log_p")
        return
    if (bounded := _above_the_lowest(view, factor)) is not None:
        kinds = list(_kind(view, bounded, logits, nodes))
        nodes.add(factor)
        yield from (kind for kind in kinds if kind == "log_p")
        return
    for op in ("softmax", "exp"):
        term = inner_term(view, factor, op)
        if term is None or (op == "softmax" and term.attrs != (-1,)):
            continue
        below, found = term.operands[0], None
        if (found := logits_of(view, below)) is not None and _same_rows(view, found[0], logits, nodes):
            nodes.update((*term.nodes, *found[1]))  # a softmax of log-probabilities is what they are of
            yield "p"
        elif op == "softmax" and _same_rows(view, below, logits, nodes):
            nodes.update(term.nodes)
            yield "p"
        return
    found = logits_of(view, factor)
    if found is not None and _same_rows(view, found[0], logits, nodes):
        nodes.update(found[1])
        yield "log_p"


def _above_the_lowest(view: View, node: fx.Node) -> fx.Node | None:
    """Return what is below ``clamp(log p, min=lowest number)``: torch.distributions has p · log p = 0 where a logit is -inf,
    as the kernels do."""
    bound = view.arguments_of(node, "clamp", "clamp_min")
    if bound is None or bound.get("max") is not None or not is_tensor(bound["input"]):
        return None
    return bound["input"] if bound["min"] == torch.finfo(example(node).dtype).min else None


def _same_rows(view: View, a: fx.Node | None, b: fx.Node, nodes: set[fx.Node]) -> bool:
    """Return True if two nodes are the same logits: also written twice (``logits / t``), or with other leading dims.
    ``nodes`` gets those that make ``a`` from what both have in common."""
    if a is None:
        return False
    above: set[fx.Node] = set()
    a, b = _below_views(view, a, above), _below_views(view, b, set())
    if not view.same_value(a, b):
        return False
    _apart(view, a, b, above)
    nodes.update(above)
    return True


def _below_views(view: View, node: fx.Node, nodes: set[fx.Node]) -> fx.Node:
    """Return what a node is a view of whose last dim is the same: row after row they hold the same."""
    while view.name(node) in ("view", "reshape", "flatten"):
        source = source_of(node)
        if source is None or example(source).dim() * example(node).dim() == 0:
            break
        if not statically_known_true(example(source).shape[-1] == example(node).shape[-1]):
            break
        nodes.add(node)
        node = source
    return node


def _apart(view: View, a: fx.Node, b: fx.Node, nodes: set[fx.Node]) -> None:
    """The nodes of ``a``, which has the value of ``b``, that are none of b's."""
    if view.same_source(a, b):
        return
    one, other = view.term(a), view.term(b)
    nodes.update(one.nodes)
    for x, y in zip(one.operands, other.operands, strict=True):
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            _apart(view, x, y, nodes)
