"""Rows that are divided by their length: what the norms are near misses of."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import fx

from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.terms import Term, example, is_tensor
from fx_fusion.graph.view import View

_LOWER_BOUND = "eps is a lower bound of the mean of squares here: RMSNorm adds it; write F.rms_norm(x, (n,), weight, eps)"
_L2 = "the squares are added up, as in an L2 normalization: RMSNorm takes their mean, so it is sqrt(n) times as large"
HINTS = {  # of RMSNorm, by the op that it has and the one in its place
    ("add", "clamp"): _LOWER_BOUND,
    ("add", "clamp_min"): _LOWER_BOUND,
    ("add", "maximum"): _LOWER_BOUND,
    ("mean", "sum"): _L2,
    ("add", "sum"): _L2,
    ("mean", "var"): "a variance is of what is left without the mean: RMSNorm takes the mean of squares",
    ("square", "abs"): "the mean is of magnitudes: RMSNorm takes that of squares",
    ("square", "pow"): "the mean is of another power: RMSNorm takes that of squares",
}


class Quotient(NamedTuple):
    """``x / divisor``, where the divisor is ``length + eps``."""

    x: fx.Node
    divisor: fx.Node
    length: fx.Node


def over_length_plus_eps(view: View, node: fx.Node) -> Quotient | None:
    """Return the parts of ``x / (length(x) + eps)``, in which eps is not under the root; None for anything else. A length
    is a vector norm, a standard deviation, or the root of a mean or a sum, at any scale."""
    term = view.term(node)
    quotient, x = (term, term.operands[0]) if term.op == "div" else _times_reciprocal(view, term)
    if quotient is None or not is_tensor(x) or not is_tensor(divisor := quotient.operands[1]):
        return None
    total = inner_term(view, divisor, "add")
    lengths = [] if total is None else [o for o in total.operands if is_tensor(o) and _is_length(view, o)]
    return Quotient(x, divisor, lengths[0]) if lengths else None


def is_of_the_mean(view: View, length: fx.Node) -> bool:
    """Return True if a length has a scale or is the root of a mean, as RMSNorm's. That of an L2 normalization is not."""
    scaled = inner_term(view, length, "div") or inner_term(view, length, "mul")
    root = inner_term(view, length, "sqrt")
    of_a_mean = root is not None and any(inner_term(view, root.operands[0], op) is not None for op in ("mean", "var"))
    return scaled is not None or of_a_mean or view.name(view.edge(length).base) == "std"


def is_scaled_by_its_width(view: View, node: fx.Node, steps: int = 4) -> bool:
    """Return True if products behind a node multiply it by the root of its last dim, which makes an L2 normalization an
    RMSNorm."""
    width = example(node).shape[-1]
    if not isinstance(width, int) or not steps:
        return False
    for user in node.users:
        term = view.term(user)
        numbers = [n for n in map(view.folded, term.operands) if isinstance(n, (int, float))] if term.op == "mul" else []
        if any(math.isclose(number, width**0.5, rel_tol=1e-3) for number in numbers):
            return True
        passes = term.op == "mul" or view.transparent(user) is node
        if passes and is_scaled_by_its_width(view, user, steps - 1):
            return True
    return False


def is_centered(view: View, x: fx.Node) -> bool:
    """Return True if it is a difference from a mean."""
    difference = inner_term(view, x, "sub")
    means = () if difference is None else (inner_term(view, o, "mean") for o in difference.operands if is_tensor(o))
    return any(mean is not None for mean in means)


def _times_reciprocal(view: View, term: Term) -> tuple[Term | None, fx.Node | None]:
    """``1 / y`` and x of ``x * (1 / y)``."""
    for i, operand in enumerate(term.operands if term.op == "mul" else ()):
        inner = inner_term(view, operand, "div") if is_tensor(operand) else None
        if inner is not None and not is_tensor(inner.operands[0]):
            return inner, term.operands[1 - i]
    return None, None


def _is_length(view: View, node: fx.Node) -> bool:
    scaled = inner_term(view, node, "div") or inner_term(view, node, "mul")
    below = node if scaled is None else next((o for o in scaled.operands if is_tensor(o)), None)
    if not is_tensor(below):
        return False
    root = inner_term(view, below, "sqrt")
    under = [] if root is None else [inner_term(view, root.operands[0], op) for op in ("mean", "sum", "var")]
    return (
        any(term is not None for term in under)
        or inner_term(view, below, "vector_norm") is not None
        or view.name(view.edge(below).base) == "std"
    )
