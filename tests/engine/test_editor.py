"""Editing a graph: what is inserted looks like what it replaces, and a mismatch changes nothing."""

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.graph.masks.assumed import ONES, Assumed
from fx_fusion.graph.view import View
from fx_fusion.rewrite.assumptions import Assumptions
from fx_fusion.rewrite.editor import Editor, Mismatch, differs
from fx_fusion.torch_internals.nodes import is_erased
from tests.engine.graphs import BF16, autocast, capture, no_grad, tensor

X = {"x": (4, 8)}


def editing(function, **inputs):
    graph = capture(function, **(inputs or X))
    return graph, Editor(graph.view)


def same_values(graph, function, *shapes):
    graph.graph.lint()
    values = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(graph.run(*(v.clone() for v in values))[0], function(*values))


def test_a_node_that_takes_anothers_place():
    graph, editor = editing(lambda x: torch.square(x * 2) + 1)
    old = graph["square"]
    old.meta["stack_trace"], old.meta["mine"] = "a line", "not copied"
    with graph.graph.inserting_before(old):
        new = editor.call(torch.mul, (graph["mul"], graph["mul"]), like=old)
    assert new.meta["stack_trace"] == "a line"
    assert "mine" not in new.meta
    editor.replace(old, new)
    assert graph["add"].all_input_nodes == [new]
    assert not old.users
    editor.erase([old, graph["mul"]])
    assert is_erased(old)
    assert list(graph.graph.nodes)[1:-1] == [graph["mul"], new, graph["add"]]
    same_values(graph, lambda x: torch.square(x * 2) + 1, (4, 8))


def test_it_takes_the_name_too():
    graph, editor = editing(lambda x: torch.square(x * 2) + 1)
    old = graph["square"]
    with graph.graph.inserting_before(old):
        new = editor.call(torch.mul, (graph["mul"], graph["mul"]), like=old)
    editor.replace(old, new)
    assert (new.name, old.name) == ("square", "square_unfused")


def test_now_is_what_holds_the_value_after_all_rewrites():
    graph, editor = editing(lambda x: (x * 2) + 1)
    first, nodes = graph["mul"], [graph["mul"]]
    for factor in (torch.mul, torch.multiply):
        with graph.graph.inserting_before(nodes[-1]):
            nodes.append(editor.call(factor, (graph["x"], 2), like=first))
        editor.replace(nodes[-2], nodes[-1])
    assert editor.now(first) is editor.now(nodes[1]) is nodes[2]
    assert editor.now(graph["x"]) is graph["x"]
    assert editor.now(3) == 3
    with graph.graph.inserting_after(nodes[2]):
        assert editor.call(torch.cat, ([first, nodes[1]],), like=first).args[0] == [nodes[2], nodes[2]], "operands as they are now"


def test_once_makes_what_several_sites_share():
    graph, editor = editing(lambda x: x + 1)
    made = []

    def make():
        with graph.graph.inserting_before(graph["add"]):
            made.append(editor.call(torch.neg, (graph["x"],), like=graph["add"]))
        return made[-1]

    assert editor.once("a", make) is editor.once("a", make)
    assert editor.once("b", make) is made[1]
    assert len(made) == 2
    graph.graph.erase_node(made[0])
    assert editor.once("a", make) is made[2], "the first one was erased with its site"
    nested = editor.once("c", lambda: (make(), 3))
    assert editor.once("c", make) is nested


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (lambda x: x.half(), "is torch.float16 where the graph has torch.float32"),
        (lambda x: x.to("meta"), "is on meta where the graph has cpu"),
        (lambda x: x[:2], "has shape (2, 8) where the graph has (4, 8)"),
        (lambda x: x[None], "has shape (1, 4, 8) where the graph has (4, 8)"),
        (lambda x: x.t().contiguous().t(), "has stride (1, 4) where the graph has (8, 1)"),
        (lambda x: x * 3, None),
    ],
)
def test_what_differs_is_refused_and_said(make, difference):
    graph, editor = editing(lambda x: (x * 2, make(x)))
    old, new = graph.results
    if difference is None:
        editor.replace(old, new)
        assert graph.results == (new, new)
        return
    with pytest.raises(Mismatch) as refused:
        editor.replace(old, new)
    assert str(refused.value) == f"the op's result {difference}"
    assert graph.results == (old, new)
    assert old.name == "mul"


def test_strides_of_a_single_element_do_not_count():
    x = torch.empty(4, 1, 8)
    assert differs(x, torch.empty_strided((4, 1, 8), (8, 5, 1))) is None
    assert "stride" in differs(x, torch.empty_strided((4, 1, 8), (9, 8, 1)))


def test_symbolic_results_are_compared_without_a_guard():
    graph = capture(lambda x, y: (x * 2, x + 1, y + 1), dynamic=True, x=(3, 5), y=(7, 5))
    env = graph["x"].meta["example_value"].fake_mode.shape_env
    guards = len(env.guards)
    mul, add, other = (r.meta["example_value"] for r in graph.results)
    assert differs(mul, add) is None
    assert "has shape" in differs(mul, other)
    assert len(env.guards) == guards


@pytest.mark.parametrize(
    "call",
    [
        lambda editor, x: editor.call(torch.mm, (x, x), like=x), lambda editor, x: editor.method("view", (x, 5, 5), like=x),
        lambda editor, x: editor.call(torch.mul, (x,), like=x), lambda editor, x: editor.call(torch.transpose, (x, 0, 5), like=x),
    ],
)  # fmt: skip
def test_a_call_that_does_not_take_its_operands(call):
    graph, editor = editing(lambda x: x + 1)
    with pytest.raises(Mismatch, match="does not take these operands"), graph.graph.inserting_before(graph["add"]):
        call(editor, graph["x"])


