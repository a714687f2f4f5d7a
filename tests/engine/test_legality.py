"""Every reason why a match may not be rewritten, once; and the same match without it is legal."""

import contextlib
from dataclasses import replace

import pytest
import torch

from fx_fusion.fusion import legality
from fx_fusion.fusion.legality import why_not
from fx_fusion.fusion.match import Match
from fx_fusion.fusion.matcher import Attempt
from fx_fusion.fusion.pattern import patterns_of
from fx_fusion.graph.view import View
from tests.engine.graphs import BF16, autocast, beside, capture, no_grad, symbolic_float, tensor
from tests.engine.tiny import fusion_dyt, fusion_tanh
from tests.helpers import rewritten

DYT, TANH = fusion_dyt(), fusion_tanh()
INPUTS = {"x": (4, 8), "w": (8,), "b": (8,)}


@pytest.fixture(autouse=True)
def fresh_numbers(monkeypatch):
    monkeypatch.setattr(legality, "_NUMBERS", {})


def only(fusion, graph, at=None):
    """The match of a fusion at a node (the first result), its inputs in the order of the declaration."""
    attempt = Attempt(graph.view, patterns_of(fusion)[0], at or graph.result)
    found = [m for m in attempt.matches() if getattr(m.inputs.get("bias"), "name", "b") == "b"]
    assert len(found) == 1, attempt.near
    return found[0]


def reason(function, fusion=DYT, at=None, changes=None, **inputs):
    graph = capture(function, **{**INPUTS, **inputs})
    match = only(fusion, graph, graph[at] if at else None)
    return why_not(fusion, replace(match, **(changes or {})), graph.view)


def dyt(x, w, b):
    return torch.tanh(0.5 * x) * w + b


def test_the_match_without_a_reason():
    assert reason(dyt) is None
    assert reason(lambda x, w, b: (dyt(x, w, b), dyt(x, w, b) * 2)) is None
    assert reason(lambda x, w, b: dyt(x[:, :], w, b)) is None


# -- inner values --------------------------------------------------------------------------------------------------
def test_an_inner_value_that_is_used_outside():
    def function(x, w, b):
        gate = torch.tanh(0.5 * x)
        return gate * w + b, gate.exp()

    assert reason(function) == "tanh is also used outside the pattern, by exp"


def test_an_inner_value_that_the_graph_returns():
    def function(x, w, b):
        gate = torch.tanh(0.5 * x)
        return gate * w + b, gate

    assert reason(function) == "tanh is also returned by the graph"
    graph = capture(function, **INPUTS)
    deferred = replace(only(DYT, graph), deferred=(graph["tanh"],))
    assert why_not(DYT, deferred, graph.view) is None, "it is computed when it is read"
    second = replace(only(DYT, graph), outputs=(graph.result, graph["tanh"]))
    assert why_not(DYT, second, graph.view) is None, "the kernel makes it"


def test_what_is_crossed_may_have_other_users():
    assert reason(lambda x, w, b: (dyt(y := x.contiguous(), w, b), y + 1)) is None


# -- regions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("region", [no_grad, autocast], ids=["no_grad", "autocast"])
@pytest.mark.parametrize("inside", ["a part", "all"])
def test_a_match_across_a_region(region, inside):
    def function(x, w, b):
        with region(x):
            gate = torch.tanh(0.5 * x)
            result = gate * w + b if inside == "all" else None
        return result if inside == "all" else gate * w + b

    expected = None if inside == "all" else "is in another grad-mode or autocast region than add"
    found = reason(function, at="add")
    assert found is None if expected is None else expected in found


def _enter_inference_mode(enabled):
    return contextlib.nullcontext()


def _exit_inference_mode(mode):
    return None


@pytest.mark.parametrize("closed", [True, False])
def test_a_functorch_transform_or_inference_mode(closed):
    def function(x, w, b):
        mode = beside(x, _enter_inference_mode, True)
        if closed:
            beside(x, _exit_inference_mode, mode)
        return dyt(x, w, b)

    found = reason(function)
    assert found is None if closed else "add is inside a functorch transform or inference mode" in found


