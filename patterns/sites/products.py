"""Products of matrices in a batch, however they are spelled: ``matmul``, ``bmm``, ``baddbmm``, ``einsum``.

    out[.., m, n]  =  alpha · Σ_k left[.., m, k] · right[.., k, n]  +  added

The operands of an einsum, and its result, may have their dims in another order than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.rewrite.editor import Editor

NAMES = ("matmul", "bmm", "baddbmm", "einsum")
Order = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """``left_order``, ``right_order``: which dim of the operand comes at each place of (.., m, k) and (.., k, n); None where
    they lie so. ``out_order``: which dim of (.., m, n) comes at each place of the result."""

    left: fx.Node
    right: fx.Node
    left_order: Order | None = None
    right_order: Order | None = None
    out_order: Order | None = None
    alpha: float = 1.0
    added: fx.Node | None = None


def product_of(view: View, node: Any) -> Product | None:
    """The product that a node computes, or None."""
    bound = view.arguments_of(node, *NAMES)
    if bound is None:
        return None
    name = view.name(node)
    if name == "einsum":
        return _einsum(bound["equation"], bound["operands"])
    if name == "baddbmm":
        left, right, alpha, beta = bound["batch1"], bound["batch2"], bound["alpha"], bound["beta"]
        if not is_tensor(left) or not is_tensor(right) or not isinstance(alpha, (int, float)) or beta not in (0, 1):
            return None
        if not beta and is_tensor(bound["input"]) and example(bound["input"]).requires_grad:
            return None  # its gradient is zeros, not None
        return Product(left, right, alpha=float(alpha), added=bound["input"] if beta else None)
    left, right = bound["input"], bound["other" if "other" in bound else "mat2"]
    return Product(left, right) if is_tensor(left) and is_tensor(right) else None


def _einsum(equation: Any, operands: Sequence[Any]) -> Product | None:
    """Return, of two operands with one letter that both have and the result has not, each a letter of its own, all others
    shared."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = operands[0]
    if not isinstance(equation, str) or len(operands) != 2 or not all(map(is_tensor, operands)):
        return None
    inputs, arrow, out = _with_letters_for_dots(equation.replace(" ", ""), operands).partition("->")
    left, comma, right = inputs.partition(",")
    letters = (left, right, out)
    if not arrow or not comma or not all(part.isalpha() and len(set(part)) == len(part) for part in letters):
        return None
    if (len(left), len(right)) != tuple(example(operand).dim() for operand in operands):
        return None
    batch = "".join(c for c in out if c in left and c in right)
    summed = [c for c in left if c in right and c not in out]
    own = [[c for c in part if c not in batch and c not in summed] for part in (left, right)]
    sizes: dict[str, Any] = {}
    shapes = (*example(operands[0]).shape, *example(operands[1]).shape)
    for letter, size in zip(left + right, shapes, strict=True):
        if not statically_known_true(sizes.setdefault(letter, size) == size):
            return None  # one of them is 1, and broadcast
    if len(summed) != 1 or [len(o) for o in own] != [1, 1] or set(out) != {*batch, own[0][0], own[1][0]}:
        return None
    k, m, n = summed[0], own[0][0], own[1][0]
    # m is the row of the result: the operand that has it is the left one.
    if out.index(m) > out.index(n):
        left, right, m, n, operands = right, left, n, m, (operands[1], operands[0])
    orders = [
        tuple(given.index(c) for c in wanted) for given, wanted in ((left, batch + m + k), (right, batch + k + n))
    ]  # fmt: skip
    of_out = tuple((batch + m + n).index(c) for c in out)
    of_left, of_right, of_result = (None if o == tuple(range(len(o))) else o for o in (*orders, of_out))
    return Product(operands[0], operands[1], of_left, of_right, of_result)


def _with_letters_for_dots(equation: str, operands: Sequence[fx.Node]) -> str:
    """The equation with a letter for each dim of ``...``, where it stands for as many in both operands."""
    parts = equation.partition("->")[0].split(",")
    counts = {example(t).dim() - len(part) + 3 for part, t in zip(parts, operands, strict=False) if "..." in part}
    unused = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    return equation.replace("...", "".join(unused[: counts.pop()])) if len(counts) == 1 else equation


def rows_of_keys(product: Product) -> Order:
    """The order in which the right operand is (.., n, k): keys, of a product of queries and transposed keys."""
    order = product.right_order or tuple(range(example(product.right).dim()))
    return (*order[:-2], order[-1], order[-2])


def permuted(editor: Editor, node: Any, order: Order | None, like: fx.Node) -> Any:
    """The node with its dims in another order; itself where they lie so."""
    node = editor.now(node)
    return node if order is None or order == tuple(range(len(order))) else editor.method("permute", (node, order), like=like)
