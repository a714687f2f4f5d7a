"""A copy of a graph module that shares parameters and metadata, for the report and for the way back."""

from __future__ import annotations

from torch import fx

from fx_fusion.torch_internals.dynamo import take_sources
from fx_fusion.torch_internals.nodes import empty_like, take_codegen


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph and, recursively, the graphs of the modules inside; share everything else."""
    graph = empty_like(gm.graph)
    copied: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, copied)
    if result is not None:
        out = graph.output(result)
        out.meta.update(next(n for n in reversed(gm.graph.nodes) if n.op == "output").meta)
    take_codegen(graph, gm.graph)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    take_sources(copy, gm)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copy, name, snapshot(child))
    return copy
