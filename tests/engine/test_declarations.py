"""Every mistake of a declaration is an error when its file is imported, and the error says which."""

import dataclasses
import itertools

import pytest
import torch

from fx_fusion.errors import DeclarationError
from fx_fusion.fusion.declaration import case
from fx_fusion.fusion.legality import asked, why_not
from fx_fusion.fusion.match import Match
from fx_fusion.fusion.registry import all_fusions, in_order
from fx_fusion.testing import make_inputs
from fx_fusion.torch_internals.fakes import FakeTensorMode
from tests.engine.graphs import capture
from tests.engine.tiny import SCALED_TANH, dyt, fusion_dyt, op


def swapped(x, weight, alpha, bias):
    return dyt(x, alpha, weight, bias)


def other_names(x, a, weight, bias):
    return dyt(x, a, weight, bias)


def other_op(x, alpha, weight, bias):
    return torch.special.i0(alpha * x) * weight + bias


def other_method(x, alpha, weight, bias):
    return (alpha * x).heaviside(weight) + bias


def broken(x, alpha, weight, bias):
    return dyt(x, alpha, weight, bias) if x.sum() > 0 else x


def without_all(x, alpha, weight, bias):
    return NotImplemented if weight is None else dyt(x, alpha, weight, bias)


def with_mode(x, alpha, weight, bias, mode):
    return dyt(x, alpha, weight, bias)


def without_bias(x, alpha, weight, bias):
    return torch.tanh(alpha * x) * weight


def emit(editor, match):
    raise AssertionError("is not called")


RENAMED = op("renamed", "(Tensor x, float a, Tensor weight, Tensor bias) -> Tensor y", dyt, where=f"{__name__}:dyt")
ELSEWHERE = op("elsewhere", "(Tensor x, float alpha, Tensor weight, Tensor bias) -> Tensor y", dyt)
OPTIONAL = op("optional", "(Tensor x, float alpha, Tensor? weight, Tensor bias) -> Tensor y", dyt, where="tests.engine.tiny:dyt")
INPUTS = {"x": "... n", "alpha": 0.5, "weight": "n", "bias": "n"}
NO_WEIGHT = ({}, {"weight": None})

MISTAKES = {
    "wrong spec": ({"inputs": {**INPUTS, "weight": "n!"}}, "input 'weight': the dims 'n!' can't be read: 'n!' is no dim"),
    "two of any number": ({"inputs": {**INPUTS, "x": "... n ..."}}, "only one may be"),
    "an input too many": ({"inputs": {**INPUTS, "gate": "n"}}, r"dyt\(x, alpha, weight, bias\) does not take the declared inputs and statics \(x, alpha, weight, bias, gate\)"),
    "an input too few": ({"inputs": {"x": "... n", "alpha": 0.5, "weight": "n"}}, "does not take the declared inputs"),
    "a static that the pattern has not": ({"variants": ({"mode": 1},)}, r"does not take .* \(x, alpha, weight, bias, mode\)"),
    "a spelling of other parameters": ({"spellings": (other_names,)}, r"other_names\(x, a, weight, bias\) does not take"),
    "a guard of other parameters": ({"guard": lambda x: None}, r"<lambda>\(x\) does not take"),
    "a why_keep of other parameters": ({"why_keep": other_names}, r"other_names\(x, a, weight, bias\) does not take"),
    "an op that nobody knows": ({"pattern": other_op, "emit": emit}, "other_op calls special_i0, which graph/signatures.py does not list"),
    "a method that nobody knows": ({"pattern": other_method, "emit": emit}, "other_method calls heaviside, which"),
    "an unknown op in a spelling": ({"spellings": (other_op,)}, "other_op calls special_i0"),
    "control flow": ({"pattern": broken, "emit": emit}, "broken can't be traced with {}"),
    "neither kernel nor emit": ({"kernel": None}, "has neither a kernel nor an emit"),
    "a kernel of other parameters": ({"kernel": RENAMED}, r"its kernel takes \(x, a, weight, bias\), the fusion declares \(x, alpha, weight, bias\)"),
    "the kernel of another fusion": ({"kernel": SCALED_TANH}, r"its kernel takes \(x, alpha\)"),
    "a kernel with another reference": ({"kernel": ELSEWHERE}, "is the op 'elsewhere', which computes tests.engine.tiny:elsewhere"),
    "no optional parameter": ({"variants": NO_WEIGHT}, r"a variant has no weight; declare it in the kernel's schema as `Tensor\? weight`"),
    "a pattern without a variant": ({"pattern": without_all, "variants": NO_WEIGHT, "kernel": OPTIONAL}, "pattern"),
    "find and spellings": ({"find": lambda search: (), "spellings": (dyt,)}, "has a find; spellings, read and join belong to"),
    "find and read": ({"find": lambda search: (), "read": lambda match: match}, "has a find; spellings, read and join"),
    "an unknown tensor in a field": ({"frozen": ("gate",)}, "frozen names gate; its tensors are x, weight, bias"),
    "a scalar in a field of tensors": ({"positive": ("alpha",)}, "positive names alpha"),
    "indices of an unknown dim": ({"integers": {"x": "v"}}, "integers bounds indices by v; its dims are n, m"),
    "an unknown static": ({"ignored": {"x": "index"}}, "ignored names index; its statics are "),
    "a dim that is not shared": ({"shared": ("n",)}, "shared names n"),
    "an unknown dim in a case": ({"cases": (case("wide", m=2, n=8, k=3),)}, "case 'wide' has sizes of k; its dims are n, m"),
    "a missing size": ({"cases": (case("odd", m=3),)}, "case 'odd' has no size of n"),
    "traffic of an unknown name": ({"traffic": ("2*m*n*bytes", "2*m*k*bytes")}, r"the traffic '2\*m\*k\*bytes' names k; it has n, m, bytes"),
}  # fmt: skip


