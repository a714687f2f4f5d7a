"""The column that every graph goes down: find, check, join, select, replace."""

from dataclasses import replace as changed

import pytest
import torch

from fx_fusion import pipeline
from fx_fusion.fusion import registry
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.options import parse
from fx_fusion.pipeline import Fuel
from fx_fusion.rewrite.editor import Editor
from tests.engine.graphs import capture, no_grad, tensor
from tests.engine.tiny import NARROW, REFUSING, calls, fusion_dyt, fusion_tanh

INPUTS = {"x": (4, 8), "w": (8,), "b": (8,)}
GRAPH = 7


def dyt(x, w, b):
    return torch.tanh(0.5 * x) * w + b


@pytest.fixture
def rewrite(monkeypatch):
    """Rewrite the graph of a function with these fusions: the graph and its sites."""

    def run(function, *fusions, fuel=None, options=None, **inputs):
        monkeypatch.setattr(registry, "all_fusions", lambda: fusions)
        graph = function if hasattr(function, "graph") else capture(function, **(inputs or INPUTS))
        given = parse(None, options or {})
        sites = pipeline.rewrite(Search(graph.view), given, Editor(graph.view), Fuel(fuel), GRAPH)
        graph.graph.lint()
        return graph, sites

    return run


def said(sites):
    return [(site.fusion, site.status, site.reason) for site in sites]


def same_values(graph, function, *shapes):
    values = [torch.randn(shape) for shape in shapes]
    expected = function(*values)
    torch.testing.assert_close(graph.run(*values), expected if isinstance(expected, tuple) else (expected,))


@pytest.mark.parametrize("fusions", [(fusion_dyt(), fusion_tanh()), (fusion_dyt(),)])
def test_the_fusion_that_comes_first_takes_the_nodes(rewrite, fusions):
    graph, sites = rewrite(dyt, *fusions)
    assert said(sites) == [("dyt", "fused", "")], "nothing is said of who came too late"
    assert calls(graph.graph) == ["dyt"]
    same_values(graph, dyt, (4, 8), (8,), (8,))


def test_the_order_of_fusions_decides_not_their_size(rewrite):
    graph, sites = rewrite(dyt, fusion_tanh(), fusion_dyt())
    assert said(sites) == [("scaled_tanh", "fused", "")]
    assert calls(graph.graph) == ["scaled_tanh"]
    same_values(graph, dyt, (4, 8), (8,), (8,))


def test_every_place_is_rewritten(rewrite):
    def function(x, w, b):
        h = dyt(x, w, b)
        return dyt(h, w, b) * torch.tanh(0.7 * h), dyt(x * 2, b, w)

    graph, sites = rewrite(function, fusion_dyt(), fusion_tanh())
    assert calls(graph.graph) == ["dyt", "dyt", "scaled_tanh", "dyt"]
    assert [site.fusion for site in sites] == calls(graph.graph), "in the order of the graph"
    same_values(graph, function, (4, 8), (8,), (8,))


def test_a_site_says_where_it_is(rewrite):
    graph = capture(dyt, **INPUTS)
    graph["add"].meta["stack_trace"] = 'File "/home/me/model.py", line 12, in forward\n'
    graph["add"].meta["nn_module_stack"] = {"a": ("L['self'].layers[3].norm", torch.nn.Module)}
    _, (site,) = rewrite(graph, fusion_dyt())
    assert (site.location, site.module, site.graph) == ("model.py:12", "layers.3.norm", GRAPH)
    assert site.shapes == {"x": "float32[4, 8]", "weight": "float32[8]", "bias": "float32[8]"}


# -- who gives its nodes back --------------------------------------------------------------------------------------
def test_a_replacement_that_does_not_fit_gives_its_nodes_back(rewrite):
    graph, sites = rewrite(dyt, fusion_dyt(kernel=REFUSING), fusion_tanh())
    assert calls(graph.graph) == ["scaled_tanh"], "the smaller one takes them"
    assert sorted(said(sites)) == [
        ("dyt", "declined", "the op's result has shape (1, 8) where the graph has (4, 8)"), ("scaled_tanh", "fused", ""),
    ]  # fmt: skip
    same_values(graph, dyt, (4, 8), (8,), (8,))


def test_replacements_that_do_not_fit_end(rewrite):
    graph, sites = rewrite(dyt, fusion_dyt(kernel=REFUSING), fusion_tanh(kernel=NARROW))
    assert calls(graph.graph) == []
    assert sorted((s.fusion, s.status) for s in sites) == [("dyt", "declined"), ("scaled_tanh", "declined")]
    same_values(graph, dyt, (4, 8), (8,), (8,))


