"""The vocabulary: every spelling of an op computes alike, has one name, and binds alike."""

import inspect
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._pytree import tree_leaves

from fx_fusion.graph.signatures import SIGNATURES, bind, names_of
from tests.engine.graphs import beside, capture, method, tensor
from tests.engine.spellings import SPELLINGS

INPUTS = {"x": (2, 4, 8), "y": (2, 4, 8), "w": (8, 8), "ids": tensor(2, dtype=torch.int64), "c": tensor(2, 4, 8, dtype=torch.bool),
          "d": tensor(2, 4, 8, dtype=torch.bool)}  # fmt: skip
NOT_IN_TORCH = {"alias"}  # a name that only finders read
CASES = [(name, i) for name, spellings in SPELLINGS.items() for i in range(len(spellings))]


def captured(spelling):
    return capture(spelling, **{n: INPUTS[n] for n in inspect.signature(spelling).parameters if n in INPUTS})


def real(graph):
    generator = torch.Generator().manual_seed(0)
    values = {
        "x": torch.rand(2, 4, 8, generator=generator) + 0.5, "y": torch.rand(2, 4, 8, generator=generator) + 0.5,
        "w": -torch.rand(8, 8, generator=generator), "ids": torch.tensor([3, 1]),
        "c": torch.rand(2, 4, 8, generator=generator) > 0.5, "d": torch.rand(2, 4, 8, generator=generator) > 0.5,
    }  # fmt: skip
    return tree_leaves(graph.run(*(values[n.name] for n in graph.graph.find_nodes(op="placeholder"))))


def bound_in(graph, name):
    return {k: repr(graph.view.folded(v)) for k, v in bind(name, graph.result).items()}


def test_every_row_is_tested():
    assert set(SPELLINGS) | NOT_IN_TORCH == set(SIGNATURES)
    assert all(SPELLINGS.values())


@pytest.mark.parametrize(("name", "i"), CASES, ids=lambda part: str(part))
def test_spellings_bind_alike(name, i):
    first, other = captured(SPELLINGS[name][0]), captured(SPELLINGS[name][i])
    assert names_of(other.result) == (name, None)
    assert set(bound_in(other, name)) == set(SIGNATURES[name].parameters)
    assert bound_in(other, name) == bound_in(first, name)
    torch.testing.assert_close(real(other), real(first))


@pytest.mark.parametrize(
    ("name", "spelling", "other"),
    [
        ("sub", lambda x, y: x - y, lambda x, y: method(x, "__rsub__", y)),
        ("div", lambda x, y: x / y, lambda x, y: method(x, "__rtruediv__", y)),
        ("pow", lambda x, y: x**y, lambda x, y: method(x, "__rpow__", y)),
        ("add", lambda x, y: x + y, lambda x, y: torch.add(x, y, alpha=2)),
        ("div", lambda x, y: x / y, lambda x, y: torch.div(x, y, rounding_mode="floor")),
        ("mean", lambda x: x.mean(-1), lambda x: x.mean(-1, True)),
        ("var", lambda x: x.var(-1), lambda x: x.var(-1, correction=0)),
        ("gelu", lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
        ("pad", lambda x: F.pad(x, (1, 0)), lambda x: F.pad(x, (1, 0), value=1.0)),
    ],
)
def test_what_torch_computes_otherwise_binds_otherwise(name, spelling, other):
    one, two = captured(spelling), captured(other)
    assert names_of(one.result) == names_of(two.result) == (name, None)
    assert bound_in(one, name) != bound_in(two, name)


IN_PLACE = {
    "add": [lambda x, y: x.add_(y), lambda x, y: beside(x, operator.iadd, x, y)],
    "sub": [lambda x, y: x.sub_(y), lambda x, y: x.subtract_(y), lambda x, y: beside(x, operator.isub, x, y)],
    "mul": [lambda x, y: x.mul_(y), lambda x, y: x.multiply_(y), lambda x, y: beside(x, operator.imul, x, y)],
    "div": [lambda x, y: x.div_(y), lambda x, y: x.true_divide_(y), lambda x, y: beside(x, operator.itruediv, x, y)],
    "pow": [lambda x, y: x.pow_(y), lambda x, y: beside(x, operator.ipow, x, y)],
    "masked_fill": [lambda x, c: x.masked_fill_(c, 0.5), lambda x, c: x.masked_fill_(mask=c, value=0.5)],
    "sigmoid": [lambda x: x.sigmoid_()],
    "relu": [lambda x: x.relu_()],
}


@pytest.mark.parametrize(("name", "i"), [(n, i) for n, s in IN_PLACE.items() for i in range(len(s))])
def test_in_place_spellings_bind_as_the_functional_ones(name, i):
    functional, in_place = captured(SPELLINGS[name][0]), captured(IN_PLACE[name][i])
    assert names_of(in_place.result) == (None, name)
    assert bound_in(in_place, name) == bound_in(functional, name)
    torch.testing.assert_close(real(in_place), real(functional))


def test_where_as_a_method_takes_its_operands_in_another_order():
    graph = captured(lambda x, y, c: method(x, "where", c, y))
    assert names_of(graph.result) == ("where", None)
    x, y, c = graph.graph.find_nodes(op="placeholder")
    assert bind("where", graph.result) == {"condition": c, "input": x, "other": y}


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.mul(x, y, out=y),
        lambda x, y: method(x, "mean", dims=-1),
        lambda x, y: method(x, "softmax", -1, half_to_float=True),
        lambda x, y: method(x, "mul"),
        lambda x, y: method(x, "neg", y),
    ],
)
def test_arguments_that_fit_no_signature(call):
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    node = call(*(fx.Proxy(graph.placeholder(name), tracer) for name in "xy")).node
    name, _ = names_of(node)
    assert name is not None, "this tests nothing"
    assert bind(name, node) is None


@pytest.mark.parametrize(
    "call",
    [lambda x: torch.sin(x), lambda x: method(x, "sin"), lambda x: F.softplus(x), lambda x: x.mH, lambda x: torch.sinc(x)],
)
def test_other_ops_have_no_name(call):
    assert names_of(captured(call).result) == (None, None)


def test_placeholders_and_results_have_no_name():
    graph = captured(lambda x: x + 1)
    assert names_of(graph["x"]) == (None, None)
    assert names_of(list(graph.graph.nodes)[-1]) == (None, None)

