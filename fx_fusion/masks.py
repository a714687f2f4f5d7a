"""Attention masks as functions of indices: an abstract interpreter over the nodes that build a mask.

``arange`` is an index symbol, arithmetic is sympy, a comparison a relational, ``&`` an And; indexing, unsqueeze and
expand rename axes; ``diff`` and ``cumsum`` of an affine sequence have closed forms. So a mask becomes a predicate on
(b, h, q, k), and ``classify`` says which: ``causal`` (exactly k <= q), ``none`` (hides nothing), or why neither could be
proved. Nothing is evaluated and nothing is guessed: a node outside of the vocabulary makes the mask opaque, with that
node as the reason. Symbolic lengths are no different, since values are never looked at.

A 2-D input of zeros and ones (a padding mask) is not known at compile time. It may be *assumed* to be all ones; the proof
then names it, and the caller has to check it at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from fx_fusion.canonicalize import View, is_tensor, value

_DIMS = [sympy.Symbol(f"i{n}", integer=True, nonnegative=True) for n in range(8)]


class Opaque(Exception):
    """A node that the interpreter does not understand."""

    def __init__(self, node: fx.Node, reason: str):
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class MaskProof:
    """``kind`` is ``causal``, ``none`` or ``unknown``; ``reason`` says what decided at ``node``."""

    kind: str
    reason: str = ""
    node: fx.Node | None = None
    assumes: tuple[fx.Node, ...] = ()
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False)  # everything that builds the mask


class MaskProver:
    """Proves masks of one graph. Each node is interpreted once."""

    def __init__(self, view: View, *, may_assume: bool):
        self.view, self.may_assume = view, may_assume
        self._known: dict[fx.Node, sympy.Basic] = {}
        self._assumed: dict[fx.Node, set[fx.Node]] = {}
        self._proofs: dict[fx.Node, MaskProof] = {}
        self._open: list[set[fx.Node]] = []

    def prove(self, mask: fx.Node) -> MaskProof:
        """What the mask of an attention call hides."""
        if mask not in self._proofs:
            try:
                self._proofs[mask] = self._prove(mask)
            except Opaque as opaque:
                self._proofs[mask] = MaskProof("unknown", opaque.reason, opaque.node)
        return self._proofs[mask]

    def _prove(self, mask: fx.Node) -> MaskProof:
        expression = self.expression(mask)
        shape = value(mask).shape
        predicate = _visible(expression, value(mask).dtype, mask)
        rank = len(shape)
        q, k = (_DIMS[rank - 2], _DIMS[rank - 1]) if rank >= 2 else (None, _DIMS[0])
        # A dim of size 1 is broadcast: its index is 0 for every q.
        sizes = {dim: _size(s) for dim, s in zip(_DIMS, shape, strict=False)}
        left = _undecided(predicate, sizes, mask)
        assumes = tuple(sorted(self._assumed.get(mask, ()), key=lambda n: self.view.order[n]))
        nodes = self._below(mask)
        if left is sympy.true:
            return MaskProof("none", "hides nothing", mask, assumes, nodes)
        if q is not None and _is_causal(left, q, k):
            return MaskProof("causal", "k <= q", mask, assumes, nodes)
        return MaskProof("unknown", f"visible where {_readable(left, rank)}", mask, assumes, nodes)

    def _below(self, mask: fx.Node) -> tuple[fx.Node, ...]:
        seen: dict[fx.Node, None] = {}
        stack = [mask]
        while stack:
            node = stack.pop()
            if node not in seen and node.op in ("call_function", "call_method"):
                seen[node] = None
                stack.extend(n for n in node.all_input_nodes if n in self._known)
        return tuple(seen)

    # -- expressions ---------------------------------------------------------------------------------------------
    def expression(self, node: fx.Node) -> sympy.Basic:
        """The value of a tensor node at index (i0, i1, ...)."""
        if node not in self._known:
            self._assumed[node] = set()
            self._known[node] = self._interpret(node)
            if not is_predicate(self._known[node]) and self._known[node].has(sympy.nan):
                raise Opaque(node, f"{node.name} is not a number")
        return self._known[node]

    def _interpret(self, node: fx.Node) -> sympy.Basic:
        if any(self.view.effects.mutated(w) and self._writes(w, node) for w in self.view.effects.writes):
            raise Opaque(node, f"{node.name} is written to in place")
        if node.op == "placeholder":
            return self._input(node)
        rule = _RULES.get(_name(node))
        if rule is None:
            raise Opaque(node, f"{node.name} ({_name(node) or node.op}) is not a function of indices")
        unread = set(node.kwargs) - _KEYWORDS.get(_name(node), set()) - {"device", "layout", "pin_memory", "requires_grad"}
        if unread:
            raise Opaque(node, f"{node.name} is given {', '.join(sorted(unread))} by keyword")
        try:
            return rule(self, node)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:  # an unusual call: not proved
            raise Opaque(node, f"{node.name} is called in an unusual way ({error})") from error

    def _writes(self, write: fx.Node, node: fx.Node) -> bool:
        return any(alias in self.view.effects.mutated(write) for alias in self.view.effects.aliases(node))

    def _input(self, node: fx.Node) -> sympy.Basic:
        example = value(node)
        is_mask = example.dim() == 2 and not example.dtype.is_complex
        is_index = any(self.view.name(u) is None and _name(u) in ("embedding", "cross_entropy", "pad") for u in node.users)
        if not (self.may_assume and is_mask and not is_index) or example.requires_grad:
            raise Opaque(node, f"depends on the input {_readable_input(node)}")
        self._assumed[node] = {node}
        return sympy.true if example.dtype == torch.bool else sympy.Integer(1)

    def at(self, operand: Any, node: fx.Node, dims: list[sympy.Expr] | None = None) -> sympy.Basic:
        """An operand of ``node`` broadcast to its shape, as an expression over its indices (or over ``dims``)."""
        if isinstance(operand, bool):
            return sympy.true if operand else sympy.false
        if isinstance(operand, (int, float)):
            return sympy.sympify(operand)
        example = value(operand)
        if isinstance(example, (int, float, torch.SymInt, torch.SymFloat)):
            return _size(example)
        if not isinstance(operand, fx.Node) or not is_tensor(operand):
            raise Opaque(node, f"{node.name} has the operand {operand}")
        inner = self.expression(operand)
        self._assumed[node] |= self._assumed[operand]
        dims = list(_DIMS[: value(node).dim()]) if dims is None else dims
        offset = len(dims) - example.dim()
        changes = {_DIMS[i]: sympy.Integer(0) if example.shape[i] == 1 else dims[i + offset] for i in range(example.dim())}
        return inner.subs(changes, simultaneous=True)

    def numbers(self, operand: Any, node: fx.Node) -> sympy.Basic:
        return _as_number(self.at(operand, node))


def is_predicate(expression: sympy.Basic) -> bool:
    """Whether an expression is a condition. (A sympy Symbol counts as a Boolean, an index is none.)"""
    return isinstance(expression, Boolean) and not isinstance(expression, sympy.Symbol)


def _size(size: Any) -> sympy.Expr:
    if isinstance(size, (torch.SymInt, torch.SymFloat)):
        expression = size.node.expr
        return expression.subs({s: sympy.Symbol(s.name, integer=True, positive=True) for s in expression.free_symbols})
    return sympy.sympify(size)


def _as_number(expression: sympy.Basic) -> sympy.Basic:
    if not is_predicate(expression):
        return expression
    if expression in (sympy.true, sympy.false):
        return sympy.Integer(expression is sympy.true)
    return sympy.Piecewise((1, expression), (0, True))


def _as_predicate(expression: sympy.Basic, node: fx.Node) -> Boolean:
    if is_predicate(expression):
        return expression
    if isinstance(expression, sympy.Piecewise):
        parts = [(e, c) for e, c in expression.args if e.is_number]
        if len(parts) == len(expression.args):
            return _select(parts, lambda e: not e.is_zero)
    return sympy.true if expression.is_nonzero else sympy.false if expression.is_zero else sympy.Ne(expression, 0)


def _select(parts: list[tuple[Any, Any]], wanted: Callable[[Any], bool]) -> Boolean:
    """The condition under which a Piecewise takes a value that is ``wanted``."""
    result, earlier = sympy.false, sympy.false
    for expression, condition in parts:
        if wanted(expression):
            result = sympy.Or(result, sympy.And(condition, sympy.Not(earlier)))
        earlier = sympy.Or(earlier, condition)
    return result


# -- vocabulary ----------------------------------------------------------------------------------------------------
Rule = Callable[[MaskProver, fx.Node], sympy.Basic]
# Keywords that a rule reads or that change no value; any other makes the node opaque.
_KEYWORDS: dict[str, set[str]] = {
    "arange": {"start", "end", "step", "dtype"}, "diff": {"prepend", "dim", "n", "append"}, "cumsum": {"dim", "dtype"},
    "ones": {"dtype"}, "new_ones": {"dtype"}, "ones_like": {"dtype"}, "zeros": {"dtype"}, "new_zeros": {"dtype"},
    "zeros_like": {"dtype"}, "full": {"dtype", "fill_value"}, "new_full": {"dtype", "fill_value"},
    "full_like": {"dtype", "fill_value"}, "to": {"dtype", "copy", "non_blocking"}, "tril": {"diagonal"},
    "triu": {"diagonal"}, "unsqueeze": {"dim"}, "clone": {"memory_format"}, "contiguous": {"memory_format"},
}  # fmt: skip
_NARROW = (torch.int8, torch.uint8, torch.int16)
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return add


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target).strip("_")
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", "")).strip("_")
    return ""


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


@_rule("arange")
def _arange(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    given = list(node.args)
    if len(given) == 1 and "end" not in node.kwargs:
        given.insert(0, 0)
    start = given[0] if given else node.kwargs.get("start", 0)
    step = given[2] if len(given) > 2 else node.kwargs.get("step", 1)
    expression = prover.at(start, node) + prover.at(step, node) * _DIMS[0]
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
    position = 2 if _name(node) == "new_full" else 1
    filled = prover.at(_argument(node, position, "fill_value"), node)
    return _as_predicate(filled, node) if value(node).dtype == torch.bool else _as_number(filled)


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
        _RULES[_n] = _binary(_function)


def _compare(relation: Any, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    """A comparison; a Piecewise of numbers against a number becomes the condition of its matching pieces."""
    for left, right, flip in ((a, b, False), (b, a, True)):
        if isinstance(left, sympy.Piecewise) and right.is_number and all(e.is_number for e, _ in left.args):
            hits = [e for e, _ in left.args if bool(relation(right, e) if flip else relation(e, right))]
            return _select([(e, c) for e, c in left.args], hits.__contains__)
    return relation(a, b)


def _logic(function: Any, operands: int) -> Rule:
    def rule(prover: MaskProver, node: fx.Node) -> sympy.Basic:
        of_bools = all(isinstance(a, bool) or (is_tensor(a) and value(a).dtype == torch.bool) for a in node.args)
        if len(node.args) != operands or not of_bools:
            raise Opaque(node, f"{node.name} is not logic of booleans")
        return function(*(_as_predicate(prover.at(operand, node), node) for operand in node.args))

    return rule


for _names, _logical, _count in (
    (("and", "logical_and", "bitwise_and"), sympy.And, 2),
    (("or", "logical_or", "bitwise_or"), sympy.Or, 2),
    (("invert", "logical_not", "bitwise_not"), sympy.Not, 1),
):
    for _n in _names:
        _RULES[_n] = _logic(_logical, _count)


@_rule("neg")
def _neg(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    return -prover.numbers(node.args[0], node)


@_rule("to", "bool", "long", "int", "float", "half", "bfloat16", "type_as", "type")
def _cast(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    inner = prover.at(node.args[0], node)
    before, after = value(node.args[0]).dtype, value(node).dtype
    if after == torch.bool:
        return _as_predicate(inner, node)
    if before.is_floating_point and not after.is_floating_point:
        raise Opaque(node, f"{node.name} truncates")
    _exact_indices(node, inner)
    return _as_number(inner)


def _exact_indices(node: fx.Node, expression: sympy.Basic) -> None:
    """An index (or anything made of one) is a number of the node's dtype: a bfloat16 has none above 256."""
    numbers = expression.args if isinstance(expression, sympy.Piecewise) else [(_as_number(expression), True)]
    cannot_count = value(node).dtype in (torch.bfloat16, torch.float16, *_NARROW) and not is_predicate(expression)
    if cannot_count and not all(e.is_number for e, _ in numbers):
        raise Opaque(node, f"{node.name} holds indices in {value(node).dtype}, which can't count far")