def test_inserted_nodes_are_traced_in_the_region_of_their_site():
    def function(x):
        with no_grad(x):
            a = x * 2
        with autocast(x):
            b = x * 3
        return a, b, x * 4

    graph, editor = editing(function, x=tensor(8, 8, grad=True))
    made = []
    for like in graph.results:
        with graph.graph.inserting_before(like):
            made.append(editor.call(torch.mm, (graph["x"], graph["x"]), like=like).meta["example_value"])
    assert [m.requires_grad for m in made] == [False, True, True]
    assert [m.dtype for m in made] == [torch.float32, BF16, torch.float32]


def test_cast_and_item():
    graph, editor = editing(lambda x: x + 1)
    with graph.graph.inserting_before(graph["add"]):
        assert editor.cast(graph["x"], torch.float32, like=graph["add"]) is graph["x"]
        assert editor.cast(graph["x"], BF16, like=graph["add"]).meta["example_value"].dtype == BF16
        halves = editor.method("chunk", (graph["x"], 2, -1), like=graph["add"])
        assert editor.item(halves, 1, like=graph["add"]).meta["example_value"].shape == (4, 4)


def test_a_symbolic_size_is_read_off_a_tensor():
    graph = capture(lambda x: x.view(-1) + 1, dynamic=True, x=(3, 5))
    editor = Editor(graph.view)
    size = graph["x"].meta["example_value"].shape[0]
    with graph.graph.inserting_before(graph["add"]):
        node = editor.method("expand", (graph["x"], size, 5), like=graph["add"])
    assert isinstance(node.args[1], torch.fx.Node), "a graph that holds a symbol can't be run"
    assert node.args[1].args == (graph["x"], 0)


def test_restride_copies_behind_the_node_for_every_user():
    def function(x):
        return x.t().contiguous().t() + 1

    graph, editor = editing(function)
    node, wanted = graph["x"], torch.empty_strided((4, 8), (1, 4))
    copy = editor.restride(node, wanted, like=graph["add"])
    assert copy.meta["example_value"].stride() == (1, 4)
    assert graph["t"].all_input_nodes == [copy]
    assert editor.now(node) is copy
    assert copy.all_input_nodes[0].target == "contiguous"
    same_values(graph, function, (4, 8))


def attention(q, mask):
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def test_change_call():
    graph, editor = editing(lambda q, mask: attention(q, mask) * 2, q=(1, 2, 4, 8), mask=(4, 4))
    call = graph["scaled_dot_product_attention"]
    editor.change_call(call, attn_mask=None, is_causal=True)
    assert call.kwargs["attn_mask"] is None
    assert call.kwargs["is_causal"] is True
    assert call.args == (graph["q"],) * 3
    assert not graph["mask"].users
    same_values(graph, lambda q, mask: F.scaled_dot_product_attention(q, q, q, is_causal=True) * 2, (1, 2, 4, 8), (4, 4))
    editor.change_call(call, scale=0.5)
    assert (call.kwargs["scale"], call.kwargs["is_causal"]) == (0.5, True), "on top of the first change"


@pytest.mark.parametrize(
    "changes",
    [{"dim": 0}, {"dim": 7}, {"dim": 0, "restride": True}],
    ids=["another shape", "an error", "no layout helps"],
)
def test_a_call_whose_result_would_differ_stays_as_it_was(changes):
    graph, editor = editing(lambda x: x.sum(-1) + 1)
    before, names, known = (graph["sum_1"].args, graph["sum_1"].kwargs), graph.names, graph["sum_1"].meta["example_value"]
    with pytest.raises(Mismatch):
        editor.change_call(graph["sum_1"], **changes)
    assert (graph["sum_1"].args, graph["sum_1"].kwargs) == before
    assert graph["sum_1"].meta["example_value"] is known
    same_values(graph, lambda x: x.sum(-1) + 1, (4, 8))
    if not changes.get("restride"):
        assert graph.names == names


def test_erase_takes_only_what_nothing_uses():
    graph, editor = editing(lambda x: ((y := torch.exp(x * 2)) + 1, y.neg(), x.mul_(3))[:1])
    editor.erase(graph.graph.nodes)
    assert graph.names == ["x", "mul", "exp", "add", "output"], "what was given, dead ones first, users before operands"
    graph, editor = editing(lambda x: ((y := torch.exp(x * 2)) + 1, y.neg(), x.mul_(3))[:1])
    editor.erase([graph["neg"], graph["exp"], graph["x"]])
    assert graph.names == ["x", "mul", "exp", "add", "mul_", "output"], "a write without users stays"
    same_values(graph, lambda x: torch.exp(x * 2) + 1, (4, 8))


def test_a_graph_without_fake_tensors():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    with pytest.raises(RuntimeError, match="not captured by Dynamo"):
        Editor(View(graph)).call(torch.neg, (x,), like=x)


def test_assumptions_are_noted():
    graph = capture(lambda x, mask: x * mask, x=(4, 8), mask=(4, 8))
    module = torch.fx.GraphModule(torch.nn.Module(), graph.graph)
    assumptions = Assumptions(module, allowed=True)
    editor = Editor(graph.view, assumptions)
    mask = module.graph.find_nodes(op="placeholder")[1]
    editor.assume([Assumed(mask, ONES)])
    assert assumptions.checks() == ((1, ONES),)
    assert not Editor(graph.view).assumptions.allowed
