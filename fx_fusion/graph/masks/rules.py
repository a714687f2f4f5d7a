"""The vocabulary of masks: for each op, the expression of its result over the indices of its result."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.masks.expressions import (
    DIMS,
    Opaque,
    as_number,
    as_predicate,
    condition_for,
    is_predicate,
    op_name,
    size_of,
    upper_bound,
)
from fx_fusion.graph.view import is_tensor, value

if TYPE_CHECKING:
    from fx_fusion.graph.masks.prover import MaskProver

Rule = Callable[..., sympy.Basic]  # (MaskProver, node) -> the expression of the node
# Keywords that a rule reads or that change no value; any other makes the node opaque.
KEYWORDS: dict[str, set[str]] = {
    "arange": {"start", "end", "step", "dtype"}, "diff": {"prepend", "dim", "n", "append"}, "cumsum": {"dim", "dtype"},
    "ones": {"dtype"}, "new_ones": {"dtype"}, "ones_like": {"dtype"}, "zeros": {"dtype"}, "new_zeros": {"dtype"},
    "zeros_like": {"dtype"}, "full": {"dtype", "fill_value"}, "new_full": {"dtype", "fill_value"},
    "full_like": {"dtype", "fill_value"}, "to": {"dtype", "copy", "non_blocking"}, "tril": {"diagonal"},
    "triu": {"diagonal"}, "unsqueeze": {"dim"}, "clone": {"memory_format"}, "contiguous": {"memory_format"},
}  # fmt: skip
_NARROW = (torch.int8, torch.uint8, torch.int16)
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return add


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


@_rule("arange")
def _arange(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    given = list(node.args)
    if len(given) == 1 and "end" not in node.kwargs:
        given.insert(0, 0)
    start = given[0] if given else node.kwargs.get("start", 0)
    step = given[2] if len(given) > 2 else node.kwargs.get("step", 1)
    expression = prover.at(start, node) + prover.at(step, node) * DIMS[0]
    _exact_indices(node, expression)
    return expression


@_rule("ones", "new_ones", "ones_like")
def _ones(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    return sympy.true if value(node).dtype == torch.bool else sympy.Integer(1)


@_rule("zeros", "new_zeros", "zeros_like")
def _zeros(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    return sympy.false if value(node).dtype == torch.bool else sympy.Integer(0)


@_rule("full", "new_full", "full_like")
def _full(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    position = 2 if op_name(node) == "new_full" else 1
    filled = prover.at(argument(node, position, "fill_value"), node)
    dtype = value(node).dtype
    if dtype == torch.bool:
        return as_predicate(filled, node)
    filled = as_number(filled)
    if isinstance(filled, sympy.Number) and filled.is_finite and not filled.is_Integer:
        # As the dtype holds it: an integer truncates, 1e-8 is 0 in float16.
        filled = sympy.sympify(torch.tensor(float(filled), dtype=torch.float64).to(dtype).tolist())
    return filled


def _binary(function: Callable[[Any, Any], Any]) -> Rule:
    def rule(prover: MaskProver, node: fx.Node) -> sympy.Basic:
        if value(node).dtype in _NARROW:
            raise Opaque(node, f"{node.name} counts in {value(node).dtype}, which wraps around")
        return function(prover.numbers(node.args[0], node), prover.numbers(node.args[1], node))

    return rule


for _names, _function in {
    ("add", "iadd"): operator.add,
    ("sub",): operator.sub,
    ("rsub",): lambda a, b: b - a,
    ("mul",): operator.mul,
    ("le", "less_equal"): lambda a, b: _compare(sympy.Le, a, b),
    ("lt", "less"): lambda a, b: _compare(sympy.Lt, a, b),
    ("ge", "greater_equal"): lambda a, b: _compare(sympy.Ge, a, b),
    ("gt", "greater"): lambda a, b: _compare(sympy.Gt, a, b),
    ("eq",): lambda a, b: _compare(sympy.Eq, a, b),
    ("ne", "not_equal"): lambda a, b: _compare(sympy.Ne, a, b),
}.items():
    for _n in _names:
        RULES[_n] = _binary(_function)


def _compare(relation: Any, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    """A comparison; a Piecewise of numbers against a number becomes the condition of its matching pieces."""
    if isinstance(a, sympy.Abs) and relation in (sympy.Le, sympy.Lt):
        return sympy.And(relation(a.args[0], b), relation(-a.args[0], b))
    for left, right, flip in ((a, b, False), (b, a, True)):
        if isinstance(left, sympy.Piecewise) and right.is_number and all(e.is_number for e, _ in left.args):
            hits = [e for e, _ in left.args if bool(relation(right, e) if flip else relation(e, right))]
            return condition_for([(e, c) for e, c in left.args], hits.__contains__)
    return relation(a, b)


def _logic(function: Any, operands: int) -> Rule:
    def rule(prover: MaskProver, node: fx.Node) -> sympy.Basic:
        of_bools = all(isinstance(a, bool) or (is_tensor(a) and value(a).dtype == torch.bool) for a in node.args)
        if len(node.args) != operands or not of_bools:
            raise Opaque(node, f"{node.name} is not logic of booleans")
        return function(*(as_predicate(prover.at(operand, node), node) for operand in node.args))

    return rule


for _names, _logical, _count in (
    (("and", "logical_and", "bitwise_and"), sympy.And, 2),
    (("or", "logical_or", "bitwise_or"), sympy.Or, 2),
    (("invert", "logical_not", "bitwise_not"), sympy.Not, 1),
):
    for _n in _names:
        RULES[_n] = _logic(_logical, _count)


@_rule("abs")
def _abs(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    return sympy.Abs(prover.numbers(node.args[0], node))


@_rule("floordiv", "floor_divide")
def _floordiv(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    a, b = (prover.numbers(operand, node) for operand in node.args)
    if not (a.is_integer and b.is_Integer and b > 0):
        raise Opaque(node, f"{node.name} divides by {b}")
    return sympy.floor(a / b)


@_rule("neg")
def _neg(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    return -prover.numbers(node.args[0], node)


@_rule("to", "bool", "long", "int", "float", "half", "bfloat16", "type_as", "type")
def _cast(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    inner = prover.at(node.args[0], node)
    before, after = value(node.args[0]).dtype, value(node).dtype
    if after == torch.bool:
        return as_predicate(inner, node)
    if before.is_floating_point and not after.is_floating_point:
        raise Opaque(node, f"{node.name} truncates")
    if inner.atoms(sympy.core.function.AppliedUndef) and not keeps_values(before, after):
        raise Opaque(node, f"{node.name} holds values of {before} in {after}")  # how large they are is not known
    _exact_indices(node, inner)
    return as_number(inner)


def _exact_indices(node: fx.Node, expression: sympy.Basic) -> None:
    """An index (or anything made of one) is a number of the node's dtype: a bfloat16 has none above 256."""
    numbers = expression.args if isinstance(expression, sympy.Piecewise) else [(as_number(expression), True)]
    cannot_count = value(node).dtype in (torch.bfloat16, torch.float16, *_NARROW) and not is_predicate(expression)
    if cannot_count and not all(e.is_number for e, _ in numbers):
        raise Opaque(node, f"{node.name} holds indices in {value(node).dtype}, which can't count far")


