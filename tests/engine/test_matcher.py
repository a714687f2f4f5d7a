"""Test where a graph contains a pattern, and how near it comes where it does not."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.fusion.matcher import Attempt
from fx_fusion.fusion.pattern import patterns_of
from fx_fusion.graph.terms import example
from tests.engine.graphs import BF16, F32, autocast, capture, method, tensor
from tests.engine.tiny import fusion_both, fusion_dyt, fusion_tanh

DYT, TANH, BOTH = fusion_dyt(), fusion_tanh(), fusion_both()
INPUTS = {"x": (4, 8), "w": (8,), "b": (8,)}


def emit(editor, match):
    raise AssertionError("is not called")


def reading(pattern, inputs, **fields):
    return fusion_dyt(pattern=pattern, inputs=inputs, kernel=None, emit=emit, **fields)


def attempt(fusion, graph, root=None):
    """The matches of a fusion's pattern at the graph's first result, and the attempt."""
    tried = Attempt(graph.view, patterns_of(fusion)[0], root or graph.result)
    return list(tried.matches()), tried


def matches(fusion, function, **inputs):
    return attempt(fusion, capture(function, **(inputs or INPUTS)))[0]


def bound(match):
    return {name: getattr(node, "name", node) for name, node in match.inputs.items()}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: torch.tanh(0.5 * x) * w + b, lambda x, w, b: b + w * torch.tanh(x * 0.5), lambda x, w, b: b + (0.5 * x).tanh() * w,
        lambda x, w, b: torch.add(b, torch.mul(w, torch.tanh(torch.mul(0.5, x)))), lambda x, w, b: (x.clone() * 0.5).tanh().contiguous() * w + b,
        lambda x, w, b: (torch.tanh(0.5 * x) * w).add_(b),
    ],
)  # fmt: skip
def test_operands_are_tried_in_both_orders(function):
    graph = capture(function, **INPUTS)
    found, _ = attempt(DYT, graph)
    ours = [m for m in found if bound(m) == {"x": "x", "alpha": 0.5, "weight": "w", "bias": "b"}]
    assert len(ours) == 1
    (match,) = ours
    assert match.outputs == (graph.result,)
    assert match.differs is None
    assert match.nodes | match.crossed == {n for n in graph.graph.nodes if n.op not in ("placeholder", "output")}


def difference(x, w, b):
    return torch.tanh(x - w * b)


SIGNS = {
    "difference": (lambda x, w, b: torch.tanh(x - w * b), 1),
    "negative factor": (lambda x, w, b: torch.tanh(x + w * (-b)), 1),
    "negative factor in front": (lambda x, w, b: torch.tanh((-w) * b + x), 1),
    "negative product": (lambda x, w, b: torch.tanh(x + torch.neg(w * b)), 1),
    "sum": (lambda x, w, b: torch.tanh(x + w * b), 0),
    "two negative factors": (lambda x, w, b: torch.tanh(x + (-w) * (-b)), 0),
    "negative of the other": (lambda x, w, b: torch.tanh(w * b - x), 0),
    "negative sum": (lambda x, w, b: torch.tanh((-x) + w * b), 0),
    "rounded product": (lambda x, w, b: torch.tanh(x + (w * (-b)).bfloat16().float()), 0),
    "rounded factor": (lambda x, w, b: torch.tanh(x + w * (-b).bfloat16()), 0),
}


@pytest.mark.parametrize("name", SIGNS)
def test_match_sum_of_a_negative_is_a_difference(name):
    function, expected = SIGNS[name]
    fusion = reading(difference, {"x": "... n", "w": "n", "b": "n"})
    found = [m for m in matches(fusion, function) if m.differs is None and bound(m) == {"x": "x", "w": "w", "b": "b"}]
    assert bool(found) == bool(expected)
    graph = capture(function, **INPUTS)
    for match in attempt(fusion, graph)[0][:expected]:
        assert match.nodes | match.crossed == {n for n in graph.graph.nodes if n.op not in ("placeholder", "output")}


def test_a_sum_of_two_tensors_binds_both_ways():
    def plus(x, alpha, weight, bias):
        return weight + bias + torch.tanh(alpha * x)

    found = matches(reading(plus, DYT.inputs), lambda x, w, b: w + b + torch.tanh(0.5 * x), x=(8,), w=(8,), b=(8,))
    assert [(m.inputs["weight"].name, m.inputs["bias"].name) for m in found] == [("w", "b"), ("b", "w")]


def test_one_name_is_one_value():
    def twice(x, alpha, weight, bias):
        return torch.tanh(alpha * x) * weight + bias * x

    fusion = reading(twice, {**DYT.inputs})
    assert len(matches(fusion, lambda x, w, b: torch.tanh(0.5 * x) * w + b * x)) == 1
    assert matches(fusion, lambda x, y, w, b: torch.tanh(0.5 * x) * w + b * y, **INPUTS, y=(4, 8)) == []
    assert len(matches(fusion, lambda x, w, b: torch.tanh(0.5 * x[:2]) * w + b * x.chunk(2)[0])) == 1, "written twice"
    _, tried = attempt(fusion, capture(lambda x, y, w, b: b * y + torch.tanh(0.5 * x) * w, **INPUTS, y=(4, 8)))
    assert "x is " in tried.near.reason
    assert "in one place and" in tried.near.reason


def test_a_value_that_a_cast_rounds_in_one_place_is_another():
    def twice(x, alpha, weight, bias):
        return torch.tanh(alpha * x) * weight + bias * x

    _, tried = attempt(reading(twice, {**DYT.inputs}), capture(lambda x, w, b: torch.tanh(0.5 * x) * w + b * x.half().float(), **INPUTS))
    assert tried.near.reason == "a cast rounds x to float16 in one place, not in another"


def test_numbers_and_tensors_are_not_each_other():
    assert matches(TANH, lambda x, w: torch.tanh(w * x), x=(4, 8), w=(8,)) == []
    _, tried = attempt(TANH, capture(lambda x, w: torch.tanh(w * x), x=(4, 8), w=(8,)))
    assert "not a number" in tried.near.reason
    _, tried = attempt(DYT, capture(lambda x, w, b: torch.tanh(0.5 * x) * w + 1, **INPUTS))
    assert tried.near.reason


NEAR = {
    "another function": (lambda x, w, b: torch.sigmoid(0.5 * x) * w + b, 2, "sigmoid", "expected tanh, found sigmoid"),
    "an unknown function": (lambda x, w, b: torch.sin(0.5 * x) * w + b, 2, "sin", "expected tanh, found sin"),
    "an unknown method": (lambda x, w, b: method(0.5 * x, "sinh") * w + b, 2, "sinh", "expected tanh, found sinh"),
    "an input": (lambda x, w, b: x * w + b, 2, "x", "expected tanh, found an input of this graph"),
    "at the root": (lambda x, w, b: torch.tanh(0.5 * x) * w - b, 0, "sub", "expected add, found sub"),
    "below": (lambda x, w, b: torch.tanh(0.5 / x) * w + b, 3, "truediv", "expected mul, found div"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_says_how_far_it_came_and_where(name):
    function, far, at, reason = NEAR[name]
    graph = capture(function, **INPUTS)
    found, tried = attempt(DYT, graph)
    near = tried.near
    assert found == []
    assert (near.fusion, near.root, near.node.name, near.reason) == ("dyt", graph.result, at, reason)
    assert (near.matched, near.total) == (far, 4)


def test_attributes_and_literals_are_compared():
    def rows(x, alpha):
        return torch.tanh(alpha * x).sum(-1) * 2

    fusion = fusion_tanh(pattern=rows, kernel=None, emit=emit)
    assert len(matches(fusion, lambda x: (0.5 * x).tanh().sum(1) * 2, x=(4, 8))) == 1
    for function, reason in (
        (lambda x: (0.5 * x).tanh().sum(0) * 2, "sum is over dim -2, here it has to be over dim -1"),
        (lambda x: (0.5 * x).tanh().sum(-1, True) * 2, "sum is over dim -1 with keepdim=True, here it has to be over dim -1 with keepdim=False"),
        (lambda x: (0.5 * x).tanh().sum(-1) * 3, "expected 2, found 3"),
    ):
        found, tried = attempt(fusion, capture(function, x=(4, 8)))
        assert found == []
        assert tried.near.reason == reason


def test_near_miss_of_a_split_names_the_part():
    def first_half(x, alpha):
        return torch.tanh(alpha * x.chunk(2, -1)[0])

    def second_half(x):
        return torch.tanh(0.5 * x.chunk(2, -1)[1])

    halves = fusion_tanh(pattern=first_half, kernel=None, emit=emit)
    for fusion, reason in (
        (halves, "expected part 1 of 2 of a split along dim -1, found part 2 of 2 of a split along dim -1"),
        (fusion_tanh(pattern=lambda x, alpha: torch.tanh(alpha * x.sigmoid()), kernel=None, emit=emit),
         "expected sigmoid, found part 2 of 2 of a split along dim -1"),
    ):  # fmt: skip
        found, tried = attempt(fusion, capture(second_half, x=(4, 8)))
        assert found == []
        assert tried.near.reason == reason


def test_rounding_before_a_split_names_the_part():
    def first_half(x, alpha):
        return torch.tanh(alpha * x.exp().chunk(2, -1)[0])

    fusion = fusion_tanh(pattern=first_half, kernel=None, emit=emit)
    (match,) = matches(fusion, lambda x: torch.tanh(0.5 * x.exp().half().float().chunk(2, -1)[0]), x=(4, 8))
    assert match.differs.startswith("a cast to float16 rounds before part 1 of 2 of a split along dim -1; ")


def test_an_inner_value_is_one_value():
    def shared(x, alpha):
        gate = torch.tanh(alpha * x)
        return gate.exp() * gate.log()

    fusion = fusion_tanh(pattern=shared, kernel=None, emit=emit)
    assert len(matches(fusion, lambda x: (lambda g: g.exp() * g.log())(torch.tanh(0.5 * x)), x=(4, 8))) == 1
    assert len(matches(fusion, lambda x: torch.tanh(0.5 * x).exp() * torch.tanh(0.5 * x).log(), x=(4, 8))) == 1
    found, tried = attempt(fusion, capture(lambda x: torch.tanh(0.5 * x).exp() * torch.tanh(0.25 * x).log(), x=(4, 8)))
    assert found == []
    assert tried.near.reason == "tanh is used where tanh_1 is here"


# -- dtypes --------------------------------------------------------------------------------------------------------
def in_float32(x, alpha):
    return torch.tanh(alpha * x.float()).to(x.dtype)


WIDE = fusion_tanh(pattern=in_float32, kernel=None, emit=emit)
DTYPES = {
    "the same": (WIDE, lambda x: torch.tanh(0.5 * x.float()).bfloat16(), BF16, None),
    "the same in float32": (WIDE, lambda x: torch.tanh(0.5 * x), F32, None),
    "more than that": (WIDE, lambda x: torch.tanh(0.5 * x.double()).to(BF16), BF16, "tanh is computed in float64; the kernel computes it in float32"),
    "a cast inside": (WIDE, lambda x: torch.tanh((0.5 * x.float()).bfloat16().float()).bfloat16(), BF16, "a cast to bfloat16 rounds before tanh; the kernel does not round there"),
    "another cast inside": (TANH, lambda x: torch.tanh((0.5 * x).half().float()), F32, "a cast to float16 rounds before tanh; the kernel does not round there"),
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_differences_of_dtype_are_named(name):
    fusion, function, dtype, differs = DTYPES[name]
    graph = capture(function, x=tensor(4, 8, dtype=dtype))
    assert [m.differs for m in attempt(fusion, graph, graph["tanh"])[0]] == [differs]


def rounding(x, alpha):
    return torch.tanh((alpha * x).half().float())


@pytest.mark.parametrize(
    ("function", "differs"),
    [
        (lambda x: torch.tanh((0.5 * x).half().float()), None),
        (lambda x: torch.tanh(0.5 * x), "nothing rounds to float16 before tanh; the kernel does"),
        (lambda x: torch.tanh((0.5 * x).bfloat16().float()), "bfloat16 before tanh where the kernel rounds to float16"),
    ],
)
def test_a_kernel_that_rounds(function, differs):
    found = matches(fusion_tanh(pattern=rounding, kernel=None, emit=emit), function, x=(4, 8))
    assert [m.differs for m in found] == [differs]


def test_the_last_cast_belongs_to_the_match():
    graph = capture(lambda x: (0.5 * x.float()).tanh().bfloat16() + 1, x=tensor(4, 8, dtype=BF16))
    (match,), _ = attempt(WIDE, graph, graph["tanh"])
    assert match.outputs == (graph["bfloat16"],)
    graph = capture(lambda x: (0.5 * x.float()).tanh() + 1, x=tensor(4, 8, dtype=BF16))
    found, tried = attempt(WIDE, graph, graph["tanh"])
    assert found == []
    assert tried.near.reason.startswith("its result is not cast to bfloat16")
    graph = capture(lambda x: ((h := (0.5 * x.float()).tanh()).bfloat16(), h + 1), x=tensor(4, 8, dtype=BF16))
    assert attempt(WIDE, graph, graph["tanh"])[0] == [], "the cast is not its only user"


def test_a_missing_cast_is_named_once():
    graph = capture(lambda x: (0.5 * x.float()).tanh() + 1, x=tensor(4, 8, dtype=BF16))
    _, tried = attempt(WIDE, graph, graph["tanh"])
    assert tried.near.reason == "its result is not cast to bfloat16 before it is used"


def test_the_policy_is_that_of_the_autocast_region():
    def product(x, alpha):
        return torch.tanh(alpha * F.linear(x, x))

    def function(x):
        with autocast(x):
            return torch.tanh(0.5 * F.linear(x, x))

    fusion = fusion_tanh(pattern=product, inputs={"x": "b n", "alpha": 0.5}, kernel=None, emit=emit)
    graph = capture(function, x=(4, 8))
    assert example(graph["tanh"]).dtype == BF16, "this tests nothing"
    assert [m.differs for m in attempt(fusion, graph, graph["tanh"])[0]] == [None]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_inputs_are_floating(dtype):
    graph = capture(lambda x: torch.tanh(0.5 * x), x=tensor(4, 8, dtype=dtype))
    found, tried = attempt(TANH, graph)
    assert found == []
    assert tried.near.reason == f"x is {str(dtype).removeprefix('torch.')}"


# -- shapes, results -----------------------------------------------------------------------------------------------
def test_one_view_is_not_another():
    def halves(x, alpha):
        return torch.tanh(alpha * x.reshape(x.shape[0] * 2, x.shape[1] // 2))

    fusion = fusion_tanh(pattern=halves, inputs={"x": "b n", "alpha": 0.5}, kernel=None, emit=emit)
    (match,) = matches(fusion, lambda x: torch.tanh(0.5 * x.view(8, 4)), x=(4, 8))
    assert match.differs is None
    (match,) = matches(fusion, lambda x: torch.tanh(0.5 * x.view(2, 16)), x=(4, 8))
    assert match.differs == "tanh makes shape (2, 16); the pattern's makes (8, 4)"


def test_several_results():
    def of_both(x, y):
        gate = torch.tanh(x)
        return gate * 2 + y, gate

    fusion = fusion_both(pattern=of_both, find=None, kernel=None, emit=emit)
    graph = capture(lambda x, y: (torch.tanh(x) * 2 + y, x), x=(4, 8), y=(4, 8))
    (match,) = [m for m in attempt(fusion, graph)[0] if m.inputs["y"].name == "y"]
    assert match.outputs == (graph["add"], graph["tanh"])
    assert match.root is graph["add"]


def test_what_reads_a_match_completes_or_refuses_it():
    def read(match):
        return None if match.inputs["alpha"] == 1 else dataclasses.replace(match, note="read")

    fusion = fusion_tanh(read=read)
    assert matches(fusion, lambda x: torch.tanh(1 * x), x=(4, 8)) == []
    assert [m.note for m in matches(fusion, lambda x: torch.tanh(2 * x), x=(4, 8))] == ["read"]


def test_statics_are_those_of_the_variant():
    def biased(x, alpha, weight, bias, sign):
        return torch.tanh(alpha * x) * weight + bias if sign > 0 else torch.tanh(alpha * x) * weight - bias

    fusion = reading(biased, DYT.inputs, variants=({"sign": 1}, {"sign": -1}))
    graph = capture(lambda x, w, b: torch.tanh(0.5 * x) * w - b, **INPUTS)
    found = [m.statics for p in patterns_of(fusion) for m in Attempt(graph.view, p, graph.result).matches()]
    assert found == [{"sign": -1}]
