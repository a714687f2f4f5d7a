"""GELU written out by hand, recognised by what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fx_fusion.graph.terms import Term, is_tensor

if TYPE_CHECKING:
    from fx_fusion.graph.view import View

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
_SAMPLES = torch.linspace(-6, 6, 61, dtype=torch.float64)
_GELUS = {
    f"gelu_{kind}": torch.nn.functional.gelu(_SAMPLES, approximate=kind)  # the values that identify each form
    for kind in ("none", "tanh")
}


def written_out_gelus(view: View, inner: fx.Node) -> dict[fx.Node, Term]:
    """GELUs around one ``tanh`` or ``erf`` node, however associated and whatever the spelling of their constants.

    The product above the node is a function of one tensor made of at most 12 arithmetic steps; it is evaluated in
    float64 at 61 points and compared with ``F.gelu``. Agreement to 1e-8 leaves room for the digits of a constant
    (0.7978845608 for sqrt(2/pi)) and for nothing else.
    """
    roots: list[fx.Node] = []
    above = [inner]
    for _ in range(4):
        above = [user for node in above for user in node.users]
        roots.extend(node for node in above if view.name(node) == "mul")
    for root in reversed(roots):
        leaves: set[fx.Node] = set()
        inside: dict[fx.Node, None] = {}
        if not _collect(view, root, leaves, inside) or inner not in inside:
            continue
        if len(leaves) != 1:
            continue
        leaf = leaves.pop()
        values = _evaluate(view, root, leaf)
        for name, expected in _GELUS.items():
            if torch.allclose(values, expected, rtol=0, atol=1e-8):
                return {root: Term(name, (leaf,), (), (root, *(n for n in inside if n is not root)))}
    return {}


def _collect(view: View, node: fx.Node, leaves: set[fx.Node], inside: dict[fx.Node, None]) -> bool:
    """The arithmetic nodes below ``node`` and the tensors they start from. False if it grows beyond one activation."""
    inside[node] = None
    for operand in view.term(node).operands:
        edge = view.edge(operand)
        if isinstance(edge.base, (int, float)):
            continue
        if not isinstance(edge.base, fx.Node) or not is_tensor(edge.base) or edge.roundings:
            return False
        term = view.term(edge.base)
        one_user = all(user in inside for user in edge.base.users)
        if term.op in _ARITHMETIC and (one_user or _is_power(term)) and len(inside) < 16:
            inside.update(dict.fromkeys((*edge.crossed, edge.base)))
            if not _collect(view, edge.base, leaves, inside):
                return False
        else:
            leaves.add(edge.base)
    return True


def _is_power(term: Term) -> bool:
    return term.op in ("square", "pow", "tanh", "erf")


def _evaluate(view: View, node: fx.Node, leaf: fx.Node) -> torch.Tensor:
    if node is leaf:
        return _SAMPLES
    term = view.term(node)
    bases = [view.edge(operand).base for operand in term.operands]
    return _ARITHMETIC[term.op](*(_evaluate(view, b, leaf) if isinstance(b, fx.Node) else b for b in bases))
