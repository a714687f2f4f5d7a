"""Replacing one match: by its kernel or what its fusion emits, at a place where everything exists."""

from dataclasses import replace as changed

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.fusion.match import Match
from fx_fusion.fusion.matcher import Attempt
from fx_fusion.fusion.pattern import patterns_of
from fx_fusion.ops.layouts import copied
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.rewrite.replace import insertion_point, replace
from fx_fusion.rewrite.results_apart import keep_results_apart
from fx_fusion.testing import rewriting_backend
from tests.engine.graphs import autocast, capture, no_grad
from tests.engine.tiny import NARROW, REFUSING, STRIDED, calls, fusion_both, fusion_dyt, fusion_tanh

INPUTS = {"x": (4, 8), "w": (8,), "b": (8,)}
TANH = fusion_tanh()


def match_of(fusion, graph, at):
    (match,) = [m for m in Attempt(graph.view, patterns_of(fusion)[0], graph[at]).matches() if getattr(m.inputs.get("bias"), "name", "b") == "b"]
    return match


def replaced(function, fusion, at, changes=None, **inputs):
    """The graph and what ``replace`` says, after one match was replaced."""
    graph = capture(function, **(inputs or INPUTS))
    match = changed(match_of(fusion, graph, at), **(changes or {}))
    return graph, replace(fusion, match, Editor(graph.view))


def same_values(graph, function, *shapes):
    graph.graph.lint()
    values = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(graph.run(*values), function(*values))


def test_a_kernel_takes_the_place_of_its_match():
    def function(x, w, b):
        return torch.tanh(0.5 * x.clone()) * w + b, x + 1

    graph, reason = replaced(function, fusion_dyt(), "add")
    assert reason is None
    assert calls(graph.graph) == ["dyt"]
    (call,) = [n for n in graph.graph.nodes if n.target == torch.ops.fx_fusion_tests_tiny.dyt.default]
    assert [getattr(a, "name", a) for a in call.args] == ["x", 0.5, "w", "b"]
    assert not {"mul", "tanh", "mul_1"} & set(graph.names), "all of it is gone"
    assert graph.result is call
    same_values(graph, function, (4, 8), (8,), (8,))


def test_what_was_stepped_over_stays_where_something_else_uses_it():
    def function(x):
        y = x.clone()
        return torch.tanh(0.5 * y), y + 1

    graph, reason = replaced(function, TANH, "tanh", x=(4, 8))
    assert reason is None
    assert "clone" in graph.names
    same_values(graph, function, (4, 8))


def test_what_a_fusion_emits():
    def emit(editor, match):
        with editor.graph.inserting_before(match.root):
            editor.replace(match.root, editor.call(torch.sin, (match.inputs["x"],), like=match.root))

    graph, reason = replaced(lambda x: torch.tanh(0.5 * x) + 1, fusion_tanh(kernel=None, emit=emit), "tanh", x=(4, 8))
    assert reason is None
    assert next(n.target for n in graph.graph.nodes if n.op == "call_function") is torch.sin
    same_values(graph, lambda x: (torch.sin(x) + 1,), (4, 8))


@pytest.mark.parametrize(
    ("fusion", "reason"),
    [
        (fusion_tanh(kernel=NARROW), "the op's result is torch.float16 where the graph has torch.float32"),
        (fusion_tanh(kernel=STRIDED), "the op's result has stride (1, 4) where the graph has (8, 1)"),
    ],
)
def test_a_result_that_does_not_fit_leaves_the_graph_as_it_was(fusion, reason):
    def function(x):
        return torch.tanh(0.5 * x) + 1

    before = str(capture(function, x=(4, 8)).graph)
    graph, said = replaced(function, fusion, "tanh", x=(4, 8))
    assert said == reason
    assert str(graph.graph) == before
    same_values(graph, lambda x: (function(x),), (4, 8))


def test_an_emit_that_finds_out_late_leaves_the_graph_as_it_was():
    def emit(editor, match):
        with editor.graph.inserting_before(match.root):
            first = editor.call(torch.neg, (match.inputs["x"],), like=match.root)
            editor.call(torch.neg, (first,), like=match.root)
            raise Mismatch("too late")

    function = lambda x: torch.tanh(0.5 * x) + 1  # noqa: E731
    graph, said = replaced(function, fusion_tanh(kernel=None, emit=emit), "tanh", x=(4, 8))
    assert said == "too late"
    assert str(graph.graph) == str(capture(function, x=(4, 8)).graph)


def test_a_mistake_of_an_emit_is_raised():
    def emit(editor, match):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        replaced(lambda x: torch.tanh(0.5 * x), fusion_tanh(kernel=None, emit=emit), "tanh", x=(4, 8))


def test_a_refusing_kernel():
    graph, said = replaced(lambda x, w, b: torch.tanh(0.5 * x) * w + b, fusion_dyt(kernel=REFUSING), "add")
    assert said == "the op's result has shape (1, 8) where the graph has (4, 8)"
    assert calls(graph.graph) == []


def test_several_results_take_their_places():
    def function(x, y):
        gate = x.sigmoid()
        return (gate + y) * 3, (gate * 2) - 1

    graph = capture(function, x=(4, 8), y=(4, 8))
    nodes = frozenset((graph["sigmoid"], graph["add"], graph["mul_1"]))
    match = Match("both", (graph["add"], graph["mul_1"]), nodes, {"x": graph["x"], "y": graph["y"]})
    assert replace(fusion_both(), match, Editor(graph.view)) is None
    assert calls(graph.graph) == ["both"]
    assert not any(n.target == "sigmoid" for n in graph.graph.nodes)
    same_values(graph, function, (4, 8), (4, 8))


