"""The gradient of an embedding whose table is also lm_head's weight: added into lm_head's, row by row.

lm_head's gradient has the size of the table. That of the embedding is zero but for the rows of the ids that occur: its
kernel adds those to lm_head's, instead of writing a table of its own that is added then.
"""

from __future__ import annotations

import torch
from torch import fx

from fx_fusion.kernels.embedding import _embedding_segments_kernel
from fx_fusion.memory.joint_graph import base, erase_unread, users
from fx_fusion.memory.norms import result_of
from fx_fusion.ops.launch import qualified_name
from fx_fusion.torch_internals.traced_kernels import change_launch, launched, writes_to

_SEGMENTS = qualified_name(_embedding_segments_kernel)


def add_embeddings_to_others(graph: fx.Graph) -> int:
    """Let the launched kernels of embeddings add their gradients to those that they are added to; returns how many do."""
    count = 0
    for node in list(graph.nodes):
        found = launched(node)
        if found is not None and qualified_name(found[0]) == _SEGMENTS:
            result = result_of(node, "dw_ptr")
            count += result is not None and _add_to_other(graph, node, result)
    return count


def _add_to_other(graph: fx.Graph, node: fx.Node, result: fx.Node) -> bool:
    (add,) = result.users if len(result.users) == 1 else (None,)
    if add is None or add.target is not torch.ops.aten.add.Tensor or add.kwargs or set(add.args) == {result}:
        return False
    other = next(argument for argument in add.args if argument is not result)
    if not isinstance(other, fx.Node) or not _is_memory_for(result, other, add) or not other < node:
        return False
    memory = node.kwargs["kwargs"]["dw_ptr"]  # type: ignore[index,call-overload]
    change_launch(node, {"dw_ptr": other, "ADD": True}, writes_to(node))
    add.replace_all_uses_with(result)
    erase_unread(graph, [add, memory])
    return True


def _is_memory_for(result: fx.Node, other: fx.Node, add: fx.Node) -> bool:
    """Return True if a gradient lies as the kernel stores one, and is read by the sum alone: it may be written to."""
    value, there = result.meta["val"], other.meta.get("val")
    if not isinstance(there, torch.Tensor) or not there.is_contiguous() or add.meta["val"].dtype != value.dtype:
        return False
    made = base(other)
    whole = made.op == "call_function" and made.meta["val"].numel() == value.numel()
    alike = (there.dtype, there.device, there.shape) == (value.dtype, value.device, value.shape)
    return whole and alike and list(users(made)) == [add]
