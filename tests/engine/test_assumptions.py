"""Test what rewrites take for granted about the inputs of a graph."""

import pytest
import torch
from torch import fx

from fx_fusion.graph.masks.assumed import ONES, Assumed
from fx_fusion.rewrite.assumptions import Assumptions
from tests.engine.graphs import capture


@pytest.fixture
def module():
    graph = capture(lambda x, mask, y: x * mask + y, x=(4,), mask=(4,), y=(4,)).graph
    graph.find_nodes(op="placeholder")[1].target = "L_attention_mask_"
    return fx.GraphModule(torch.nn.Module(), graph)


def inputs_of(module):
    return module.graph.find_nodes(op="placeholder")


def test_nothing_is_assumed_at_first(module):
    assumptions = Assumptions(module, allowed=True)
    assert assumptions.allowed
    assert assumptions.checks() == ()
    assert assumptions.sentences() == ()


def test_positions_are_those_of_the_arguments(module):
    x, mask, y = inputs_of(module)
    assumptions = Assumptions(module, allowed=True)
    assumptions.assume([Assumed(y, ONES)])
    assumptions.assume([Assumed(mask, ONES), Assumed(y, ONES)])
    assert assumptions.checks() == ((2, ONES), (1, ONES)), "each once"
    assert assumptions.sentences() == ("y is all ones", "attention_mask is all ones")


def test_positions_are_those_of_the_graph_as_it_was(module):
    """A rewrite may erase nodes; the arguments of the call stay."""
    x, mask, y = inputs_of(module)
    assumptions = Assumptions(module, allowed=True)
    with module.graph.inserting_before(x):
        module.graph.placeholder("new")
    assumptions.assume([Assumed(mask, "causal")])
    assert assumptions.checks() == ((1, "causal"),)
    assert assumptions.sentences() == ("attention_mask hides what comes later",)


def test_only_inputs_can_be_assumed(module):
    product = next(n for n in module.graph.nodes if n.op == "call_function")
    with pytest.raises(KeyError):
        Assumptions(module, allowed=True).assume([Assumed(product, ONES)])


@pytest.mark.parametrize("assumptions", [Assumptions.none(), Assumptions(None, allowed=True)])
def test_bodies_assume_nothing(assumptions):
    assert not assumptions.allowed
    assert assumptions.checks() == ()


def test_options_may_forbid_it(module):
    assert not Assumptions(module, allowed=False).allowed
