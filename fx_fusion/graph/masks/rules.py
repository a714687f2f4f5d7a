"""The vocabulary of masks: for each op, the expression of its result over the indices of its result."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.masks.expressions import (
    DIMS,
    Interpreter,
    Opaque,
    as_number,
    as_predicate,
    combined,
    condition_for,
    parts_of,
)
from fx_fusion.graph.masks.held import HIDDEN, held, hidden_in, may_be_hidden, numbers_of
from fx_fusion.graph.terms import example, is_tensor

Bound = Mapping[str, Any]
Rule = Callable[[Interpreter, fx.Node, Bound], sympy.Basic]
RULES: dict[str, Rule] = {}


def rule_of(*names: str) -> Callable[[Rule], Rule]:
    """Decorate the rule of these ops."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


@rule_of("arange")
def _arange(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    bounds, keywords = bound["bounds"], bound["keywords"]
    from_zero = len(bounds) == 1 and "end" not in keywords
    start = 0 if from_zero else bounds[0] if bounds else keywords.get("start", 0)
    step = bounds[2] if len(bounds) > 2 else keywords.get("step", 1)
    first, rise = (_as_read(prover, operand, example(node).dtype, node) for operand in (start, step))
    return first + rise * DIMS[0]


@rule_of("ones", "new_ones", "ones_like")
def _ones(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    return sympy.true if example(node).dtype == torch.bool else sympy.Integer(1)


@rule_of("zeros", "new_zeros", "zeros_like")
def _zeros(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    return sympy.false if example(node).dtype == torch.bool else sympy.Integer(0)


@rule_of("full", "new_full", "full_like")
def _full(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    return _of_its_dtype(prover, bound["fill_value"], node)


@rule_of("tensor", "scalar_tensor")
def _number(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    return _of_its_dtype(prover, bound["data" if "data" in bound else "s"], node)


def _of_its_dtype(prover: Interpreter, number: Any, node: fx.Node) -> sympy.Basic:
    """Return a number in the dtype of the tensor that a factory makes of it."""
    dtype = example(node).dtype
    if dtype == torch.bool:
        return as_predicate(prover.at(number, node), node)
    return held(prover, _unrounded(prover, number, dtype, node), dtype, node)


def _unrounded(prover: Interpreter, operand: Any, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    expression = prover.numbers(operand, node)
    if is_tensor(operand):
        _check_that_values_are_kept(expression, example(operand).dtype, dtype, node)
    return expression


def _as_read(prover: Interpreter, operand: Any, dtype: torch.dtype, node: fx.Node) -> sympy.Basic:
    """Return an operand as numbers of ``dtype``, to which an op of several operands converts them."""
    expression = _unrounded(prover, operand, dtype, node)
    read = held(prover, expression, dtype, node)
    # Some ops and devices round a number to 16 bits first, others compute with it in float32.
    is_number = not is_tensor(operand) or (example(operand).dim() == 0 and example(operand).dtype != dtype)
    if is_number and dtype in (torch.float16, torch.bfloat16) and read != expression:
        raise Opaque(node, f"{node.name} rounds {expression} to {dtype}, or computes with it in float32")
    return read


def _check_that_values_are_kept(expression: sympy.Basic, before: torch.dtype, after: torch.dtype, node: fx.Node) -> None:
    """Raise Opaque where a cast may round or wrap the values of a tensor, of which no bound is known."""
    unknown = any(value.atoms(AppliedUndef) for value, _ in parts_of(expression))
    if unknown and not keeps_values(before, after):
        raise Opaque(node, f"{node.name} holds values of {before} in {after}")


def _visible_numbers(prover: Interpreter, operand: Any, node: fx.Node) -> sympy.Basic:
    """An operand of what would make a number of an infinity: ``-inf * 0``."""
    return _visible_number(prover.numbers(operand, node), node)


def _visible_number(expression: sympy.Basic, node: fx.Node) -> sympy.Basic:
    if may_be_hidden(expression):
        raise Opaque(node, f"{node.name} calculates with what hides in a mask that comes in")
    return expression


def _arithmetic(function: Callable[[Any, Any], Any], *, hidden: bool = False) -> Rule:
    """``hidden``: also of a mask that comes in."""

    def rule(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
        if bound.get("alpha", 1) != 1:
            raise Opaque(node, f"{node.name} scales an operand by alpha")
        dtype = example(node).dtype
        a, b = (_as_read(prover, operand, dtype, node) for operand in (bound["input"], bound["other"]))
        if not hidden:
            a, b = _visible_number(a, node), _visible_number(b, node)
        hides = may_be_hidden(a) or may_be_hidden(b)
        result = combined(functools.partial(_sum_of_hidden, dtype, node) if hides else function, a, b, node)
        # A sum of booleans is one of them or both, no 2.
        return as_predicate(result, node) if dtype == torch.bool else result

    return rule


def _sum_of_hidden(dtype: torch.dtype, node: fx.Node, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    """Return the sum of two values, of which one may be what a mask that comes in hides by: -inf, or the lowest number."""
    if a.is_zero or b.is_zero or not (may_be_hidden(a) or may_be_hidden(b)):
        return a + b
    if all(value in (HIDDEN.get(dtype), -sympy.oo) for value in (a, b)):
        return -sympy.oo  # Twice the lowest number overflows.
    raise Opaque(node, f"{node.name} calculates with what hides in a mask that comes in")


RULES["add"] = _arithmetic(operator.add, hidden=True)
RULES["sub"] = _arithmetic(operator.sub)
RULES["rsub"] = _arithmetic(lambda a, b: b - a)
RULES["mul"] = _arithmetic(operator.mul)


def _comparison(relation: Any) -> Rule:
    def rule(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
        operands = bound["input"], bound["other"]
        dtype = torch.result_type(*map(_for_its_dtype, operands))  # both are converted to it
        a, b = (_as_read(prover, operand, dtype, node) for operand in operands)
        return _compare(relation, a, b, node)

    return rule


for _name in ("le", "lt", "ge", "gt", "eq", "ne"):
    RULES[_name] = _comparison(getattr(sympy, _name.capitalize()))


def _for_its_dtype(operand: Any) -> Any:
    known = example(operand)
    return 0 if isinstance(known, torch.SymInt) else 0.0 if isinstance(known, torch.SymFloat) else known


def _compare(relation: Any, a: sympy.Basic, b: sympy.Basic, node: fx.Node) -> sympy.Basic:
    """A comparison; a Piecewise of numbers against a number becomes the condition of its matching pieces."""
    if isinstance(a, sympy.Abs) and relation in (sympy.Le, sympy.Lt):
        return sympy.And(relation(a.args[0], b), relation(-a.args[0], b))
    for left, right, flip in ((a, b, False), (b, a, True)):
        if not isinstance(left, sympy.Piecewise) or not right.is_number:
            continue
        values = {e: numbers_of(e) for e, _ in left.args}
        if None in values.values():
            continue
        answers = {e: {bool(relation(right, n) if flip else relation(n, right)) for n in values[e] or ()} for e in values}
        if any(len(answer) > 1 for answer in answers.values()):
            raise Opaque(node, f"{node.name} asks which number hides in a mask that comes in")
        hits = {e for e, answer in answers.items() if True in answer}
        return condition_for([(e, c) for e, c in left.args], hits.__contains__)
    if may_be_hidden(a) or may_be_hidden(b):
        raise Opaque(node, f"{node.name} asks which number hides in a mask that comes in")
    return relation(a, b)


def _logic(function: Any) -> Rule:
    def rule(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
        operands = list(bound.values())
        if not all(isinstance(a, bool) or (is_tensor(a) and example(a).dtype == torch.bool) for a in operands):
            raise Opaque(node, f"{node.name} is not logic of booleans")
        return function(*(as_predicate(prover.at(operand, node), node) for operand in operands))

    return rule


for _kind in ("bitwise", "logical"):
    RULES[f"{_kind}_and"], RULES[f"{_kind}_or"] = _logic(sympy.And), _logic(sympy.Or)
    RULES[f"{_kind}_not"] = _logic(sympy.Not)


@rule_of("abs")
def _abs(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    return sympy.Abs(_visible_numbers(prover, bound["input"], node))


@rule_of("floor_divide")
def _floor_divide(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    dtype = example(node).dtype
    a, b = (_visible_number(_as_read(prover, operand, dtype, node), node) for operand in bound.values())
    if not (a.is_integer and b.is_Integer and b > 0):
        raise Opaque(node, f"{node.name} divides by {b}")
    return sympy.floor(a / b)


@rule_of("neg")
def _neg(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    return -_visible_numbers(prover, bound["input"], node)


@rule_of("to", "bool", "long", "int", "float", "half", "bfloat16", "type_as", "type")
def _cast(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    inner = prover.at(bound["input"], node)
    before, after = example(bound["input"]).dtype, example(node).dtype
    if after == torch.bool:
        return as_predicate(inner, node)
    if before.is_floating_point and not after.is_floating_point and not inner.is_integer:
        raise Opaque(node, f"{node.name} truncates")
    inner = as_number(inner)
    _check_that_values_are_kept(inner, before, after, node)
    return hidden_in(inner, after, node)


@rule_of("diff")
def _diff(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    x, dim, prepend = bound["input"], bound["dim"], bound["prepend"]
    if bound["n"] != 1 or bound["append"] is not None:
        raise Opaque(node, f"{node.name} is not a first difference")
    if example(x).dtype != example(node).dtype or example(x).dtype == torch.bool:
        raise Opaque(node, f"{node.name} prepends another dtype, or is of booleans")
    i = DIMS[dim % example(x).dim()]
    inner = _visible_number(as_number(prover.anywhere(x, node)), node)
    if prepend is None:
        return _difference(inner.subs(i, i + 1), inner, node)
    if example(prepend).shape[dim] != 1:
        raise Opaque(node, f"{node.name} prepends more than one element")
    first = _difference(inner.subs(i, 0), _as_read(prover, prepend, example(node).dtype, node), node)
    later = _difference(inner, inner.subs(i, i - 1), node)
    return later if first == later else sympy.Piecewise((first, sympy.Eq(i, 0)), (later, True))


def _difference(a: sympy.Basic, b: sympy.Basic, node: fx.Node) -> sympy.Basic:
    return sympy.expand(combined(operator.sub, a, b, node))


@rule_of("cumsum")
def _cumsum(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    i = DIMS[bound["dim"] % example(node).dim()]
    inner = _visible_number(_as_read(prover, bound["input"], example(node).dtype, node), node)
    if inner.has(i):
        raise Opaque(node, f"{node.name} sums what changes along its dim")
    return combined(operator.mul, inner, i + 1, node)


@rule_of("where")
def _where(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    condition = as_predicate(prover.at(bound["condition"], node), node)
    return _choose(prover, node, condition, bound["input"], bound["other"])


@rule_of("masked_fill")
def _masked_fill(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    mask = as_predicate(prover.at(bound["mask"], node), node)
    return _choose(prover, node, mask, bound["value"], bound["input"])


def _choose(prover: Interpreter, node: fx.Node, condition: Boolean, chosen: Any, otherwise: Any) -> sympy.Basic:
    dtype = example(node).dtype
    if dtype == torch.bool:
        a, b = (as_predicate(prover.at(operand, node), node) for operand in (chosen, otherwise))
        return sympy.Or(sympy.And(condition, a), sympy.And(sympy.Not(condition), b))
    a, b = (_as_read(prover, operand, dtype, node) for operand in (chosen, otherwise))
    return sympy.piecewise_fold(sympy.Piecewise((a, condition), (b, True)))


@rule_of("tril", "triu")
def _triangle(prover: Interpreter, node: fx.Node, bound: Bound) -> sympy.Basic:
    rank = example(node).dim()
    q, k, diagonal = DIMS[rank - 2], DIMS[rank - 1], prover.at(bound["diagonal"], node)
    kept = sympy.Le(k - q, diagonal) if prover.name(node) == "tril" else sympy.Ge(k - q, diagonal)
    inner = prover.at(bound["input"], node)
    if example(node).dtype == torch.bool:
        return sympy.And(kept, as_predicate(inner, node))
    return sympy.Piecewise((as_number(inner), kept), (0, True))