def test_a_squeezed_input_is_reshaped():
    fusion = fusion_dyt(inputs={"x": "... n", "alpha": 0.5, "weight": "(n)", "bias": "n"})

    def function(x, w, b):
        return (torch.tanh(0.5 * x) * w + b,)

    graph, reason = replaced(function, fusion, "add", x=(4, 8), w=(1, 8), b=(8,))
    assert reason is None
    assert graph["w"].users.keys() == {n for n in graph.graph.nodes if n.target == "reshape"}
    same_values(graph, function, (4, 8), (1, 8), (8,))


# -- where the op goes ---------------------------------------------------------------------------------------------
def point(function, at="add", **inputs):
    """The graph, and the name of the node that the op of a match would stand before."""
    graph = capture(function, **{**INPUTS, **inputs})
    return insertion_point(match_of(fusion_dyt(), graph, at), Editor(graph.view)).name


def test_the_op_stands_where_the_result_was_made():
    assert point(lambda x, w, b: torch.tanh(0.5 * x) * w + b) == "add"
    assert point(lambda x, w, b: torch.tanh(0.5 * x) * w.exp() + b) == "add", "its inputs come before"


def test_an_input_that_comes_late():
    """The second result is needed from ``mul_1`` on; ``late`` exists only then."""

    def function(x, y):
        gate = x.sigmoid()
        twice = gate * 2
        late = y.exp()
        return gate + late, twice

    graph = capture(function, x=(4, 8), y=(4, 8))
    nodes = frozenset((graph["sigmoid"], graph["mul"], graph["add"]))
    match = Match("both", (graph["add"], graph["mul"]), nodes, {"x": graph["x"], "y": graph["exp"]})
    assert insertion_point(match, Editor(graph.view)) is graph["add"]
    assert replace(fusion_both(), match, Editor(graph.view)) is None
    same_values(graph, function, (4, 8), (4, 8))


def test_an_input_that_comes_too_late():
    def function(x, y):
        gate = x.sigmoid()
        twice = gate * 2
        late = y + twice  # needs a result
        return gate + late, late

    graph = capture(function, x=(4, 8), y=(4, 8))
    nodes = frozenset((graph["sigmoid"], graph["mul"], graph["add_1"]))
    match = Match("both", (graph["add_1"], graph["mul"]), nodes, {"x": graph["x"], "y": graph["add"]})
    before = str(graph.graph)
    assert replace(fusion_both(), match, Editor(graph.view)) == "add does not exist yet where add needs a result"
    assert str(graph.graph) == before


@pytest.mark.parametrize("region", [no_grad, autocast])
def test_an_input_made_in_a_region_is_read_behind_it(region):
    def function(x, y):
        gate = x.sigmoid()
        twice = gate * 2
        with region(x):
            late = y.exp()
            late.log()
        return gate + late, twice

    graph = capture(function, x=(4, 8), y=(4, 8))
    nodes = frozenset((graph["sigmoid"], graph["mul"], graph["add"]))
    match = Match("both", (graph["add"], graph["mul"]), nodes, {"x": graph["x"], "y": graph["exp"]})
    at = insertion_point(match, Editor(graph.view))
    assert graph.view.order[at] > graph.view.order[graph["log"]]
    assert graph.view.effects.region[at] == graph.view.effects.region[match.root]


# -- results apart -------------------------------------------------------------------------------------------------
def test_equal_calls_that_are_both_returned_stay_two_tensors():
    attention = torch.nn.functional.scaled_dot_product_attention

    def function(q):
        viewed = attention(q, q, q).transpose(1, 2).view_as(q.transpose(1, 2))
        return attention(q, q, q), viewed, attention(q, q, q, is_causal=True), q * 2, q * 2

    graph = capture(function, q=(1, 2, 4, 8))
    before = graph.results
    keep_results_apart(graph.graph)
    assert [n.target for n in graph.graph.nodes].count(copied) == 1
    assert graph.results == before, "the view, now of the copy"
    assert before[1].args[0].args[0].target is copied
    same_values(graph, function, (1, 2, 4, 8))


def test_equal_calls_of_a_function_of_another_package_stay_two_tensors():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(same_values, (x,)) for _ in range(2)]
    graph.output((*calls, graph.call_function(torch.sin, (x,)), graph.call_function(torch.sin, (x,))))
    keep_results_apart(graph)
    results = graph.output_node().args[0]
    assert [result.target for result in results] == [same_values, copied, torch.sin, torch.sin]


def test_a_copy_and_the_views_of_it_share_memory():
    """As in eager: a write to one of the results is seen in the other."""

    def function(x, w):
        pair = [F.rms_norm(x, (8,), w, 1e-6) for _ in range(2)]
        return pair[0], pair[1], pair[1][..., :1], pair[1]

    x, w = torch.randn(4, 8), torch.randn(8)
    found = torch.compile(function, backend=rewriting_backend())(x, w)
    assert [t.stride() for t in found] == [(8, 1), (8, 1), (8, 1), (8, 1)]
    found[1].zero_()
    assert [bool(t.any()) for t in found] == [True, False, False, False]
