"""Writes, aliases and regions of a graph."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fx_fusion.graph.effects import Effects, autocast_of, entered
from fx_fusion.graph.view import View
from tests.engine.graphs import BF16, F16, autocast, beside, capture, method, no_grad, tensor

X, XY = {"x": (4, 8)}, {"x": (4, 8), "y": (4, 8)}


@torch.library.custom_op("fx_fusion_tests_effects::scale", mutates_args=("a", "c"))
def scale(a: torch.Tensor, b: torch.Tensor, c: list[torch.Tensor]) -> None:
    a.mul_(3)


@scale.register_fake
def _(a, b, c):
    return None


OPS = torch.ops.fx_fusion_tests_effects
WRITES = {
    # by schema
    "overload": (lambda x, y: beside(x, torch.ops.aten.add_.Tensor, x, y), "x"),
    "packet": (lambda x, y: beside(x, torch.ops.aten.mul_, x, 2), "x"),
    "keyword": (lambda x, y: beside(x, torch.ops.aten.add.out, x, x, out=y), "y"),
    "custom op": (lambda x, y: (beside(x, OPS.scale.default, x, y, []), x)[1], "x"),
    "custom op, in a list": (lambda x, y: (beside(x, OPS.scale.default, x, x, [y]), x)[1], "xy"),
    "functional overload": (lambda x, y: beside(x, torch.ops.aten.add.Tensor, x, y), ""),
    # by name
    "method": (lambda x, y: x.add_(y), "x"),
    "copy_": (lambda x, y: y.copy_(x), "y"),
    "function": (lambda x, y: torch.relu_(x), "x"),
    "F": (lambda x, y: F.elu_(x), "x"),
    "input=": (lambda x, y: beside(x, torch.clamp_, input=x, min=0.5), "x"),
    "operator": (lambda x, y: beside(x, operator.iadd, x, y), "x"),
    "setitem": (lambda x, y: (beside(x, operator.setitem, x, 0, y[0]), x)[1], "x"),
    "__setitem__": (lambda x, y: (method(x, "__setitem__", 0, 1.0), x)[1], "x"),
    "__imul__": (lambda x, y: method(x, "__imul__", y), "x"),
    "foreach": (lambda x, y: (torch._foreach_add_([x, y], 1.0), x)[1], "xy"),
    "out": (lambda x, y: torch.add(x, x, out=y), "y"),
    "and_ of operator": (lambda x, y: (x > 0) & (y > 0), ""),
    "or_ of operator": (lambda x, y: beside(x, operator.or_, x > 0, y > 0), ""),
    "dunder": (lambda x, y: method(x, "__add__", y), ""),
    # by asking
    "inplace=True": (lambda x, y: F.relu(x, inplace=True), "x"),
    "inplace=False": (lambda x, y: F.relu(x, inplace=False), ""),
    "by position": (lambda x, y: beside(x, F.hardtanh, x, -1.0, 1.0, True), "x"),
    "another True": (lambda x, y: beside(x, F.dropout, x, 0.5, True), ""),
    "dropout by position": (lambda x, y: beside(x, F.dropout, x, 0.5, True, True), "x"),
    # running statistics, and weights that are renormalized
    "batch_norm": (lambda x, y: beside(x, F.batch_norm, x, y[0], y[1], training=True), "01"),
    "embedding": (lambda x, y: F.embedding((x[0] > 1).long(), y), ""),
    "batch_norm of aten": (lambda x, y: beside(x, torch.ops.aten.batch_norm.default, x, None, None, y[0], y[1], True, 0.1, 1e-5, False), "01"),
    "fused optimizer": (lambda x, y: beside(x, torch._fused_sgd_, [x], [y], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False), "xy"),
    "embedding_bag": (lambda x, y: F.embedding_bag((x > 1).long(), y), ""),
    "embedding_bag, max_norm": (lambda x, y: beside(x, F.embedding_bag, (x > 1).long(), y, None, 1.0), "ly"),
    "embedding, max_norm": (lambda x, y: beside(x, F.embedding, (x[0] > 1).long(), y, max_norm=1.0), "ly"),
}  # fmt: skip


def written(graph):
    return {target for write in graph.view.effects.writes for target in graph.view.effects.mutated(write)}


@pytest.mark.parametrize("name", WRITES)
def test_who_writes_where(name):
    function, targets = WRITES[name]
    graph = capture(function, **XY)
    names = {"x": "x", "y": "y", "0": "getitem", "1": "getitem_1", "l": "long"}
    assert {t.name for t in written(graph)} == {names[t] for t in targets}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m, v: beside(x, F.instance_norm, x, m, v, use_input_stats=True),
        lambda x, m, v: beside(x, torch.batch_norm, x, None, None, m, v, True, 0.1, 1e-5, False),
    ],
    ids=["F.instance_norm", "torch.batch_norm"],
)
def test_running_statistics_of_other_norms(function):
    graph = capture(function, x=(2, 4, 8), m=(4,), v=(4,))
    assert {t.name for t in written(graph)} == {"m", "v"}
    m, v = torch.zeros(4), torch.ones(4)
    graph.run(torch.randn(2, 4, 8), m, v)
    assert m.any(), "torch writes to them"


# -- higher-order ops ----------------------------------------------------------------------------------------------
def body_of(function):
    return fx.GraphModule(torch.nn.Module(), capture(function, a=(4, 8)).graph)


def with_body(target, body):
    """A graph that gives ``body`` and its input to a higher-order op."""
    root = torch.nn.Module()
    root.body = body
    graph = fx.Graph(root)
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(4, 8)
    call = graph.call_function(target, (graph.get_attr("body"), x))
    graph.output((call,))
    module = fx.GraphModule(root, graph)  # owns a copy of the graph
    return Effects(module.graph, {n: i for i, n in enumerate(module.graph.nodes)}), module


BODIES = {
    "reads": (lambda a: a * 2, False),
    "writes": (lambda a: a.mul_(2), True),
    "writes to a view": (lambda a: (a[0].mul_(2), a)[1], True),
    "writes to its own": (lambda a: (a + 1).mul_(2), False),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("op", ["tag_activation_checkpoint", "cond", "wrap"])
def test_a_known_higher_order_op_writes_where_its_body_does(name, op):
    function, writes = BODIES[name]
    effects, module = with_body(getattr(torch.ops.higher_order, op), body_of(function))
    x = next(iter(module.graph.nodes))
    assert any(x in effects.mutated(write) for write in effects.writes) == writes


def test_an_unknown_higher_order_op_writes_to_all_of_its_operands():
    class Unheard(torch._ops.HigherOrderOperator):
        def __init__(self):
            super().__init__("fx_fusion_tests_unheard")

        def __call__(self, *args):
            return super().__call__(*args)

    effects, module = with_body(Unheard(), body_of(lambda a: a * 2))
    (write,) = effects.writes
    assert next(iter(module.graph.nodes)) in effects.mutated(write)


# -- aliases -------------------------------------------------------------------------------------------------------
def test_views_of_views_share_memory():
    graph = capture(lambda x: (x.chunk(2, -1)[0].t(), x[0], x + 1, x.contiguous(), x.clone()), **X)
    aliases = {n.name for n in graph.view.effects.aliases(graph["x"])}
    assert aliases == {"x", "chunk", "getitem", "t", "getitem_1", "contiguous"}
    assert graph.view.effects.aliases(graph["add"]) == [graph["add"]]


def test_what_the_graph_returns():
    graph = capture(lambda x: ((x * 2).view(-1), (x + 1).sum()), **X)
    effects = graph.view.effects
    assert effects.returned(graph["mul"]), "a view of it"
    assert not effects.returned(graph["add"])


def test_writes_between_two_positions():
    graph = capture(lambda x, y: (a := x * 1, y.add_(1), b := a[0], b.add_(1), a + y), **XY)
    effects, order = graph.view.effects, graph.view.order
    a, y, b = graph["mul"], graph["y"], graph["getitem"]
    everywhere = 0, len(order)
    assert effects.writes_between(*everywhere, {y}) is graph["add_"]
    assert effects.writes_between(*everywhere, {a}) is graph["add__1"], "through a view"
    assert effects.writes_between(*everywhere, {graph["x"]}) is None
    assert effects.writes_between(order[a], order[graph["add__1"]], {a}) is None, "not yet"
    assert effects.writes_between(*everywhere, {graph["add__1"]}) is None, "it is what it left"
    assert effects.writes_between(*everywhere, {b, graph["add__1"]}) is graph["add__1"]
    assert effects.writes_between(*everywhere, {a, y}, but={graph["add_"]}) is graph["add__1"]
    assert effects.written_after(order[graph["add_"]], [y]) is None
    assert effects.written_after(order[a], [y]) is graph["add_"]
    assert effects.written_after(order[y], []) is None


def test_a_node_that_is_adopted():
    graph = capture(lambda x: (x * 2, x + 1), **X)
    view = graph.view
    with graph.graph.inserting_after(graph["mul"]):
        node = graph.graph.call_method("t", (graph["mul"],))
    node.meta["example_value"] = graph["mul"].meta["example_value"].t()
    view.adopt(node, graph["mul"])
    assert view.effects.region[node] == view.effects.region[graph["mul"]]
    assert node in view.effects.aliases(graph["mul"])
    assert view.order[node] == view.order[graph["mul"]]


# -- regions -------------------------------------------------------------------------------------------------------
def test_grad_mode_and_autocast_are_regions():
    def function(x):
        a = x + 1
        with no_grad(x):
            b = x + 1
            with autocast(x):
                c = x + 1
        with autocast(x, F16):
            d = x + 1
        return a, b, c, d, x + 1

    graph = capture(function, x=tensor(4, 8, grad=True))
    a, b, c, d, e = (graph.view.effects.region[n] for n in graph.results)
    assert [r[0] for r in (a, b, c, d, e)] == [True, False, False, True, True]
    assert a == e
    assert len({a, b, c, d}) == 4
    assert autocast_of(a, "cpu") == ("cpu", torch.float32, False)
    assert autocast_of(c, "cpu") == ("cpu", BF16, True)
    assert autocast_of(d, "cpu") == ("cpu", F16, True)
    with entered(b):
        assert not torch.is_grad_enabled()
        with entered(e):
            assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def named(name):
    def function(*args):
        return None

    function.__name__ = name
    return function


def with_calls(*names):
    graph = fx.Graph()
    x = graph.placeholder("x")
    inside = []
    for name in names:
        graph.call_function(named(name), ())
        inside.append(graph.call_method("neg", (x,)))
    graph.output(tuple(inside))
    region = View(graph).effects.region
    return region[x], [region[node] for node in inside]


@pytest.mark.parametrize(
    ("enter", "leave"),
    [
        ("_enter_inference_mode", "_exit_inference_mode"), ("_vmap_increment_nesting", "_vmap_decrement_nesting"),
        ("_grad_increment_nesting", "_grad_decrement_nesting"), ("_enter_what_comes_next", "_exit_what_comes_next"),
        ("_push_something", "_pop_something"),
    ],
)  # fmt: skip
def test_what_enters_something_else_is_a_region_of_its_own(enter, leave):
    outside, (inside, nested, after_one, after_both) = with_calls(enter, enter, leave, leave)
    assert outside == after_both
    assert len({outside, inside, nested}) == 3
    assert after_one == inside
    assert any(isinstance(entry, str) for entry in inside), "nothing is fused there"


def test_other_functions_change_no_region():
    outside, inside = with_calls("_foo", "enter_something", "set_grad_enabled", "exit", "_exit_something")
    assert set(inside) == {outside}, "an exit without an enter, too"


@pytest.mark.parametrize("name", ["_change_grad_enabled", "_fast_autocast", "_unset_autocast_dtype"])
def test_another_name_that_speaks_of_grad_mode_or_autocast_raises(name):
    with pytest.raises(RuntimeError, match=name):
        with_calls(name)