def test_the_declaration_without_a_mistake():
    fusion = fusion_dyt(traffic=("2*m*n*bytes", "3*m*n*bytes"), cases=(case("odd", m=3, n=7),), spellings=(swapped,))
    assert fusion.tensors == ("x", "weight", "bias")
    assert fusion.dims == ("n", "m")
    assert fusion.static_names == ()
    assert fusion.small_case.name == "odd"
    assert fusion_dyt(pattern=with_mode, variants=({"mode": 1}, {"mode": 2}), kernel=None, emit=emit).static_names == ("mode",)
    assert fusion_dyt(variants=NO_WEIGHT, kernel=OPTIONAL, pattern=dyt_without).static_names == ()


def dyt_without(x, alpha, weight, bias):
    return torch.tanh(alpha * x) + bias if weight is None else dyt(x, alpha, weight, bias)


OPTIONAL.reference.where = f"{__name__}:dyt_without"


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_refused(name):
    changes, sentence = MISTAKES[name]
    if name == "a pattern without a variant":
        changes = {**changes, "kernel": op("all", "(Tensor x, float alpha, Tensor? weight, Tensor bias) -> Tensor y", dyt, where=f"{__name__}:without_all")}
        sentence = "its pattern has no variant {'weight': None}"
    with pytest.raises(DeclarationError, match=sentence) as refused:
        fusion_dyt(**changes)
    assert "'dyt'" in str(refused.value), "of which fusion"


def test_an_input_that_the_pattern_does_not_use():
    with pytest.raises(DeclarationError, match="does not depend on bias"):
        fusion_dyt(pattern=without_bias, kernel=None, emit=emit)


def test_a_result_that_is_not_below_the_first():
    with pytest.raises(DeclarationError, match="is not made of the others"):
        fusion_dyt(pattern=two_results, kernel=None, emit=emit)


def two_results(x, alpha, weight, bias):
    return dyt(x, alpha, weight, bias), x * 2


def test_a_spelling_may_lack_a_variant():
    assert fusion_dyt(spellings=(lambda x, alpha, weight, bias: NotImplemented,))


# -- the order of fusions ------------------------------------------------------------------------------------------
def named(name, *before):
    return fusion_dyt(name=name, before=before, kernel=None, emit=emit)


def order(*fusions):
    return [fusion.name for fusion in in_order(fusions)]


