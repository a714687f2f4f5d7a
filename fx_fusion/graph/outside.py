"""Bodies of checkpointed calls: map each input of a body to the outer graph's operand, so that masks built outside can be
proved inside, and hand additional outer values in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from fx_fusion.graph.terms import example
from fx_fusion.graph.view import Outside, View
from fx_fusion.torch_internals.fakes import set_example
from fx_fusion.torch_internals.nodes import checkpoint_operator


def views_of(gm: fx.GraphModule) -> dict[fx.GraphModule, View]:
    """The views of a module's graph and of the bodies inside it, outer graphs first; a body that one checkpointed call runs
    knows the graph around it."""
    views: dict[fx.GraphModule, View] = {}
    outside: dict[fx.GraphModule, Outside] = {}
    for module in gm.modules():  # outer modules come first
        if isinstance(module, fx.GraphModule):
            views[module] = View(module.graph, outside.get(module))
            for body, around in _checkpointed(module, views[module]):
                outside.setdefault(body, around)
    return views


def _checkpointed(module: fx.GraphModule, view: View) -> Iterator[tuple[fx.GraphModule, Outside]]:
    """The bodies that exactly one checkpointed call of this graph runs."""
    uses = Counter(n.target for n in module.graph.nodes if n.op == "get_attr" for _ in n.users)
    operator = checkpoint_operator()
    for call in module.graph.nodes if operator is not None else ():
        if call.target is not operator:
            continue
        attribute, *operands = call.args
        if not isinstance(attribute, fx.Node) or attribute.op != "get_attr" or uses[attribute.target] != 1:
            continue
        body = module.get_submodule(str(attribute.target))
        if not isinstance(body, fx.GraphModule):
            continue
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        if len(inputs) == len(operands):
            yield body, Outside(view, call, dict(zip(inputs, operands, strict=True)))


def carried_in(view: View, node: fx.Node) -> fx.Node:
    """``node`` of this graph or of one around it, in this graph: the body takes it as one more operand if it has to. The
    node must exist where the body is called. Raises ValueError for a node of a graph that is not around this one."""
    if node.graph is view.graph:
        return node
    outside = view.outside
    if outside is None:
        raise ValueError(f"{node.name} is in no graph around this one")
    operand = carried_in(outside.view, node)
    for placeholder, given in outside.operands.items():
        if given is operand:
            return placeholder
    last = next(reversed(outside.operands))
    with view.graph.inserting_after(last):
        placeholder = view.graph.placeholder(f"{operand.name}_from_outside")
    set_example(placeholder, example(operand))
    view.adopt(placeholder, last)
    outside.call.args = (*outside.call.args, operand)
    outside.operands[placeholder] = operand
    return placeholder
