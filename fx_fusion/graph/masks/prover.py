"""Attention masks as functions of indices: an abstract interpreter over the nodes that build a mask.

``arange`` is an index symbol, arithmetic is sympy, a comparison a relational, ``&`` an And; indexing, unsqueeze and
expand rename axes; ``diff`` and ``cumsum`` of an affine sequence have closed forms. So a mask becomes a predicate on
(b, h, q, k), and ``classify`` says which: ``causal`` (exactly k <= q), ``none`` (hides nothing), or why neither could be
proved. Nothing is evaluated and nothing is guessed: a node outside of the vocabulary makes the mask opaque, with that
node as the reason. Symbolic lengths are no different, since values are never looked at.

A 2-D input of zeros and ones (a padding mask) is not known at compile time. It may be *assumed* to be all ones; the proof
then names it, and the caller has to check it at run time. Otherwise it is data: a function of (b, k) whose node is read when
the model runs.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.masks.assumed import ONES, Assumed, in_order, kind_for, shown
from fx_fusion.graph.masks.expressions import DIMS, Opaque, as_number, is_predicate, size_of, symbols_of, sympified
from fx_fusion.graph.masks.held import HIDDEN, held
from fx_fusion.graph.masks.predicates import hides_by_one_number, is_causal, undecided, visible
from fx_fusion.graph.masks.shape_rules import RULES
from fx_fusion.graph.masks.structure import ADDED, Structure, counted_runs, structure_of, within_runs
from fx_fusion.graph.places import named
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import Outside, View

_LARGEST = 500  # parts of an expression; what is made of it would take sympy seconds


@dataclass(frozen=True)
class MaskProof:
    """The kind of a mask, the ``reason`` for it, and the ``node`` that decided.

    ``kind``: ``causal``, ``none`` (hides nothing), ``structured`` (a window, documents, chunks: ``structure``), ``learned``
    (a bias with a gradient), ``input`` (it depends on what the caller gives: padding), or ``unknown``.

    ``or_hides_rows``: the structure of an unknown mask that may hide a row entirely by adding a number to it, for those to
    whom that makes no difference, or who can tell what becomes of such a row (``Structure.hidden_rows``).
    """

    kind: str
    reason: str = ""
    node: fx.Node | None = None
    assumes: tuple[Assumed, ...] = ()
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False)  # everything that builds the mask
    structure: Structure | None = None
    or_hides_rows: Structure | None = None

    def structure_in(self, dtype: torch.dtype) -> Structure | None:
        """Its structure in a call that computes in ``dtype``, also where it may hide a row entirely, but makes one number of
        all its scores then. (Autocast makes -inf of the lowest float32.)"""
        structure = self.or_hides_rows
        known = structure is not None and structure.hidden_rows and self.node is not None
        return structure if known and example(self.node).dtype == dtype else self.structure


class MaskProver:
    """Proves masks of one graph. Each node is interpreted once.

    Args:
        view: of the graph.
        may_assume: whether a padding mask may be taken for all ones.
        masks: what may be assumed of masks that come in (``assumed.KINDS``, a guess, or nothing).
        outer: the prover of the graph around this one, for a checkpointed body.
    """

    def __init__(
        self, view: View, *, may_assume: bool, masks: str | None = None, outer: MaskProver | None = None
    ):  # fmt: skip
        self.view, self.may_assume, self.masks, self.outer = view, may_assume, masks, outer
        # How many graphs are around this one: two functions of one name would be the same to sympy.
        self._depth: int = 0 if outer is None else outer._depth + 1
        self._known: dict[fx.Node, sympy.Basic] = {}
        self._assumed: dict[fx.Node, set[Assumed]] = {}
        self._proofs: dict[tuple[fx.Node, bool], MaskProof] = {}
        self._labels: dict[Any, fx.Node] = {}  # functions of indices that stand for data
        self._why: dict[Any, Opaque] = {}  # and why no more is known of it
        self._runs: dict[Any, Any] = {}  # a label that numbers the runs in which positions rise by one: those positions

    def prove(self, mask: fx.Node, *, hides: bool = False) -> MaskProof:
        """Return what is proved of the mask of an attention call. ``hides``: a boolean mask is true where it hides."""
        key = mask, hides
        if key not in self._proofs:
            try:
                self._proofs[key] = self._prove(mask, hides)
            except RecursionError:
                self._proofs[key] = MaskProof("unknown", f"{mask.name} is made in too many steps to be proved", mask)
            except Opaque as opaque:
                is_input = opaque.node is not None and opaque.node.op == "placeholder"
                given = is_input and not example(opaque.node).requires_grad
                kind = "learned" if example(mask).requires_grad else "input" if given else "unknown"
                self._proofs[key] = MaskProof(kind, opaque.reason, opaque.node)
        return self._proofs[key]

    def _prove(self, mask: fx.Node, hides: bool) -> MaskProof:
        expression = self.expression(mask)
        shape = example(mask).shape
        predicate = visible(expression, example(mask).dtype, mask)
        predicate = sympy.Not(predicate) if hides else predicate
        rank = len(shape)
        q, k = (DIMS[rank - 2], DIMS[rank - 1]) if rank >= 2 else (None, DIMS[0])
        # A dim of size 1 is broadcast: its index is 0 for every q.
        sizes = {dim: size_of(s) for dim, s in zip(DIMS, shape, strict=False)}
        predicate = predicate.subs({dim: 0 for dim, size in sizes.items() if size == 1})
        left = undecided(predicate, sizes, mask)
        assumes = in_order(self._assumed.get(mask, ()))
        nodes = self._below(mask)
        if left is sympy.true:
            return MaskProof("none", "hides nothing", mask, assumes, nodes)
        if q is not None and is_causal(left, q, k):
            return MaskProof("causal", "k <= q", mask, assumes, nodes)
        if q is not None:
            batch = sympy.Integer(0) if rank < 4 or sizes[DIMS[0]] == 1 else DIMS[0]
            structure = structure_of(within_runs(left, self._runs), batch, q, k, self._labels)
            sees_itself = structure is not None and structure.shows_every_query_itself and has_a_key_for_each_query(mask)
            if structure is not None and not sees_itself and example(mask).is_floating_point():
                # Where a number hides a whole row, its formula shows all of it (or NaN, for -inf); a boolean leaves zeros.
                reason = f"{structure}: {mask.name} may hide a row entirely by adding a number to it"
                if hides_by_one_number(expression, example(mask).dtype) and not structure.labels:
                    structure = replace(structure, hidden_rows=ADDED)
                return MaskProof("unknown", reason, mask, assumes, nodes, or_hides_rows=structure)
            if structure is not None:
                return MaskProof("structured", str(structure), mask, assumes, nodes, structure)
        for applied in left.atoms(sympy.core.function.AppliedUndef):
            raise self._why[applied.func]
        for given in (a.node for a in assumes if a.kind != ONES):  # taken for something else in vain
            raise Opaque(given, f"depends on the input {named(given)}")
        return MaskProof("unknown", f"visible where {_readable(left, rank)}", mask, assumes, nodes)

    def _below(self, mask: fx.Node) -> tuple[fx.Node, ...]:
        seen: dict[fx.Node, None] = {}
        stack = [mask]
        while stack:
            node = stack.pop()
            if node not in seen and self.name(node) in RULES:  # what a label comes from may draw random numbers
                seen[node] = None
                stack.extend(n for n in node.all_input_nodes if n in self._known)
        return tuple(seen)

    # -- expressions ---------------------------------------------------------------------------------------------
    def expression(self, node: fx.Node) -> sympy.Basic:
        """The value of a tensor node at index (i0, i1, ...)."""
        if node not in self._known:
            self._assumed[node] = set()
            read = self._read(node)
            if not is_predicate(read) and read.has(sympy.nan):
                raise Opaque(node, f"{node.name} is not a number")
            if next(itertools.islice(sympy.preorder_traversal(read), _LARGEST, None), None) is not None:
                raise Opaque(node, f"{node.name} is made of too many parts to be proved")
            self._known[node] = read
        return self._known[node]

    def _read(self, node: fx.Node) -> sympy.Basic:
        """Return the value of ``node``. Integers and booleans that nothing is known of are a function of their indices."""
        if any(self.view.effects.mutated(w) and self._writes(w, node) for w in self.view.effects.writes):
            raise Opaque(node, f"{node.name} is written to in place")
        try:
            return self._interpret(node)
        except Opaque as opaque:
            tensor = example(node)
            if tensor.dtype not in (torch.int32, torch.int64, torch.bool) or tensor.dim() not in (1, 2):
                raise
            why = opaque
        function = sympy.Function(node.name + "'" * self._depth, integer=True)
        self._labels[function], self._why[function] = node, why
        dims = DIMS[: tensor.dim()]
        sums = self.view.arguments_of(node, "cumsum")
        if sums is not None and sums["input"] in self._known and sums["dim"] in (-1, tensor.dim() - 1):
            rows = [sympy.Integer(0)] if statically_known_true(tensor.shape[0] == 1) else dims[:1]  # a row alone is row 0
            over = dims if tensor.dim() == 1 else [*rows, dims[1]]
            self._runs[function] = counted_runs(self._known[sums["input"]], over)
        return sympy.Ne(function(*dims), 0) if tensor.dtype == torch.bool else function(*dims)

    def _interpret(self, node: fx.Node) -> sympy.Basic:
        if node.op == "placeholder":
            return self._input(node)
        rule, bound = RULES.get(self.name(node)), self.view.arguments(node)
        if rule is None:
            raise Opaque(node, f"{node.name} ({called(node)}) is not a function of indices")
        if bound is None:
            raise Opaque(node, f"{node.name} is called in an unusual way")
        if unread := set(bound.get("keywords", ())) - _KEYWORDS:
            raise Opaque(node, f"{node.name} is given {', '.join(sorted(unread))} by keyword")
        try:
            return held(self, rule(self, node, bound), example(node).dtype, node)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:  # an unusual call: not proved
            raise Opaque(node, f"{node.name} is called in an unusual way ({error})") from error

    def name(self, node: fx.Node) -> str:
        """The canonical name of the op that ``node`` calls, empty for anything else."""
        return self.view.name(node) or ""

    def _writes(self, write: fx.Node, node: fx.Node) -> bool:
        return any(alias in self.view.effects.mutated(write) for alias in self.view.effects.aliases(node))

    def _input(self, node: fx.Node) -> sympy.Basic:
        if self.view.outside is not None:
            return self._from_outside(node, self.view.outside)
        tensor = example(node)
        if (kind := kind_for(node, self.masks)) is not None:
            return self._mask_of(node, kind)
        is_mask = tensor.dim() == 2 and not tensor.dtype.is_complex
        is_index = any(self.name(u) in ("embedding", "cross_entropy", "pad", "diff") for u in node.users)
        if not (self.may_assume and is_mask and not is_index) or tensor.requires_grad:
            raise Opaque(node, f"depends on the input {named(node)}")
        self._assumed[node] = {Assumed(node, ONES)}
        return sympy.true if tensor.dtype == torch.bool else sympy.Integer(1)

    def _mask_of(self, node: fx.Node, kind: str) -> sympy.Basic:
        """A mask of an attention call that comes in, assumed to be of this kind."""
        self._assumed[node] = {Assumed(node, kind)}
        function = sympy.Function(f"{node.name}_keys", integer=True)
        self._labels[function], self._why[function] = node, Opaque(node, f"depends on the input {named(node)}")
        predicate = shown(kind, sympy.Ne(function(DIMS[0], DIMS[3]), 0))
        if example(node).dtype == torch.bool:
            return predicate
        return sympy.Integer(0) if kind == "none" else sympy.Piecewise((0, predicate), (HIDDEN[example(node).dtype], True))

    def _from_outside(self, node: fx.Node, outside: Outside) -> sympy.Basic:
        """An input of a checkpointed body is what the graph around it hands in."""
        operand = outside.operands[node]
        if not isinstance(operand, fx.Node) or not is_tensor(operand):
            raise Opaque(node, f"depends on the input {named(node)}")
        prover = self.outer
        assert prover is not None, "the prover of a body is made with that of the graph around it"
        expression = prover.expression(operand)
        self._labels.update(prover._labels)
        self._why.update(prover._why)
        self._runs.update(prover._runs)
        self._assumed[node] = set(prover._assumed[operand])
        return expression

    def at(self, operand: Any, node: fx.Node, dims: list[sympy.Expr] | None = None) -> sympy.Basic:
        """An operand of ``node`` broadcast to its shape, as an expression over its indices (or over ``dims``)."""
        if isinstance(operand, bool):
            return sympy.true if operand else sympy.false
        if isinstance(operand, (int, float)):
            return sympified(operand)
        tensor = example(operand)
        if isinstance(tensor, (int, float, torch.SymInt, torch.SymFloat)):
            return size_of(tensor)
        if not isinstance(operand, fx.Node) or not is_tensor(operand):
            raise Opaque(node, f"{node.name} has the operand {operand}")
        inner = self.anywhere(operand, node)
        dims = list(DIMS[: example(node).dim()]) if dims is None else dims
        offset = len(dims) - tensor.dim()
        is_one = [statically_known_true(n == 1) for n in tensor.shape]
        changes = {DIMS[i]: sympy.Integer(0) if is_one[i] else dims[i + offset] for i in range(tensor.dim())}
        return inner.subs(changes, simultaneous=True)

    def anywhere(self, operand: fx.Node, node: fx.Node) -> sympy.Basic:
        """An operand of ``node`` over its own indices; what it assumes, ``node`` assumes."""
        inner = self.expression(operand)
        self._assumed[node] |= self._assumed[operand]
        return inner

    def is_size(self, symbol: sympy.Symbol, node: fx.Node) -> bool:
        """Return True if a symbol stands for the size of a dim of a tensor, not for an int of the caller."""
        return symbol.name in self._sizes or symbol.name in symbols_of(example(node).shape)

    @functools.cached_property
    def _sizes(self) -> frozenset[str]:
        inputs = (example(node) for node in self.view.graph.find_nodes(op="placeholder"))
        return frozenset().union(*(symbols_of(value.shape) for value in inputs if isinstance(value, torch.Tensor)))

    def numbers(self, operand: Any, node: fx.Node) -> sympy.Basic:
        """``at`` with booleans as 0 and 1."""
        return as_number(self.at(operand, node))


# Keywords of factories, casts and views that decide no value, or that a rule reads.
_KEYWORDS = {
    "dtype", "device", "layout", "pin_memory", "requires_grad", "copy", "non_blocking", "memory_format", "start", "end",
    "step", "size", "shape", "dims",
}  # fmt: skip


def has_a_key_for_each_query(mask: fx.Node) -> bool:
    """Return True if a mask (.., queries, keys) has at least as many keys as queries."""
    return statically_known_true(example(mask).shape[-2] <= example(mask).shape[-1])


def called(node: fx.Node) -> str:
    """Return the name of what a node calls, as the user wrote it."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).strip("_") if node.op in ("call_function", "call_method") and name else node.op


def _readable(predicate: Boolean, rank: int) -> str:
    names = ["b", "h", "q", "k"][-rank:] if rank <= 4 else [f"i{n}" for n in range(rank)]
    return str(predicate.subs(dict(zip(DIMS, map(sympy.Symbol, names), strict=False))))
