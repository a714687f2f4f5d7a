"""Graphs that are called by the graph around them: checkpointed blocks, and regions that are compiled once. Each input of a
body is mapped to the operand of its calls, so that masks built outside can be proved inside; more operands are handed in."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import fx

from fx_fusion.graph.terms import example
from fx_fusion.graph.view import Outside, View
from fx_fusion.torch_internals.fakes import set_example
from fx_fusion.torch_internals.nodes import checkpoint_operator
from fx_fusion.torch_internals.subgraphs import is_call


def views_of(gm: fx.GraphModule) -> dict[fx.GraphModule, View]:
    """Return the views of a module's graph and of the bodies inside it, outer graphs first. A body that is only called
    knows the graph around it. One whose calls stand in different grad modes or autocast regions has no view, because an op
    in it has no one meaning."""
    views: dict[fx.GraphModule, View] = {}
    outside: dict[fx.GraphModule, Outside] = {}
    ambiguous: set[fx.GraphModule] = set()
    for module in gm.modules():  # outer modules come first
        if isinstance(module, fx.GraphModule) and module not in ambiguous:
            called = list(_called(module))
            for body, calls in called:
                _give_examples(body, calls)
            view = views[module] = View(module.graph, outside.get(module))
            for body, calls in called:
                if len({view.effects.region[call] for call in calls}) > 1:
                    ambiguous |= {each for each in body.modules() if isinstance(each, fx.GraphModule)}
                else:
                    outside.setdefault(body, Outside(view, tuple(calls), _operands(body, calls)))
    return views


def _called(module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, list[fx.Node]]]:
    """Return the bodies that calls of this graph run, and nothing else, each with its calls."""
    uses = Counter(n.target for n in module.graph.nodes if n.op == "get_attr" for _ in n.users)
    calls = defaultdict[str, list[fx.Node]](list)
    for call in module.graph.nodes:
        attribute = call.args[0] if _first_operand(call) and call.args else None
        if isinstance(attribute, fx.Node) and attribute.op == "get_attr":
            calls[str(attribute.target)].append(call)
    for target, of in calls.items():
        body = module.get_submodule(target)
        if isinstance(body, fx.GraphModule) and uses[target] == len(of):
            count = len(body.graph.find_nodes(op="placeholder"))
            if all(len(call.args) - _first_operand(call) == count for call in of):
                yield body, of


def _first_operand(call: fx.Node) -> int:
    """Return the place of a call's first operand among its arguments; 0 for a node that calls no graph."""
    if call.target is checkpoint_operator() and call.target is not None:
        return 1
    return 2 if is_call(call) else 0


def _operands(body: fx.GraphModule, calls: list[fx.Node]) -> dict[fx.Node, object]:
    """Return for each input of a body what all its calls hand in; None where they hand in different things."""
    inputs = body.graph.find_nodes(op="placeholder")
    handed = zip(*(call.args[_first_operand(call) :] for call in calls), strict=True)
    return {n: of[0] if all(each is of[0] for each in of) else None for n, of in zip(inputs, handed, strict=True)}


def _give_examples(body: fx.GraphModule, calls: list[fx.Node]) -> None:
    """Give example values to the inputs of a body, to its calls and to their results, where Dynamo gave them none."""
    inputs, results = body.graph.find_nodes(op="placeholder"), body.graph.output_node().args[0]
    for call in calls:
        for given, operand in zip(inputs, call.args[_first_operand(call) :], strict=True):
            if example(given) is None and isinstance(operand, fx.Node):
                set_example(given, example(operand))
        if example(call) is None and isinstance(results, (tuple, list)):
            set_example(call, tuple(example(n) for n in results))  # type: ignore[arg-type]
            for user in call.users:
                if user.op == "call_function" and len(user.args) == 2 and isinstance(place := user.args[1], int):
                    set_example(user, example(results[place]))  # type: ignore[arg-type]


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
    for call in outside.calls:
        call.args = (*call.args, operand)
    outside.operands[placeholder] = operand
    return placeholder
