"""Tell a statistic, which a norm divides by, from a running average, which an optimizer divides by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Node = TypeVar("Node")

_REDUCTIONS = {
    "mean", "sum", "var", "var_mean", "std", "std_mean", "norm", "vector_norm", "linalg_vector_norm", "einsum", "matmul",
    "mm", "bmm", "linear",
}  # fmt: skip


def is_statistic(node: Node, op: Callable[[Node], str | None], operands: Callable[[Node], Sequence[Node]]) -> bool:
    """Return True if a node is a reduction at any shape, scale or offset.

    A running average is no statistic: it is an input of the graph, or adds up two computed tensors.

    Args:
        op: returns the name of a node's op.
        operands: returns the operands that the graph computes, its inputs left out.
    """
    while op(node) not in _REDUCTIONS:
        below = operands(node)
        if len(below) != 1:
            return False
        node = below[0]
    return True