def test_each_fusion_comes_before_those_that_it_names():
    assert order(named("c"), named("a"), named("b")) == ["a", "b", "c"], "by name where that leaves a choice"
    assert order(named("a"), named("b"), named("c", "a")) == ["b", "c", "a"]
    assert order(named("c", "b"), named("b", "a"), named("a")) == ["c", "b", "a"]


def test_a_name_that_does_not_exist():
    with pytest.raises(DeclarationError, match=r"fusion 'a' is before 'rms_nrm', which does not exist. Did you mean 'rms_norm'\?"):
        order(named("a", "rms_nrm"), named("rms_norm"))


def test_fusions_that_are_each_before_the_other():
    with pytest.raises(DeclarationError, match="can't each be before the next: ") as refused:
        order(named("a", "b"), named("b", "c"), named("c", "a"), named("d"))
    assert "d" not in str(refused.value).split(": ")[1].rstrip(".").split(" before ")


def test_a_cycle_is_told_in_its_order():
    """``x before y`` is said of fusions that declare it."""
    fusions = {"a": "b", "b": "c", "c": "a"}
    with pytest.raises(DeclarationError) as refused:
        order(*(named(one, other) for one, other in fusions.items()))
    names = str(refused.value).split(": ")[1].rstrip(".").split(" before ")
    assert names[0] == names[-1]
    assert all(fusions[one] == other for one, other in itertools.pairwise(names))


# -- rules that return no sentence ---------------------------------------------------------------------------------
def matched():
    graph = capture(lambda x, w, b: torch.tanh(0.5 * x) * w + b, x=(4, 8), w=(8,), b=(8,))
    nodes = frozenset(n for n in graph.graph.nodes if n.op == "call_function")
    inputs = {"x": graph["x"], "alpha": 0.5, "weight": graph["w"], "bias": graph["b"]}
    return graph.view, Match("dyt", (graph.result,), nodes, inputs)


@pytest.mark.parametrize("rule", ["guard", "why_keep"])
@pytest.mark.parametrize("answer", [True, False, "", 0, ("no",)], ids=repr)
def test_a_rule_that_returns_no_sentence(rule, answer):
    fusion = fusion_dyt(**{rule: lambda x, alpha, weight, bias: answer})
    _, match = matched()
    with pytest.raises(DeclarationError, match=f"fusion 'dyt': {rule} returned") as refused:
        asked(fusion, rule, match)
    assert repr(answer) in str(refused.value)


def test_a_rule_is_given_example_values():
    seen = {}

    def guard(x, alpha, weight, bias):
        seen.update(x=x, alpha=alpha, weight=weight, bias=bias)

    view, match = matched()
    assert why_not(fusion_dyt(guard=guard), match, view) is None
    assert (seen["x"].shape, seen["alpha"], seen["bias"].shape) == ((4, 8), 0.5, (8,))
    bound = {n: v for n, v in match.inputs.items() if n != "bias"}
    assert asked(fusion_dyt(guard=guard), "guard", dataclasses.replace(match, inputs=bound)) is None
    assert seen["bias"] is None, "what the match has not"


def test_a_match_that_binds_what_is_not_declared():
    view, match = matched()
    with pytest.raises(DeclarationError, match="binds gate, which is no input"):
        why_not(fusion_dyt(), dataclasses.replace(match, inputs={**match.inputs, "gate": match.inputs["x"]}), view)


@pytest.mark.parametrize("fusion", all_fusions(), ids=lambda f: f.name)
def test_inputs_have_the_sizes_of_their_case(fusion):
    """A dim that may be broadcast is 1 where it is declared as shared; every other one is as long as the case says."""
    with FakeTensorMode():
        for given in fusion.cases:
            inputs = make_inputs(fusion, given, {**fusion.variants[0], **given.statics}, torch.float32, "cpu")
            for name in fusion.tensors:
                places = fusion.specs[name].align(inputs[name].dim()) if name in inputs else ()
                for dim, where in places:
                    wanted = given.sizes.get(dim.name, given.sizes.get(dim.like or ""))
                    if wanted is not None and not dim.several and not (dim.broadcast and dim.name in fusion.shared):
                        assert inputs[name].shape[where.start] == wanted, (name, dim.name, given.name)