# -- writes --------------------------------------------------------------------------------------------------------
BETWEEN = {
    "an input": (lambda x, w, b: (g := torch.tanh(0.5 * x), w.mul_(2), g * w + b), "mul_ changes a value of the pattern in place"),
    "a view of an input": (lambda x, w, b: (g := torch.tanh(0.5 * x), w[:2].mul_(2), g * w + b), "mul_ changes a value"),
    "an inner value": (lambda x, w, b: (g := torch.tanh(0.5 * x), g.detach().mul_(2), g * w + b), "mul_ changes a value"),
    "before": (lambda x, w, b: (w.mul_(2), dyt(x, w, b)), None),
    "another tensor": (lambda x, w, b, y: (g := torch.tanh(0.5 * x), y.mul_(2), g * w + b), None),
    "afterwards": (lambda x, w, b: (r := dyt(x, w, b), w.mul_(2), r), None),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_write_in_between(name):
    function, expected = BETWEEN[name]
    given = INPUTS | ({"y": (8,)} if name == "another tensor" else {})
    graph = capture(lambda **inputs: function(**inputs)[-1], **given)
    root = graph.result
    match = only(DYT, graph, root)
    if name == "an inner value":  # else its other user is the reason
        match = replace(match, outputs=(root, graph["tanh"]))
    found = why_not(DYT, match, graph.view)
    assert found is None if expected is None else found.startswith(expected)


def test_a_write_to_one_of_two_equal_values_before_they_are_used():
    def twice(x, alpha, weight, bias):
        return torch.tanh(alpha * x) * weight + bias * x

    def function(x, w, b):
        one, other = x + 1, x + 1
        one.mul_(2)
        return torch.tanh(0.5 * one) * w + b * other

    fusion = fusion_dyt(pattern=twice, kernel=None, emit=print)
    graph = capture(function, **INPUTS)
    found = list(Attempt(graph.view, patterns_of(fusion)[0], graph.result).matches())
    assert [m for m in found if why_not(fusion, m, graph.view) is None] == []


@pytest.mark.parametrize("grad", [True, False])
def test_a_write_behind_the_match_to_what_its_backward_reads(grad):
    def function(x, w, b):
        h = x * 2
        y = dyt(h, w, b)
        h.mul_(3)
        return y

    found = reason(function, w=tensor(8, grad=grad), x=tensor(4, 8, grad=grad))
    assert found == ("mul_ later changes a value in place that the backward reads" if grad else None)


# -- inputs --------------------------------------------------------------------------------------------------------
class Subclass(torch.Tensor):
    """A tensor that is more than its values."""


def test_an_input_of_another_type():
    graph = capture(dyt, **INPUTS)
    match = only(DYT, graph)
    graph["w"].meta["example_value"] = torch.ones(8).as_subclass(Subclass)
    assert why_not(DYT, match, graph.view) == "weight is a Subclass; kernels take plain tensors"
    graph["w"].meta["example_value"] = torch.nn.Parameter(torch.ones(8))
    assert why_not(DYT, match, graph.view) is None


def test_an_input_that_is_not_strided():
    graph = capture(dyt, **INPUTS)
    match = only(DYT, graph)
    assert why_not(DYT, match, graph.view) is None
    graph["b"].meta["example_value"] = torch.ones(8).to_sparse()
    assert "bias has the layout torch.sparse_coo" in legality.is_not_plain(DYT, match, graph.view)


def test_inputs_on_several_devices():
    graph = capture(dyt, **INPUTS)
    match = only(DYT, graph)
    with graph["b"].meta["example_value"].fake_mode:
        graph["b"].meta["example_value"] = torch.ones(8, device="meta")
    assert why_not(DYT, match, graph.view) == "its inputs are on several devices: cpu, meta"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"w": (1,)}, "weight has shape (1,); its n must be 8"), ({"b": ()}, "bias has shape (); the kernel takes (n)"),
        ({"x": (8,)}, None), ({"x": (2, 3, 8)}, None), ({"x": (2, 1, 8), "w": (4, 8)}, "weight has shape (4, 8); the kernel takes (n)"),
    ],
)  # fmt: skip
def test_inputs_of_other_dims(shapes, expected):
    assert reason(dyt, **shapes) == expected


def test_a_match_of_a_finder_is_checked_too():
    """A finder binds what it likes; the dims and the casts that it stepped over are looked at all the same."""
    graph = capture(lambda x, w, b: dyt(x.bfloat16().float(), w, b), **INPUTS)
    cast = graph["bfloat16"], graph["float_1"]
    nodes = frozenset(n for n in graph.graph.nodes if n.op == "call_function")
    inputs = {"x": graph["x"], "alpha": 0.5, "weight": graph["w"], "bias": graph["b"]}
    found = Match("dyt", (graph.result,), nodes, inputs, crossed=frozenset(cast))
    assert why_not(DYT, found, graph.view) == "bfloat16 rounds to bfloat16; the kernel does not round there"
    assert why_not(DYT, replace(found, rounded=frozenset(cast)), graph.view) is None, "its kernel rounds there as well"
    inner = replace(found, nodes=nodes | set(cast), crossed=frozenset())
    assert why_not(DYT, inner, graph.view) == "bfloat16 rounds to bfloat16; the kernel does not round there"
    stops = replace(found, inputs={**inputs, "x": cast[1]}, crossed=frozenset())
    assert why_not(DYT, stops, graph.view) is None
    swapped = replace(stops, inputs={**stops.inputs, "weight": graph["x"]})
    assert why_not(DYT, swapped, graph.view) == "weight has shape (4, 8); the kernel takes (n)"


