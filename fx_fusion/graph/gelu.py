"""GELU written out by hand, recognized by what it computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from fx_fusion.graph.terms import Reader, Term, is_tensor

_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": math.pow,
    "square": lambda a: a * a,
    "neg": operator.neg,
    "tanh": math.tanh,
    "erf": math.erf,
}
_DEPTH = 3  # steps between the last product of a GELU and its tanh or erf
_SAMPLES = [i / 5 for i in range(-30, 31)]  # numbers, not a tensor: graphs are read under fake tensors too
_GELUS: dict[str, Callable[[float], float]] = {
    "gelu_none": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def written_out_gelu(view: Reader, root: fx.Node, a: Any, b: Any) -> Term | None:
    """The GELU whose last product is ``root`` = a · b, however associated and whatever the spelling of its constants; None
    for another product.

    The product is a function of one tensor made of at most 16 arithmetic steps; it is evaluated at 61 points and compared
    with both forms of GELU. Agreement to 1e-8 leaves room for the digits of a constant (0.7978845608 for sqrt(2/pi)) and
    for nothing else.
    """
    if not _bends(view, root, _DEPTH):
        return None
    leaves: set[fx.Node] = set()
    inside: dict[fx.Node, None] = {}
    product = Term("mul", (a, b), (), (root,))
    if not _collect(view, product, leaves, inside) or len(leaves) != 1:
        return None
    if not any(view.name(node) in ("tanh", "erf") for node in inside):
        return None
    leaf = leaves.pop()
    try:
        values = [_evaluate(view, product, leaf, x) for x in _SAMPLES]
    except (ArithmeticError, ValueError):  # no number for one of them: a GELU has one everywhere
        return None
    for name, gelu in _GELUS.items():
        if all(abs(value - gelu(x)) <= 1e-8 for x, value in zip(_SAMPLES, values, strict=True)):
            return Term(name, (leaf,), (), (root, *(n for n in inside if n is not root)))
    return None


def _bends(view: Reader, node: fx.Node, depth: int) -> bool:
    """Return True if a tanh or erf is within ``depth`` steps below ``node``."""
    below = [n for n in node.all_input_nodes if is_tensor(n)]
    if any(view.name(n) in ("tanh", "erf") for n in below):
        return True
    return depth > 0 and any(view.name(n) in _STEPS and _bends(view, n, depth - 1) for n in below)


_STEPS = {*_ARITHMETIC, "to", "float", "half", "bfloat16", "double", "type_as"} - {"tanh", "erf", "pow", "square"}


def _collect(view: Reader, term: Term, leaves: set[fx.Node], inside: dict[fx.Node, None]) -> bool:
    """The arithmetic nodes below a term and the tensors they start from. False if it grows beyond one activation."""
    inside[term.nodes[0]] = None
    for operand in term.operands:
        edge = view.edge(operand)
        if isinstance(edge.base, (int, float)):
            continue
        if not isinstance(edge.base, fx.Node) or not is_tensor(edge.base) or edge.roundings:
            return False
        below = view.term(edge.base)
        one_user = all(user in inside for user in edge.base.users)
        if below.op in _ARITHMETIC and (one_user or _is_power(below)) and len(inside) < 16:
            inside.update(dict.fromkeys((*edge.crossed, edge.base)))
            if not _collect(view, below, leaves, inside):
                return False
        else:
            leaves.add(edge.base)
    return True


def _is_power(term: Term) -> bool:
    return term.op in ("square", "pow", "tanh", "erf")


def _evaluate(view: Reader, node: fx.Node | Term, leaf: fx.Node, x: float) -> float:
    if node is leaf:
        return x
    term = view.term(node)
    bases = [view.edge(operand).base for operand in term.operands]
    return _ARITHMETIC[term.op](*(_evaluate(view, b, leaf, x) if isinstance(b, fx.Node) else b for b in bases))
