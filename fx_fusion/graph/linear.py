"""Linear layers however they are spelled: ``F.linear``, a product with a transposed weight, ``einsum``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import source_of


@dataclass(frozen=True)
class Linear:
    """``x · weightᵀ + bias``; weight: (features out, features in)."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None


def linear_of(view: View, node: Any) -> Linear | None:
    """The linear layer that a node computes, or None."""
    bound = view.arguments(node) if isinstance(node, fx.Node) else None
    if bound is None:
        return None
    name = view.name(node)
    found = None
    if name == "linear":
        found = Linear(bound["input"], bound["weight"], bound["bias"])
    elif name in ("matmul", "mm"):
        found = _product(view, bound["input"], bound["other"])
    elif name == "addmm" and bound["beta"] == 1 and bound["alpha"] == 1:
        found = _product(view, bound["mat1"], bound["mat2"], bound["input"])
    elif name == "einsum":
        found = _einsum(bound)
    return found if found is not None and is_tensor(found.weight) and example(found.weight).dim() == 2 else None


def _product(view: View, x: Any, other: Any, bias: Any = None) -> Linear | None:
    """``x @ weight.T``: a weight that lies the other way round would be copied."""
    if not is_tensor(x) or not is_tensor(other) or example(other).dim() != 2 or example(x).dim() < 2:
        return None
    if bias is not None and (not is_tensor(bias) or example(bias).dim() != 1):
        return None
    term = view.term(other)
    swaps = (term.op, term.attrs) in (("transpose", (-2, -1)), ("permute", (-1, -2))) or view.name(other) == "t"
    weight = source_of(other) if swaps and not view.hides_gradient(other) else None
    return None if weight is None or not is_tensor(weight) else Linear(x, weight, bias)


def _einsum(bound: Any) -> Linear | None:
    """``einsum("...d,vd->...v", x, weight)``."""
    equation, operands = bound["equation"], bound["operands"]
    if not isinstance(equation, str) or len(operands) != 2 or not all(map(is_tensor, operands)):
        return None
    left, arrow, out = equation.replace(" ", "").partition("->")
    of_x, comma, of_weight = left.partition(",")
    letters = of_x.removeprefix("...")
    if not arrow or not comma or len(of_weight) != 2 or not letters or len(of_x) < 2 or len(set(letters)) != len(letters):
        return None
    classes, columns = of_weight[0], of_weight[1]
    plain = letters.isalpha() and of_x[-1] == columns and classes not in of_x and out == of_x[:-1] + classes
    return Linear(operands[0], operands[1]) if plain else None