def test_a_match_that_computes_in_another_dtype():
    narrow = {"x": tensor(4, 8, dtype=BF16), "w": tensor(8, dtype=BF16), "b": tensor(8, dtype=BF16)}
    found = reason(lambda x, w, b: (torch.tanh(0.5 * x).float() * w).bfloat16() + b, **narrow)
    assert found == "mul is computed in float32; the kernel computes it in bfloat16"
    assert reason(dyt, **narrow) is None


def test_what_the_guard_says():
    def guard(x, alpha, weight, bias):
        return f"alpha is {alpha}" if alpha > 1 else None

    fusion = fusion_dyt(guard=guard)
    assert reason(dyt, fusion) is None
    assert reason(lambda x, w, b: torch.tanh(2.0 * x) * w + b, fusion) == "alpha is 2.0"


def test_the_guard_is_asked_in_the_region_of_the_site():
    def guard(x, alpha, weight, bias):
        return None if torch.is_grad_enabled() else "no gradient"

    def function(x, w, b):
        with no_grad(x):
            inside = dyt(x, w, b)
        return inside, dyt(x, w, b)

    fusion = fusion_dyt(guard=guard)
    assert reason(function, fusion) == "no gradient"
    assert reason(function, fusion, at="add_1") is None


# -- numbers that change -------------------------------------------------------------------------------------------
def test_a_number_that_changes_between_calls():
    def at(hint):
        graph = capture(lambda x, a: torch.tanh(a * x), x=(4, 8), a=hint)
        return why_not(TANH, only(TANH, graph), graph.view)

    assert at(symbolic_float(0.5)) is None, "symbolic, and it may be the same at every call"
    assert at(symbolic_float(0.5)) is None
    assert at(symbolic_float(0.7)) == "alpha changes between calls; the kernel would be compiled for each value"
    assert at(symbolic_float(0.5)) is None


def test_numbers_of_other_modules_are_others():
    """An eps of the module: a second model from the same file may have another one. An argument is one that changes."""

    class Bent(torch.nn.Module):
        def __init__(self, alpha):
            super().__init__()
            self.alpha = alpha

        def forward(self, x):
            return torch.tanh(self.alpha * x)

    def at(function, *given):
        found = []

        def backend(gm, _):
            view = View(gm.graph)
            match = next(m for n in view.graph.nodes for m in Attempt(view, patterns_of(TANH)[0], n).matches())
            found.append(why_not(TANH, match, view))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(function, backend=backend, dynamic=True)(*given)
        return found[0]

    x = torch.randn(4, 8)
    assert [at(Bent(alpha), x) for alpha in (0.5, 0.25, 0.75, 0.5, 0.125)] == [None] * 5
    assert "changes between calls" in at(Bent(0.0625), x), "more of them are taken for one that changes"

    def bent(x, alpha):
        return torch.tanh(alpha * x)

    assert at(bent, x, 0.5) is None
    assert "changes between calls" in at(bent, x, 0.25)


def test_numbers_of_other_lines_are_others():
    def at(line, hint):
        graph = capture(lambda x, a: torch.tanh(a * x), x=(4, 8), a=symbolic_float(hint))
        graph.result.meta["stack_trace"] = f'File "model.py", line {line}'
        return why_not(TANH, only(TANH, graph), graph.view)

    assert at(1, 0.5) is None
    assert at(2, 0.7) is None
    assert "alpha changes" in at(1, 0.7)


def test_a_literal_is_a_constant_of_the_graph():
    assert reason(dyt) is None
    assert reason(lambda x, w, b: torch.tanh(0.7 * x) * w + b) is None, "another site, compiled as it stands"


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="torch.autograd.grad ends a graph there")
@pytest.mark.parametrize("twice", [False, True], ids=["by a cast", "twice"])
def test_a_graph_that_differentiates_itself(twice):
    def by_a_cast(x, w):
        h = x.float()
        y = w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        return torch.autograd.grad(y.square().sum(), h)[0]

    def penalty(x, w):
        loss = torch.nn.functional.cross_entropy(x, torch.tensor([1, 2, 3, 4])) + w.sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    function = penalty if twice else by_a_cast
    x, w = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), torch.rand(8, dtype=torch.bfloat16, requires_grad=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        found, report = rewritten(function, x, w, options={"select": "always"})
    torch.testing.assert_close(found, function(x, w), rtol=2e-2, atol=2e-2)
    assert not any(graph.fallback for graph in report.graphs)
    why = "first derivatives only" if twice else "which the op would not read"
    assert any(why in site.reason for site in report.sites), str(report)
