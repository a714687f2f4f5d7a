"""Rows that are divided by their length: what the norms are near misses of."""

from __future__ import annotations

from torch import fx

from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.terms import Term, is_tensor
from fx_fusion.graph.view import View

_LOWER_BOUND = "eps is a lower bound of the mean of squares here: RMSNorm adds it"
HINTS = {  # of RMSNorm, by the op that it has and the one in its place
    ("add", "clamp"): _LOWER_BOUND,
    ("add", "clamp_min"): _LOWER_BOUND,
    ("add", "maximum"): _LOWER_BOUND,
    ("mean", "sum"): "the squares are added up: RMSNorm takes their mean",
    ("mean", "var"): "a variance is of what is left without the mean: RMSNorm takes the mean of squares",
    ("square", "abs"): "the mean is of magnitudes: RMSNorm takes that of squares",
    ("square", "pow"): "the mean is of another power: RMSNorm takes that of squares",
}


def over_length_plus_eps(view: View, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The numerator and the divisor of ``x / (length(x) + eps)``, in which eps is not under the root; None for anything
    else. A length is a vector norm, a standard deviation, or the root of a mean or a sum, at any scale."""
    term = view.term(node)
    quotient, x = (term, term.operands[0]) if term.op == "div" else _times_reciprocal(view, term)
    if quotient is None or not is_tensor(x) or not is_tensor(divisor := quotient.operands[1]):
        return None
    total = inner_term(view, divisor, "add")
    if total is None or not any(_is_length(view, o) for o in total.operands if is_tensor(o)):
        return None
    return x, divisor


def is_centred(view: View, x: fx.Node) -> bool:
    """Whether it is a difference from a mean."""
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
