"""Results of norms that are read in 16 bits only are stored so.

Under autocast a norm of float32 is float32, and each linear layer behind it reads a copy in bfloat16. The kernel rounds
what it stores once, as the copies are rounded; the gradient of y stays float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fx_fusion.memory.norms import FORWARD, result_of
from fx_fusion.ops.launch import qualified_name
from fx_fusion.torch_internals.partitioner import cast_to, is_view
from fx_fusion.torch_internals.traced_kernels import launch_into, launched, memory_for


def narrow_norms(graph: fx.Graph) -> int:
    """Store y of the launched norms of a joint graph in the 16-bit dtype to which everything that reads it casts it. Returns
    of how many."""
    count = 0
    for node in list(graph.nodes):
        found = launched(node)
        y = None if found is None or qualified_name(found[0]) != FORWARD else result_of(node, "y_ptr")
        dtype = None if y is None else _read_in(y)
        if found is not None and y is not None and dtype is not None and y.meta["val"].is_contiguous():
            _store(node, y, found[1]["x_ptr"], dtype)
            count += 1
    return count


def _views(y: fx.Node) -> list[fx.Node]:
    """A node, and its views."""
    found = [y]
    for member in found:
        found += [u for u in member.users if is_view(u)]
    return found


def _read_in(y: fx.Node) -> torch.dtype | None:
    """The dtype of 16 bits, of a y of 32, to which all that reads y or a view of it casts it; None where there is none, or
    where one of several casts is returned: whoever writes to it would write to the others."""
    views = _views(y)
    if not all(isinstance(value := member.meta["val"], Tensor) and value.dtype == torch.float32 for member in views):
        return None  # parts, or its bits as numbers of another kind
    casts = [u for member in views for u in member.users if u not in views]
    dtypes = {cast_to(u) for u in casts}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    returned = set(y.graph.output_node().all_input_nodes)
    if len(casts) > 1 and any(returned.intersection(_views(cast)) for cast in casts):
        return None
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def _store(node: fx.Node, y: fx.Node, rows: fx.Node, dtype: torch.dtype) -> None:
    """Let a launch write y in ``dtype``, and whoever cast it read it as it is. ``rows``: of y's shape."""
    views = _views(y)
    launch_into(node, "y_ptr", memory_for(y.meta["val"].to(dtype), rows, node))
    for member in views:
        member.meta["val"] = member.meta["val"].to(dtype)
        for cast in [u for u in member.users if u not in views]:
            cast.replace_all_uses_with(member)
            node.graph.erase_node(cast)
