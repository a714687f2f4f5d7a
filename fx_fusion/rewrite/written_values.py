"""A tensor that was changed in place, read by its own name later on.

    y.add_(bias)                            becomes      changed = y.add_(bias)
    z = y * weight                                       z = changed * weight

Both names are of one tensor, so nothing is computed otherwise. Fusions see that the old value is dead, and read the call as
the sum that it computes.
"""

from __future__ import annotations

import operator

from torch import fx

from fx_fusion.graph.effects import Effects
from fx_fusion.graph.signatures import names_of
from fx_fusion.graph.terms import is_tensor


def read_what_was_written(gm: fx.GraphModule) -> None:
    """Let later readers of such a tensor read the result of the call, in place, in bodies too."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and any(_is_in_place(node) for node in module.graph.nodes):
            _rename(module.graph)
            module.recompile()


def _is_in_place(node: fx.Node) -> bool:
    """Return True for a call that changes its first operand, which the graph makes, and returns it."""
    written = node.args[0] if node.args else None
    if not isinstance(written, fx.Node) or written.op in ("placeholder", "get_attr") or node.target is operator.setitem:
        return False
    return names_of(node)[1] is not None and is_tensor(node) and is_tensor(written)


def _rename(graph: fx.Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    effects = Effects(graph, order)
    first: dict[fx.Node, fx.Node] = {}  # by a call whose result is read, the node that all readers of its tensor read before
    for call in graph.nodes:
        written = call.args[0] if _is_in_place(call) else None
        if written is None or effects.mutated(call) != (first.get(written, written),):
            continue
        if effects.region[call] == effects.region[written]:
            first[call] = first.get(written, written)
            for user in [user for user in written.users if order[user] > order[call]]:
                user.replace_input_with(written, call)