@pytest.mark.parametrize(
    ("larger", "status"),
    [
        ({"guard": lambda x, alpha, weight, bias: "no"}, "declined"), ({"why_keep": lambda x, alpha, weight, bias: "no"}, "kept"), ({"on_cpu": False}, "kept"),
    ],
)  # fmt: skip
def test_who_is_refused_before_leaves_its_nodes_to_a_smaller_one(rewrite, larger, status):
    graph, sites = rewrite(dyt, fusion_dyt(**larger), fusion_tanh())
    assert calls(graph.graph) == ["scaled_tanh"]
    assert said(sites) == [("scaled_tanh", "fused", "")], "that the larger one was refused is no news"
    graph, sites = rewrite(dyt, fusion_dyt(**larger))
    assert calls(graph.graph) == []
    assert [(s.fusion, s.status) for s in sites] == [("dyt", status)], "here it is"


def test_a_smaller_one_that_is_refused_too_is_said_once(rewrite):
    larger = fusion_dyt(guard=lambda x, alpha, weight, bias: "not today")
    _, sites = rewrite(dyt, larger, fusion_tanh(guard=lambda x, alpha: "nor this"))
    assert said(sites) == [("dyt", "declined", "not today")], "one site speaks for the nodes"


# -- check ---------------------------------------------------------------------------------------------------------
def test_the_first_legal_way_is_taken(rewrite):
    """``w + b`` binds weight and bias either way; the guard lets only the second pass."""

    def summed(x, alpha, weight, bias):
        return weight + bias + torch.tanh(alpha * x)

    def guard(x, alpha, weight, bias):
        return None if bias.requires_grad else "bias has no gradient"

    def emit(editor, match):
        ways.append((match.inputs["weight"].name, match.inputs["bias"].name))

    ways = []
    fusion = fusion_dyt(pattern=summed, kernel=None, emit=emit, guard=guard)
    inputs = {"x": (8,), "w": tensor(8, grad=True), "b": (8,)}
    _, sites = rewrite(lambda x, w, b: w + b + torch.tanh(0.5 * x), fusion, **inputs)
    assert ways == [("b", "w")]
    assert said(sites) == [("dyt", "fused", "")]
    _, sites = rewrite(lambda x, w, b: w + b + torch.tanh(0.5 * x), fusion, **{**inputs, "w": (8,)})
    assert said(sites) == [("dyt", "declined", "bias has no gradient")], "the reason of the first"