@_rule("contiguous", "clone", "detach", "expand", "expand_as", "broadcast_to", "alias")
def _same(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    return prover.at(node.args[0], node)


@_rule("unsqueeze")
def _unsqueeze(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    rank = value(node).dim()
    dim = _argument(node, 1, "dim") % rank
    dims = [d for i, d in enumerate(_DIMS[:rank]) if i != dim]
    return prover.at(node.args[0], node, dims)


@_rule("squeeze", "view", "reshape")
def _reshape(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    """Adding and removing dims of size 1 only."""
    below = node.args[0]
    before = [i for i, s in enumerate(value(below).shape) if not (isinstance(s, int) and s == 1)]
    after = [i for i, s in enumerate(value(node).shape) if not (isinstance(s, int) and s == 1)]
    same = len(before) == len(after) and all(
        _size(value(below).shape[i]) == _size(value(node).shape[j]) for i, j in zip(before, after, strict=True)
    )
    if not same:
        raise Opaque(node, f"{node.name} merges or splits dims")
    dims: list[Any] = [sympy.Integer(0)] * value(below).dim()
    for i, j in zip(before, after, strict=True):
        dims[i] = _DIMS[j]
    return prover.at(below, node, dims)


@_rule("transpose", "t", "permute")
def _transpose(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    rank = value(node).dim()
    order = list(range(rank))
    if _name(node) == "permute":
        order = [d % rank for d in (node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:])]
    else:
        a, b = (node.args[1] % rank, node.args[2] % rank) if _name(node) == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    dims: list[Any] = [None] * rank
    for i, source in enumerate(order):
        dims[source] = _DIMS[i]
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
            lowest = _upper_bound(-start, {})
            if lowest is None or not lowest.is_nonpositive:
                raise Opaque(node, f"{node.name} may slice from the end")
            dims.append(_DIMS[out] + start)
            out += 1
        elif isinstance(item, int) and item >= 0:
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
    kept = list(_DIMS[value(node).dim() - len(rest) : value(node).dim()])
    lead = list(_DIMS[: value(node).dim() - len(rest)])
    if any(value(i).dtype == torch.bool for i in indices):
        raise Opaque(node, f"{node.name} is indexed by a boolean tensor")
    chosen = [prover.at(i, node, lead) for i in indices]
    sizes = {dim: _size(size) for dim, size in zip(_DIMS, value(node).shape, strict=False)}
    for i in chosen:
        lowest = _upper_bound(-i, sizes)
        if lowest is None or not lowest.is_nonpositive:
            raise Opaque(node, f"{node.name} may index from the end")
    return prover.at(below, node, [*chosen, *kept])


@_rule("diff")
def _diff(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    x, dim = node.args[0], _argument(node, 2, "dim", -1)
    if _argument(node, 1, "n", 1) != 1 or node.kwargs.get("append") is not None:
        raise Opaque(node, f"{node.name} is not a first difference")
    rank = value(x).dim()
    i = _DIMS[dim % rank]
    inner = _as_number(prover.expression(x))
    prover._assumed[node] |= prover._assumed[x]
    prepend = node.kwargs.get("prepend")
    if prepend is None:
        return sympy.expand(inner.subs(i, i + 1) - inner)
    if value(prepend).shape[dim] != 1:
        raise Opaque(node, f"{node.name} prepends more than one element")
    first = sympy.expand(inner.subs(i, 0) - prover.numbers(prepend, node))
    later = sympy.expand(inner - inner.subs(i, i - 1))
    return later if first == later else sympy.Piecewise((first, sympy.Eq(i, 0)), (later, True))


@_rule("cumsum")
def _cumsum(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    i = _DIMS[_argument(node, 1, "dim") % value(node).dim()]
    inner = prover.numbers(node.args[0], node)
    if inner.has(i):
        raise Opaque(node, f"{node.name} sums what changes along its dim")
    return inner * (i + 1)


@_rule("where")
def _where(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    condition, a, b = node.args
    return _choose(prover, node, _as_predicate(prover.at(condition, node), node), prover.at(a, node), prover.at(b, node))


@_rule("masked_fill")
def _masked_fill(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    x, mask, filled = node.args
    return _choose(prover, node, _as_predicate(prover.at(mask, node), node), prover.at(filled, node), prover.at(x, node))


def _choose(prover: MaskProver, node: fx.Node, condition: Boolean, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    if value(node).dtype == torch.bool:
        a, b = _as_predicate(a, node), _as_predicate(b, node)
        return sympy.Or(sympy.And(condition, a), sympy.And(sympy.Not(condition), b))
    return sympy.piecewise_fold(sympy.Piecewise((_as_number(a), condition), (_as_number(b), True)))


@_rule("tril", "triu")
def _triangle(prover: MaskProver, node: fx.Node) -> sympy.Basic:
    rank = value(node).dim()
    q, k, diagonal = _DIMS[rank - 2], _DIMS[rank - 1], prover.at(_argument(node, 1, "diagonal", 0), node)
    kept = sympy.Le(k - q, diagonal) if _name(node) == "tril" else sympy.Ge(k - q, diagonal)
    inner = prover.at(node.args[0], node)
    if value(node).dtype == torch.bool:
        return sympy.And(kept, _as_predicate(inner, node))
    return sympy.Piecewise((_as_number(inner), kept), (0, True))


# -- what a predicate says -----------------------------------------------------------------------------------------
def _visible(expression: sympy.Basic, dtype: torch.dtype, node: fx.Node) -> Boolean:
    """Boolean mask: where it is true. Additive mask: where it adds 0, if it adds -inf (or the dtype's lowest) elsewhere."""
    if dtype == torch.bool:
        return _as_predicate(expression, node)
    lowest = torch.finfo(dtype).min
    expression = sympy.piecewise_fold(expression)
    parts = list(expression.args) if isinstance(expression, sympy.Piecewise) else [(expression, sympy.true)]
    for added, _ in parts:
        if added is sympy.nan or added.has(sympy.nan):
            raise Opaque(node, f"{node.name} is not a number somewhere")
        hides = added == sympy.S.NegativeInfinity or (added.is_number and bool(added <= lowest))
        if not hides and not added.is_zero:
            raise Opaque(node, f"{node.name} adds {added} to the scores")
    return _select(parts, lambda added: added.is_zero)


def _undecided(predicate: Boolean, sizes: dict[sympy.Symbol, sympy.Expr], node: fx.Node) -> Boolean:
    """What is left of a conjunction once everything that holds at every index is dropped."""
    predicate = sympy.to_nnf(predicate, simplify=False) if not isinstance(predicate, (sympy.And, sympy.Or)) else predicate
    if isinstance(predicate, sympy.And):
        return sympy.And(*(_undecided(p, sizes, node) for p in predicate.args))
    if isinstance(predicate, sympy.Or):
        return sympy.Or(*(_undecided(p, sizes, node) for p in predicate.args))
    if isinstance(predicate, sympy.core.relational.Relational):
        bound = _upper_bound(_at_most_zero(predicate), sizes)
        if bound is not None and bound.is_nonpositive:
            return sympy.true
        lower = _upper_bound(_negated(_at_most_zero(predicate)), sizes)
        if lower is not None and lower.is_nonpositive:
            return sympy.false
    return predicate


def _at_most_zero(relation: Any) -> sympy.Expr | None:
    """The integer expression e with ``relation <=> e <= 0``; None where the two sides need not be integers."""
    difference = sympy.expand(relation.lhs - relation.rhs)
    if not difference.is_integer:
        return None
    if isinstance(relation, sympy.Le):
        return difference
    if isinstance(relation, sympy.Lt):
        return difference + 1
    if isinstance(relation, sympy.Ge):
        return -difference
    if isinstance(relation, sympy.Gt):
        return -difference + 1
    return None


def _negated(expression: sympy.Expr | None) -> sympy.Expr | None:
    """``not (e <= 0)  <=>  1 - e <= 0``."""
    return None if expression is None else 1 - expression


def _upper_bound(expression: sympy.Expr | None, sizes: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr | None:
    """The largest value of an affine expression over 0 <= i < size, with every symbolic size at least 1."""
    if expression is None:
        return None
    expression = sympy.expand(expression)
    for dim, size in sizes.items():
        if not expression.has(dim):
            continue
        slope = expression.coeff(dim, 1)
        if not slope.is_number or expression.has(dim**2) or sympy.expand(expression - slope * dim).has(dim):
            return None
        expression = sympy.expand(expression.subs(dim, size - 1 if slope > 0 else 0))
    # size = 1 + t with t >= 0, so that sympy can see the sign.
    at_least_one = {s: 1 + sympy.Symbol(f"t_{s.name}", integer=True, nonnegative=True) for s in expression.free_symbols}
    return sympy.expand(expression.subs(at_least_one))


def _is_causal(predicate: Boolean, q: sympy.Symbol, k: sympy.Symbol) -> bool:
    if not isinstance(predicate, sympy.core.relational.Relational):
        return False
    expression = _at_most_zero(predicate)
    return expression is not None and sympy.expand(expression - (k - q)) == 0


def _readable(predicate: Boolean, rank: int) -> str:
    names = ["b", "h", "q", "k"][-rank:] if rank <= 4 else [f"i{n}" for n in range(rank)]
    return str(predicate.subs(dict(zip(_DIMS, map(sympy.Symbol, names), strict=False))))


def _readable_input(node: fx.Node) -> str:
    return str(node.target).strip("_").removeprefix("L_").removeprefix("kwargs_")
