"""DTensors around a kernel: of each input the part that this rank has, and results as the graph has them."""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_fusion.fusion.match import Match
from fx_fusion.ops.shards import of_all_ranks, part_of_rank
from fx_fusion.rewrite.editor import Editor


def own(editor: Editor, match: Match, name: str) -> Any:
    """An operand as the kernel takes it: this rank's part of one of ``match.parts``, else the operand itself."""
    operand = match.operands.get(name)
    if name not in match.parts:
        return operand
    return editor.call(part_of_rank, (operand, match.parts[name]), like=match.root)


def whole(
    editor: Editor, match: Match, part: fx.Node, output: fx.Node, *, lies_as: str, contiguous: bool = False
) -> fx.Node:
    """A rank's part of a result as the DTensor ``output`` that it replaces, which has the shape and the placements of the
    operand ``lies_as``, and its strides unless it is ``contiguous``. ``part`` itself where that operand is no DTensor."""
    if lies_as not in match.parts:
        return part
    return editor.call(of_all_ranks, (part, editor.now(match.operands[lies_as]), contiguous), like=output)
