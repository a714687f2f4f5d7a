"""GELU written out by hand: recognized by what it computes, and nothing near it."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.engine.graphs import BF16, capture, tensor

C = math.sqrt(2 / math.pi)
ERF = {
    "textbook": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "half last": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) * 0.5,
    "cdf first": lambda x: x * (0.5 * (1 + torch.erf(x / math.sqrt(2)))),
    "cdf times x": lambda x: (0.5 * (torch.erf(x * 0.7071067811865476) + 1.0)) * x,
    "halved by 2": lambda x: x / 2 * (torch.erf(x / 1.4142135623730951) + 1),
    "digits": lambda x: 0.5 * x * (1 + torch.erf(x * 0.70710678)),
    "minus": lambda x: -0.5 * x * (-1 - torch.erf(x / math.sqrt(2))),
    "casts that keep": lambda x: 0.5 * x * (1 + torch.erf(x.double() / math.sqrt(2))),
}
TANH = {
    "textbook": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3))),
    "torch.pow": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
    "factored": lambda x: 0.5 * x * (1 + torch.tanh(C * x * (1 + 0.044715 * x * x))),
    "digits of gpt-j": lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "ten digits": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "products": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x * x * x))),
    "half outside": lambda x: (x * (1 + torch.tanh(C * (x + 0.044715 * x**3)))) * 0.5,
}
NOT = {
    "other cube": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.0447 * x**3))),
    "rough pi": lambda x: 0.5 * x * (1 + torch.tanh(0.7979 * (x + 0.044715 * x**3))),
    "six digits": lambda x: 0.5 * x * (1 + torch.erf(x * 0.707107)),
    "erf of x": lambda x: 0.5 * x * (1 + torch.erf(x)),
    "minus one": lambda x: 0.5 * x * (1 - torch.erf(x / math.sqrt(2))),
    "not halved": lambda x: x * (1 + torch.erf(x / math.sqrt(2))),
    "tanh in erf's place": lambda x: 0.5 * x * (1 + torch.tanh(x / math.sqrt(2))),
    "tanh alone": lambda x: x * torch.tanh(x),
    "erfc": lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2)),
}


@pytest.mark.parametrize(("op", "function"), [(op, f) for op, t in (("gelu_none", ERF), ("gelu_tanh", TANH)) for f in t.values()])
def test_all_spellings_are_gelu(op, function):
    graph = capture(function, x=(4, 8))
    assert (graph.term.op, graph.term.operands) == (op, (graph["x"],))
    assert set(graph.term.nodes) <= set(graph.graph.nodes) - {graph["x"]}
    assert graph.term.nodes[0] is graph.result
    x = torch.linspace(-4, 4, 50)
    torch.testing.assert_close(function(x).float(), F.gelu(x, approximate=op.removeprefix("gelu_")), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_by_name(approximate):
    assert capture(lambda x: F.gelu(x, approximate=approximate), x=(4, 8)).term.op == f"gelu_{approximate}"


@pytest.mark.parametrize("name", NOT)
def test_near_constants_are_another_function(name):
    assert not capture(NOT[name], x=(4, 8)).term.op.startswith("gelu")


def test_two_tensors_are_no_gelu():
    graph = capture(lambda x, y: 0.5 * x * (1 + torch.erf(y / math.sqrt(2))), x=(4, 8), y=(4, 8))
    assert graph.term.op == "mul"


def test_a_cast_inside_that_rounds():
    graph = capture(lambda x: 0.5 * x * (1 + torch.erf(x.float() / math.sqrt(2)).bfloat16()), x=tensor(4, 8, dtype=BF16))
    assert graph.term.op == "mul"
    graph = capture(lambda x: 0.5 * x * (1 + torch.erf(x.float() / math.sqrt(2))), x=tensor(4, 8, dtype=BF16))
    assert graph.term.op == "gelu_none"


def test_the_inner_cdf_is_no_gelu_of_its_own():
    graph = capture(lambda x: (0.5 * (1 + torch.erf(x / math.sqrt(2)))), x=(4, 8))
    assert graph.term.op == "mul"


def test_a_write_to_a_copy_inside():
    def function(x):
        y = x.clone()
        y.mul_(3)
        return 0.5 * x * (1 + torch.erf(y / math.sqrt(2)))

    assert capture(function, x=(4, 8)).term.op == "mul"
    assert capture(lambda x: 0.5 * x * (1 + torch.erf(x.clone() / math.sqrt(2))), x=(4, 8)).term.op == "gelu_none"


def test_symbolic_sizes_change_nothing():
    assert capture(ERF["textbook"], dynamic=True, x=(4, 8)).term.op == "gelu_none"


def test_a_first_explanation_under_fake_tensors():
    """What is made when the module is imported must not be a fake tensor for the rest of the process."""
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import fx_fusion
gelu = lambda x: torch.nn.functional.layer_norm(0.5 * x * (1 + torch.erf(x / 2**0.5)), (8,))
with FakeTensorMode():
    fx_fusion.explain(gelu, torch.randn(4, 8))
report = fx_fusion.explain(gelu, torch.randn(4, 8))
assert [graph.fallback for graph in report.graphs] == [""], str(report)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
