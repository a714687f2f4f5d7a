"""Compile equal layers once: the stretches of a graph that repeat become calls of one body.

It is done after AOTAutograd has split the joint graph, right before Inductor lowers a part of it. What is saved for the
backward, computed again, multiplied in float8 or fused is decided by then, so none of it changes. Bodies have no autograd.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fx_fusion.inductor.repeats import Stretch, Work, computes_nothing, inputs_of, repeated
from fx_fusion.torch_internals.subgraphs import call_body, graph_of, is_call, is_seed, of_one_seed

_FEWEST = 60  # nodes of a graph that is looked at


@dataclass(frozen=True)
class Body:
    """Equal stretches that became calls: their number, the nodes of each, and whether these are a backward's."""

    calls: int
    nodes: int
    backward: bool


@dataclass
class Layers:
    """The bodies of all graphs that Inductor makes of one graph, or why there are none."""

    bodies: list[Body] = field(default_factory=list)
    trouble: str = ""

    def sentences(self) -> list[str]:
        """Return a line for the report, or none."""
        if self.trouble:
            return [f"each layer is compiled by itself: {self.trouble}"]
        parts = []
        for backward in (False, True):
            of = [body for body in self.bodies if body.backward is backward]
            if of:
                calls, name = sum(body.calls for body in of), "backward" if backward else "forward"
                parts.append(f"{name} {calls} calls of {len(of)} {'body' if len(of) == 1 else 'bodies'}")
        return [f"equal layers are compiled once: {', '.join(parts)}"] if parts else []


def compile_layers_once(gm: fx.GraphModule, *, backward: bool = False, epilogues: bool = False) -> list[Body]:
    """Replace the stretches that repeat in a graph by calls of bodies, which the module then holds. Return the bodies; none,
    and an unchanged graph, where too little repeats.

    Args:
        gm: a graph of AOTAutograd's, with a fake tensor as ``val`` of each node.
        backward: whether it is a backward, which the bodies say.
        epilogues: whether Inductor may compute what follows a product in the product's kernel.
    """
    graph = gm.graph
    if len(graph.nodes) < _FEWEST or any(map(is_call, graph.nodes)):
        return []
    work = Work(graph, epilogues=epilogues)
    groups = repeated(work)
    if not groups:
        return []
    bodies = {}
    for number, group in enumerate(groups):
        name = f"fx_fusion_layer_{number}"
        results = zip(*(stretch.results for stretch in group), strict=True)
        gm.add_submodule(name, _body(group[0], [i for i, each in enumerate(results) if any(map(work.is_read, each))]))
        bodies[name] = group
    gm.graph = _calling(graph, bodies)
    gm.graph.lint()
    gm.recompile()
    return [Body(len(group), len(group[0].nodes), backward) for group in groups]


def _body(stretch: Stretch, handed_on: list[int]) -> fx.GraphModule:
    """Return the module of a stretch: its operands are the placeholders, its results a tuple. ``handed_on``: those results
    that are read in the graph itself."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, operand in enumerate(stretch.operands):
        made[operand] = graph.placeholder(f"operand_{i}")
        made[operand].meta = dict(operand.meta)
        if is_seed(operand):  # of the part of the seeds that its caller hands over
            made[operand].meta["val"] = of_one_seed(*_seeds_and_index(operand))
            made[operand] = graph.call_function(operand.target, (made[operand], 0))  # type: ignore[arg-type]
            made[operand].meta = dict(operand.meta)
    for node in stretch.nodes:
        _copy(graph, node, made)
    results = [made[n] for n in stretch.results]
    output = graph.output(tuple(results))
    output.meta["user_visible_output_idxs"] = handed_on  # in the strides that other calls take
    held = {str(node.target): graph_of(of) for of, node in made.items() if node.op == "get_attr"}
    return fx.GraphModule(held, graph)


def _calling(old: fx.Graph, bodies: dict[str, list[Stretch]]) -> fx.Graph:
    """Return a graph with calls in the places of stretches."""
    ends = {stretch.nodes[-1]: (name, stretch) for name, group in bodies.items() for stretch in group}
    inside = {n for group in bodies.values() for stretch in group for n in stretch.nodes}
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in old.nodes:
        if node in ends:
            name, stretch = ends[node]
            operands = [_seed(graph, n, made) if is_seed(n) else _copy(graph, n, made) for n in stretch.operands]
            call = call_body(graph, name, operands, [n.meta["val"] for n in stretch.results])
            for i, result in enumerate(stretch.results):
                made[result] = graph.call_function(operator.getitem, (call, i))
                made[result].meta = dict(result.meta)
        elif node not in inside and not (node.op != "placeholder" and computes_nothing(node) and node.users):
            _copy(graph, node, made)
    return graph


def _seeds_and_index(seed: fx.Node) -> tuple[Any, int]:
    seeds, index = seed.args
    return seeds.meta["val"], index  # type: ignore[union-attr, return-value]


def _seed(graph: fx.Graph, seed: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a view of the seeds that has one of them: which one is a literal of the op that takes it."""
    seeds, index = _seeds_and_index(seed)
    all_of_them = _copy(graph, seed.all_input_nodes[0], made)
    part = graph.call_function(torch.ops.aten.slice.Tensor, (all_of_them, 0, index, index + 1))
    part.meta["val"] = of_one_seed(seeds, index)
    return part


def _copy(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the copy of a node. Where there is none, make it, and first what it reads that is made on demand."""
    if node not in made:
        for operand in inputs_of(node):
            if operand not in made:
                _copy(graph, operand, made)
        made[node] = graph.node_copy(node, made.__getitem__)
    return made[node]
