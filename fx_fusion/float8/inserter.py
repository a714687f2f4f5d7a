"""Functions of nodes, traced and put into a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fx_fusion.torch_internals.partitioner import checkpoint_of, set_checkpoint
from fx_fusion.torch_internals.traced_kernels import functional_graph, insert


class Inserter:
    """Puts functions of nodes into one graph; equal ones are traced once."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self._traced: dict[tuple[Any, ...], fx.GraphModule] = {}

    def insert(
        self, function: Callable[..., Any], operands: Sequence[fx.Node], after: fx.Node, like: fx.Node
    ) -> list[fx.Node]:  # fmt: skip
        """The nodes of a function of ``operands``, put behind ``after`` and them; the last ones are its results. Those for a
        checkpointed node, ``like``, are computed again with it, or for it, and never saved."""
        values = [n.meta["val"] for n in operands]
        key = function, *((str(v.shape), str(v.stride()), v.dtype, v.device) for v in values)
        if key not in self._traced:
            self._traced[key] = functional_graph(function, values)
        made = insert(self._traced[key], self.graph, operands, max(*operands, after))
        if (said := checkpoint_of(like)) is not None:
            for node in made:
                set_checkpoint(node, said)
        return made
