"""GELU written out by hand, recognised by what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.terms import Reader, Term, is_tensor

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "square": lambda a: a * a,
    "neg": lambda a: -a,
    "tanh": torch.tanh,
    "erf": torch.erf,
}
_DEPTH = 3  # steps between the last product of a GELU and its tanh or erf
_SAMPLES = torch.linspace(-6, 6, 61, dtype=torch.float64)
_GELUS = {
    f"gelu_{kind}": torch.nn.functional.gelu(_SAMPLES, approximate=kind)  # the values that identify each form
    for kind in ("none", "tanh")
}


def written_out_gelu(view: Reader, root: fx.Node, a: Any, b: Any) -> Term | None:
    """The GELU whose last product is ``root`` = a · b, however associated and whatever the spelling of its constants; None
    for another product.

    The product is a function of one tensor made of at most 16 arithmetic steps; it is evaluated in float64 at 61 points
    and compared with ``F.gelu``. Agreement to 1e-8 leaves room for the digits of a constant (0.7978845608 for sqrt(2/pi))
    and for nothing else.
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
    values = _evaluate(view, product, leaf)
    for name, expected in _GELUS.items():
        if torch.allclose(values, expected, rtol=0, atol=1e-8):
            return Term(name, (leaf,), (), (root, *(n for n in inside if n is not root)))
    return None


def _bends(view: Reader, node: fx.Node, depth: int) -> bool:
    """Whether a tanh or erf is within ``depth`` steps below ``node``."""
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


def _evaluate(view: Reader, node: fx.Node | Term, leaf: fx.Node) -> torch.Tensor:
    if node is leaf:
        return _SAMPLES
    term = view.term(node)
    bases = [view.edge(operand).base for operand in term.operands]
    return _ARITHMETIC[term.op](*(_evaluate(view, b, leaf) if isinstance(b, fx.Node) else b for b in bases))