@_rule("contiguous", "clone", "detach", "expand", "expand_as", "broadcast_to", "alias")
def _same(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    return prover.at(node.args[0], node)


@_rule("unsqueeze")
def _unsqueeze(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    rank = value(node).dim()
    dim = argument(node, 1, "dim") % rank
    dims = [d for i, d in enumerate(DIMS[:rank]) if i != dim]
    return prover.at(node.args[0], node, dims)


@_rule("squeeze", "view", "reshape")
def _reshape(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    """Adding and removing dims of size 1 only."""
    below = node.args[0]
    if value(below).dtype != value(node).dtype:
        raise Opaque(node, f"{node.name} reads the memory of {value(below).dtype} as {value(node).dtype}")
    before = [i for i, s in enumerate(value(below).shape) if not (isinstance(s, int) and s == 1)]
    after = [i for i, s in enumerate(value(node).shape) if not (isinstance(s, int) and s == 1)]
    same = len(before) == len(after) and all(
        size_of(value(below).shape[i]) == size_of(value(node).shape[j]) for i, j in zip(before, after, strict=True)
    )
    if not same:
        raise Opaque(node, f"{node.name} merges or splits dims")
    dims: list[Any] = [sympy.Integer(0)] * value(below).dim()
    for i, j in zip(before, after, strict=True):
        dims[i] = DIMS[j]
    return prover.at(below, node, dims)


@_rule("transpose", "t", "permute")
def _transpose(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    rank = value(node).dim()
    order = list(range(rank))
    if op_name(node) == "permute":
        order = [d % rank for d in (node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:])]
    else:
        a, b = (node.args[1] % rank, node.args[2] % rank) if op_name(node) == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    dims: list[Any] = [None] * rank
    for i, source in enumerate(order):
        dims[source] = DIMS[i]
    return prover.at(node.args[0], node, dims)


@_rule("getitem")
def _getitem(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    below, index = node.args
    items = list(index) if isinstance(index, tuple) else [index]
    rank = value(below).dim()
    if Ellipsis in items:
        at = items.index(Ellipsis)
        taken = sum(item is not None and item is not Ellipsis for item in items)
        items[at : at + 1] = [slice(None)] * (rank - taken)
    items += [slice(None)] * (rank - sum(item is not None for item in items))
    if any(isinstance(item, fx.Node) and is_tensor(item) for item in items):
        return _gather(prover, node, below, items)
    dims: list[Any] = []
    out = 0
    for item in items:
        if item is None:
            out += 1
        elif isinstance(item, slice):
            if item.step not in (None, 1) or (isinstance(item.start, int) and item.start < 0):
                raise Opaque(node, f"{node.name} slices with a step or from the end")
            start = sympy.Integer(0) if item.start is None else prover.at(item.start, node)
            lowest = upper_bound(-start, {})
            if lowest is None or not lowest.is_nonpositive:
                raise Opaque(node, f"{node.name} may slice from the end")
            dims.append(DIMS[out] + start)
            out += 1
        elif isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            dims.append(sympy.Integer(item))
        else:
            raise Opaque(node, f"{node.name} is indexed by {item}")
    return prover.at(below, node, dims)


def _gather(prover: MaskProver, node: fx.Node, below: fx.Node, items: list[Any]) -> sympy.Basic:
    """``x[i, j]`` with broadcast index tensors for the leading dims."""
    indices = [item for item in items if isinstance(item, fx.Node)]
    rest = items[len(indices) :]
    if items[: len(indices)] != indices or any(item != slice(None) for item in rest):
        raise Opaque(node, f"{node.name} mixes index tensors and slices")
    kept = list(DIMS[value(node).dim() - len(rest) : value(node).dim()])
    lead = list(DIMS[: value(node).dim() - len(rest)])
    if any(value(i).dtype == torch.bool for i in indices):
        raise Opaque(node, f"{node.name} is indexed by a boolean tensor")
    chosen = [prover.at(i, node, lead) for i in indices]
    sizes = {dim: size_of(size) for dim, size in zip(DIMS, value(node).shape, strict=False)}
    for i in chosen:
        lowest = upper_bound(-i, sizes)
        if lowest is None or not lowest.is_nonpositive:
            raise Opaque(node, f"{node.name} may index from the end")
    return prover.at(below, node, [*chosen, *kept])


@_rule("diff")
def _diff(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    x, dim = node.args[0], argument(node, 2, "dim", -1)
    if argument(node, 1, "n", 1) != 1 or argument(node, 4, "append") is not None:
        raise Opaque(node, f"{node.name} is not a first difference")
    rank = value(x).dim()
    i = DIMS[dim % rank]
    inner = as_number(prover.expression(x))
    prover._assumed[node] |= prover._assumed[x]
    prepend = argument(node, 3, "prepend")
    if prepend is None:
        return sympy.expand(inner.subs(i, i + 1) - inner)
    if value(prepend).shape[dim] != 1:
        raise Opaque(node, f"{node.name} prepends more than one element")
    first = sympy.expand(inner.subs(i, 0) - prover.numbers(prepend, node))
    later = sympy.expand(inner - inner.subs(i, i - 1))
    return later if first == later else sympy.Piecewise((first, sympy.Eq(i, 0)), (later, True))


@_rule("cumsum")
def _cumsum(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    i = DIMS[argument(node, 1, "dim") % value(node).dim()]
    inner = prover.numbers(node.args[0], node)
    if inner.has(i):
        raise Opaque(node, f"{node.name} sums what changes along its dim")
    total = inner * (i + 1)
    _exact_indices(node, total)
    return total


@_rule("where")
def _where(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    condition, a, b = node.args
    return _choose(prover, node, as_predicate(prover.at(condition, node), node), prover.at(a, node), prover.at(b, node))


@_rule("masked_fill")
def _masked_fill(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    x, mask, filled = node.args
    return _choose(prover, node, as_predicate(prover.at(mask, node), node), prover.at(filled, node), prover.at(x, node))


def _choose(prover: MaskProver, node: fx.Node, condition: Boolean, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    if value(node).dtype == torch.bool:
        a, b = as_predicate(a, node), as_predicate(b, node)
        return sympy.Or(sympy.And(condition, a), sympy.And(sympy.Not(condition), b))
    return sympy.piecewise_fold(sympy.Piecewise((as_number(a), condition), (as_number(b), True)))


@_rule("tril", "triu")
def _triangle(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    rank = value(node).dim()
    q, k, diagonal = DIMS[rank - 2], DIMS[rank - 1], prover.at(argument(node, 1, "diagonal", 0), node)
    kept = sympy.Le(k - q, diagonal) if op_name(node) == "tril" else sympy.Ge(k - q, diagonal)
    inner = prover.at(node.args[0], node)
    if value(node).dtype == torch.bool:
        return sympy.And(kept, as_predicate(inner, node))
    return sympy.Piecewise((as_number(inner), kept), (0, True))