NEAR = {
    "half of it": (lambda x, w, b: torch.sin(0.5 * x) * w + b, ["2 of 4 ops match at sin: expected tanh, found sin"]),
    "most of it": (lambda x, w, b: torch.tanh(0.5 / x) * w + b, ["3 of 4 ops match at truediv: expected mul, found div"]),
    "less than half": (lambda x, w, b: x.exp() / w + b, []),
    "the root alone": (lambda x, w, b: x + b, []),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(rewrite, name):
    function, reasons = NEAR[name]
    _, sites = rewrite(function, fusion_dyt())
    assert said(sites) == [("dyt", "near", reason) for reason in reasons]


def test_a_pattern_of_two_ops_is_not_near_wherever_its_root_is(rewrite):
    assert rewrite(lambda x, w, b: torch.tanh(x + w), fusion_tanh())[1] == []


def test_a_near_miss_says_the_line_where_it_stopped(rewrite):
    graph = capture(NEAR["half of it"][0], **INPUTS)
    graph["add"].meta["stack_trace"] = 'File "model.py", line 3, in forward'
    graph["sin"].meta["stack_trace"] = 'File "layers.py", line 9, in act'
    _, (site,) = rewrite(graph, fusion_dyt())
    assert site.reason == "2 of 4 ops match at sin (layers.py:9): expected tanh, found sin"
    assert site.location == "model.py:3"


def test_a_near_miss_inside_of_a_site_is_no_news(rewrite):
    def near(x, alpha, weight, bias):
        return torch.exp(torch.tanh(alpha * x) * weight) + bias

    function = lambda x, w, b: torch.exp(torch.tanh(0.5 * x) * w) + b  # noqa: E731
    nearly = fusion_dyt(name="nearly", pattern=lambda x, alpha, weight, bias: torch.exp(torch.tanh(alpha / x) * weight) + bias, kernel=None, emit=print)
    whole = fusion_dyt(pattern=near, kernel=None, emit=lambda editor, match: None)
    assert said(rewrite(function, nearly)[1])[0][:2] == ("nearly", "near"), "on its own it is"
    assert said(rewrite(function, nearly, whole)[1]) == [("dyt", "fused", "")]


# -- finders -------------------------------------------------------------------------------------------------------
def finding(*results):
    """A fusion whose finder says this of a graph."""

    def find(search):
        nodes = {n.name: n for n in search.view.graph.nodes}
        return (result(nodes) for result in results)

    return fusion_dyt(find=find)


def whole(nodes):
    inputs = {"x": nodes["x"], "alpha": 0.5, "weight": nodes["w"], "bias": nodes["b"]}
    return Match("dyt", (nodes["add"],), frozenset(nodes[n] for n in ("mul", "tanh", "mul_1", "add")), inputs, note="as found")


def odd(nodes):
    return NearMiss("dyt", nodes["add"], nodes["mul"], "it is odd")


def test_matches_and_near_misses_of_a_finder(rewrite):
    graph, sites = rewrite(dyt, finding(whole))
    assert said(sites) == [("dyt", "fused", "as found")]
    assert calls(graph.graph) == ["dyt"]
    same_values(graph, dyt, (4, 8), (8,), (8,))
    _, sites = rewrite(dyt, finding(odd))
    assert said(sites) == [("dyt", "near", "at mul: it is odd")]


def test_what_a_finder_saw_is_always_said(rewrite):
    larger = changed(finding(whole), guard=lambda x, alpha, weight, bias: "not today")
    graph, sites = rewrite(dyt, larger, fusion_tanh())
    assert calls(graph.graph) == ["scaled_tanh"]
    assert said(sites) == [("scaled_tanh", "fused", ""), ("dyt", "declined", "not today; as found")]


def test_one_place_that_is_found_twice_is_one_site(rewrite):
    graph, sites = rewrite(dyt, finding(whole, whole))
    assert (calls(graph.graph), len(sites)) == (["dyt"], 1)
    assert len(rewrite(dyt, finding(odd, odd))[1]) == 1


# -- join ----------------------------------------------------------------------------------------------------------
def joining(*, legal=True):
    """A fusion that makes one of two matches with the same number, whose kernel is called once."""

    def join(view, one, other):
        if one.inputs["alpha"] != other.inputs["alpha"]:
            return None
        both = {"outputs": (*one.outputs, *other.outputs), "nodes": one.nodes | other.nodes, "others": {"second": other.inputs["x"]}}
        return changed(one, **both, differs=None if legal else "the two are not alike")

    def emit(editor, match):
        joined.append([o.name for o in match.outputs])

    joined = []
    return fusion_tanh(join=join, kernel=None, emit=emit), joined


def pair(x, y, z):
    return torch.tanh(0.5 * x), torch.tanh(0.5 * y), torch.tanh(0.7 * z)


THREE = {"x": (4, 8), "y": (4, 8), "z": (4, 8)}


def test_neighbors_become_one(rewrite):
    fusion, joined = joining()
    _, sites = rewrite(pair, fusion, **THREE)
    assert joined == [["tanh", "tanh_1"], ["tanh_2"]]
    assert [s.shapes for s in sites] == [{"x": "float32[4, 8]", "second": "float32[4, 8]"}, {"x": "float32[4, 8]"}]


def test_neighbors_whose_union_is_not_legal_stay_two(rewrite):
    fusion, joined = joining(legal=False)
    _, sites = rewrite(pair, fusion, **THREE)
    assert joined == [["tanh"], ["tanh_1"], ["tanh_2"]]
    assert [s.status for s in sites] == ["fused"] * 3


def test_only_legal_neighbors_are_joined(rewrite):
    fusion, joined = joining()

    def function(x, y, z):
        with no_grad(x):
            gate = 0.5 * y
        return torch.tanh(0.5 * x), torch.tanh(gate), torch.tanh(0.5 * z)

    _, sites = rewrite(function, fusion, **THREE)
    assert joined == [["tanh", "tanh_2"]]
    assert [s.status for s in sites] == ["fused", "declined"]


# -- fuel and options ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fuel", [0, 1, 2, 3, None])
def test_fuel_counts_replacements_in_the_order_of_the_graph(rewrite, fuel):
    graph, sites = rewrite(pair, fusion_tanh(), fuel=fuel, **THREE)
    left = 3 if fuel is None else fuel
    assert [s.status for s in sites] == ["fused"] * left + ["kept"] * (3 - left)
    assert {s.reason for s in sites[left:]} <= {"FX_FUSION_FUEL is used up"}
    assert calls(graph.graph) == ["scaled_tanh"] * left
    same_values(graph, pair, (4, 8), (4, 8), (4, 8))


def test_options_choose(rewrite):
    for options, expected in (
        ({"select": "never"}, [("dyt", "kept", 'options={"select": "never"}')]),
        ({"fusions": ["-dyt"]}, [("scaled_tanh", "fused", "")]),
        ({"fusions": ["scaled_tanh"]}, [("scaled_tanh", "fused", "")]),
    ):
        assert said(rewrite(dyt, fusion_dyt(), fusion_tanh(), options=options)[1]) == expected
    assert said(rewrite(dyt, fusion_dyt(on_cpu=False), options={"select": "always"})[1]) == [("dyt", "fused", "")]
