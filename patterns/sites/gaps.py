"""Results that are the first part of a longer tensor, and have gaps in memory: whether anybody sees them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx

from fx_fusion.graph.terms import example
from fx_fusion.graph.view import View
from fx_fusion.ops.library import is_op
from fx_fusion.rewrite.editor import Editor, Mismatch, differs, without_gaps

_VIEWS = {
    "transpose", "permute", "mT", "unsqueeze", "getitem", "split", "chunk", "to", "float", "half", "bfloat16", "type_as",
}  # fmt: skip
# Ops that make a new tensor, in an order of memory that gaps don't change.
_MAKE_NEW = {
    "mul", "add", "sub", "div", "neg", "silu", "gelu", "relu", "sigmoid", "tanh", "exp", "square", "pow", "sum", "mean",
    "linear", "matmul", "addcmul",
}  # fmt: skip


def replace_part(editor: Editor, root: fx.Node, y: fx.Node, dim: int, more: int) -> None:
    """Replace ``root``, all but the last ``more`` of a tensor along ``dim``, by ``y``, which has no gaps.

    Where a reader could tell them apart, y becomes a part of a longer tensor too."""
    wanted = without_gaps(example(root))
    gaps = differs(example(root), wanted) is not None
    if differs(wanted, example(y)) is not None:
        y = editor.restride(y, wanted, like=root)
    if gaps and not _is_only_computed_with(editor.view, root):
        if not isinstance(more, int):
            raise Mismatch("its result lies with gaps of dynamic size, which somebody reads")
        sizes = (0,) * (2 * (example(root).dim() - 1 - dim)) + (0, more)
        with editor.graph.inserting_after(y):
            longer = editor.call(F.pad, (y, sizes), like=root)
        with editor.graph.inserting_after(longer):
            y = editor.method("narrow", (longer, dim, 0, example(root).shape[dim]), like=root)
        gaps = False
    editor.replace(root, y, any_strides=gaps)


def _is_only_computed_with(view: View, node: fx.Node) -> bool:
    """Return True if nothing tells a tensor with gaps from one without. ``reshape`` may copy the one and not the other,
    which is seen where somebody writes."""
    for user in node.users:
        name = view.name(user)
        may_copy = name in ("reshape", "view") and not view.effects.writes
        if (name in _VIEWS or may_copy) and not view.effects.mutated(user):
            if not _is_only_computed_with(view, user):
                return False
        elif not (name in _MAKE_NEW or is_op(user.target)) or view.effects.mutated(user):
            return False
    return True
