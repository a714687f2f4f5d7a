"""Bodies of checkpointed calls: what their inputs are outside, and outer values that are handed in."""

import pytest
import torch
from torch import fx

from fx_fusion.graph.outside import carried_in, views_of
from fx_fusion.graph.terms import example
from tests.engine.graphs import capture

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def body(function=lambda a, b: a * b, **inputs):
    return fx.GraphModule(torch.nn.Module(), capture(function, **(inputs or {"a": (4, 8), "b": (4, 8)})).graph)


def calling(*bodies, operator=CHECKPOINT, operands=("x", "y")):
    """A module whose graph makes ``z = x + y`` and calls each of the bodies (names of attributes) with ``operands``."""
    root = torch.nn.Module()
    for name, module in dict(bodies).items():
        setattr(root, name, module)
    graph = capture(lambda x, y: (x + y,), x=(4, 8), y=(4, 8)).graph
    nodes = {n.name: n for n in graph.nodes}
    end = next(n for n in graph.nodes if n.op == "output")
    graph.owning_module = root
    with graph.inserting_before(end):
        results = []
        for name, _ in bodies:
            results.append(graph.call_function(operator, (graph.get_attr(name), *(nodes[o] for o in operands))))
            results[-1].meta["example_value"] = (example(nodes["x"]),)
    end.args = (tuple(results),)
    module = fx.GraphModule(root, graph)
    return module, {n.name: n for n in module.graph.nodes}


def test_a_checkpointed_body_knows_the_graph_around_it():
    module, outer = calling(("body", body()), operands=("x", "add"))
    views = views_of(module)
    assert list(views) == [module, module.body], "outer graphs first"
    assert views[module].outside is None
    outside = views[module.body].outside
    assert outside.view is views[module]
    assert [call.target for call in outside.calls] == [CHECKPOINT]
    assert {p.name: o for p, o in outside.operands.items()} == {"a": outer["x"], "b": outer["add"]}


def test_a_checkpointed_body_runs_in_the_region_of_its_call():
    module, outer = calling(("body", body()), operands=("x", "add"))
    with module.graph.inserting_before(outer["add"]):
        module.graph.call_function(torch._C._set_grad_enabled, (False,))
        module.graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    effects = views_of(module)[module.body].effects
    expected = (False, ("autocast", ("cpu", torch.bfloat16, True, None)))
    assert {effects.region[node] for node in module.body.graph.nodes} == {expected}


def test_a_body_that_is_called_twice_knows_what_both_calls_hand_in():
    inside = body()
    module, outer = calling(("body", inside), ("body", inside), operands=("x", "add"))
    last = module.graph.find_nodes(op="call_function", target=CHECKPOINT)[-1]
    last.args = (*last.args[:-1], outer["y"])
    views = views_of(module)
    outside = views[module.body].outside
    assert {p.name: o for p, o in outside.operands.items()} == {"a": outer["x"], "b": None}
    assert carried_in(views[module.body], outer["add"]).op == "placeholder"
    assert [call.args[-1] for call in outside.calls] == [outer["add"]] * 2


@pytest.mark.parametrize("why", ["another operator", "other operands"])
def test_bodies_that_stand_alone(why):
    inside = body()
    if why == "another operator":
        module, _ = calling(("body", inside), operator=torch.ops.higher_order.wrap)
    else:
        module, _ = calling(("body", inside), operands=("x", "y", "add"))
    views = views_of(module)
    assert module.body in views
    assert views[module.body].outside is None


def nested():
    """A body that checkpoints a body: what the innermost multiplies are x and y of the outermost."""
    inner, _ = calling(("innermost", body()), operands=("x", "add"))
    module, outer = calling(("inner", inner))
    return module, outer, views_of(module)


def test_bodies_of_bodies():
    module, _, views = nested()
    assert len(views) == 3
    innermost = views[module.inner.innermost]
    assert innermost.outside.view is views[module.inner]
    assert innermost.outside.view.outside.view is views[module]


def product_of(view):
    return next(n for n in view.graph.nodes if n.op == "call_function")


def test_a_value_that_the_body_has_already():
    module, outer = calling(("body", body()), operands=("x", "add"))
    view = views_of(module)[module.body]
    before = view.outside.calls[0].args
    own = product_of(view)
    assert carried_in(view, own) is own
    assert carried_in(view, outer["add"]) is view.graph.find_nodes(op="placeholder")[1]
    assert view.outside.calls[0].args == before


def test_a_value_that_the_body_is_handed():
    module, outer = calling(("body", body()))
    view = views_of(module)[module.body]
    first, last = view.graph.find_nodes(op="placeholder")
    new = carried_in(view, outer["add"])
    assert view.graph.find_nodes(op="placeholder") == [first, last, new], "behind the others: the call has it last"
    assert view.outside.calls[0].args[-1] is outer["add"]
    assert example(new) is example(outer["add"])
    assert view.outside.operands[new] is outer["add"]
    assert view.effects.region[new] == view.effects.region[last]
    assert carried_in(view, outer["add"]) is new, "once"
    assert len(view.outside.calls[0].args) == 4
    view.graph.lint()
    module.graph.lint()


def test_a_value_that_goes_through_two_bodies():
    module, outer, views = nested()
    innermost = views[module.inner.innermost]
    new = carried_in(innermost, outer["add"])
    assert new.graph is innermost.graph
    between = innermost.outside.operands[new]
    assert between.graph is module.inner.graph
    assert between.op == "placeholder"
    assert innermost.outside.view.outside.operands[between] is outer["add"]
    assert innermost.outside.calls[0].args[-1] is between


def test_a_value_of_another_graph():
    module, outer = calling(("body", body()))
    stranger = capture(lambda x: x + 1, x=(4, 8)).result
    with pytest.raises(ValueError, match="is in no graph around this one"):
        carried_in(views_of(module)[module.body], stranger)


def test_values_are_what_they_were_with_the_new_operand():
    module, outer = calling(("body", body()))
    view = views_of(module)[module.body]
    new = carried_in(view, outer["add"])
    product = product_of(view)
    product.args = (product.args[0], new)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    given = {n.name: v for n, v in zip(module.graph.find_nodes(op="placeholder"), (x, y), strict=True)}
    operands = [x + y if o is outer["add"] else given[o.name] for o in view.outside.calls[0].args[1:]]
    module.body.recompile()
    torch.testing.assert_close(module.body(*operands)[0], x * (x + y))
