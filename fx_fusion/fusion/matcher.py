"""Find where a graph contains a pattern.

A match walks the pattern and the graph together, root first, both through the canonical view. A parameter of the
pattern binds a node by name, the same name is the same node, a literal must be equal; the operands of ``add`` and
``mul`` are tried in both orders, so bindings are *generated* and the caller takes the first that is legal. Casts are
transparent here and recorded; ``legality`` compares them with the pattern's dtype policy.

What comes close and fails leaves a near miss: how far it got and the first thing that differed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fx_fusion.fusion.pattern import Pattern
from fx_fusion.graph.dtypes import roundings
from fx_fusion.graph.view import Edge, Term, View, is_scalar, is_tensor, symmetric, value
from fx_fusion.ops.layouts import to_channels_last

if TYPE_CHECKING:
    from fx_fusion.rewrite.editor import Editor


@dataclass(frozen=True)
class Match:
    """One place where a fusion fits.

    Attributes:
        fusion: its name.
        outputs: the nodes whose values the fused op makes, the root first.
        nodes: everything that the op stands for, outputs included: dead once the outputs are replaced.
        crossed: nodes between an input and its first use that change no value (they may have other users).
        inputs: bound nodes and numbers by parameter.
        statics: the static parameters of the variant that matched.
        pattern: the traced pattern; None for matches made by a finder.
        pairs, edges: pattern node with graph term, and the roundings met on the way to each operand.
        views_read: whether ``Fusion.read`` compared the shapes of the views.
        rounded: of a finder's match, the casts that the kernel makes too.
        deferred: matched nodes that the graph returns and that are computed only when read.
        emit: makes the replacement, given an editor; None for "call the kernel".
        note: what the report says of the site, whatever becomes of it.
        channels_last: inputs that go to the kernel channels last, since Inductor lays out this graph so.
    """

    fusion: str
    outputs: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]
    inputs: Mapping[str, Any]
    statics: Mapping[str, Any] = field(default_factory=dict)
    crossed: frozenset[fx.Node] = frozenset()
    pattern: Pattern | None = None
    pairs: Mapping[fx.Node, Term] = field(default_factory=dict)
    edges: Mapping[tuple[fx.Node, int], tuple[torch.dtype, ...]] = field(default_factory=dict)
    views_read: bool = False
    rounded: frozenset[fx.Node] = frozenset()
    deferred: tuple[fx.Node, ...] = ()
    emit: Callable[[Editor, Match], None] | None = None
    note: str = ""
    channels_last: frozenset[str] = frozenset()

    @property
    def root(self) -> fx.Node:
        return self.outputs[0]

    def example(self, parameter: str) -> Any:
        """The example value of an input, laid out as the kernel will get it."""
        known = value(self.inputs[parameter])
        if parameter not in self.channels_last:
            return known
        with known.fake_mode:
            return to_channels_last(known).requires_grad_(known.requires_grad)


@dataclass
class NearMiss:
    """The best failed attempt at one root: ``matched`` of ``total`` ops, then ``reason`` at ``node``."""

    fusion: str
    root: fx.Node
    node: fx.Node
    matched: int
    total: int
    reason: str


@dataclass(frozen=True)
class _State:
    """What an attempt has bound so far. Copied, never changed: backtracking is forgetting a copy."""

    inputs: Mapping[str, Any]
    pairs: Mapping[fx.Node, Term]
    edges: Mapping[tuple[fx.Node, int], tuple[torch.dtype, ...]]
    inner: tuple[fx.Node, ...]
    crossed: tuple[fx.Node, ...]


class Attempt:
    """Match one pattern at one root; ``matches()`` generates, ``near`` is the furthest failure afterwards."""

    def __init__(self, view: View, pattern: Pattern, root: fx.Node):
        self.view, self.pattern, self.root = view, pattern, root
        self.near = NearMiss(pattern.fusion.name, root, root, 0, len(pattern.terms), "")

    def matches(self) -> Iterator[Match]:
        start = _State({}, {}, {}, (), ())
        for state in self._term(self.pattern.root, self.root, start):
            match = self._finish(state)
            if match is not None:
                yield match

    # -- one pattern node against one graph node -----------------------------------------------------------------
    def _term(self, wanted: fx.Node, found: Any, state: _State) -> Iterator[_State]:
        known = state.pairs.get(wanted)
        term = self.view.term(found)
        if known is not None:
            if known.nodes[0] is term.nodes[0]:
                yield state
            else:
                self._fail(state, term.nodes[0], f"{known.nodes[0].name} is used where {term.nodes[0].name} is here")
            return
        pattern = self.pattern.terms[wanted]
        if pattern.op != term.op or len(pattern.operands) != len(term.operands):
            self._fail(state, term.nodes[0], f"expected {_describe(pattern)}, found {_describe(term)}")
            return
        if pattern.attrs != term.attrs:
            self._fail(state, term.nodes[0], f"{pattern.op} is over {_attrs(term)}, the pattern's over {_attrs(pattern)}")
            return
        entered = _State(
            state.inputs, {**state.pairs, wanted: term}, state.edges, (*state.inner, *term.nodes), state.crossed
        )
        orders = [term.operands]
        if symmetric(pattern):
            orders.append(term.operands[::-1])
        for operands in orders:
            yield from self._operands(wanted, pattern.operands, operands, 0, entered)

    def _operands(
        self, wanted: fx.Node, pattern: tuple[Any, ...], found: tuple[Any, ...], i: int, state: _State
    ) -> Iterator[_State]:
        if i == len(pattern):
            yield state
            return
        for after in self._operand(wanted, i, pattern[i], found[i], state):
            yield from self._operands(wanted, pattern, found, i + 1, after)

    def _operand(self, wanted: fx.Node, i: int, pattern: Any, found: Any, state: _State) -> Iterator[_State]:
        base = self.pattern.view.edge(pattern).base
        base = self.pattern.view.constant(base)
        if not isinstance(base, fx.Node):
            yield from self._literal(base, found, state)
        elif base.op == "placeholder":
            yield from self._parameter(str(base.target), found, state)
        else:
            edge = Edge(found) if isinstance(found, Term) else self.view.edge(found)
            if not isinstance(edge.base, (fx.Node, Term)) or not is_tensor(edge.base):
                self._fail(state, self.root, f"expected {_describe(self.pattern.terms[base])}, found {found}")
                return
            crossed = _State(
                state.inputs,
                state.pairs,
                {**state.edges, (wanted, i): edge.roundings},
                (*state.inner, *edge.crossed),
                state.crossed,
            )
            yield from self._term(base, edge.base, crossed)

    def _literal(self, wanted: Any, found: Any, state: _State) -> Iterator[_State]:
        found = self.view.constant(found)
        if isinstance(found, (int, float)) and found == wanted:
            yield state
        else:
            self._fail(state, found if isinstance(found, fx.Node) else self.root, f"expected {wanted}, found {found}")

    def _parameter(self, name: str, found: Any, state: _State) -> Iterator[_State]:
        if isinstance(found, Term):
            return
        if isinstance(self.pattern.fusion.inputs[name], str):
            edge = self.view.source(found)
            if not is_tensor(edge.base):
                self._fail(state, self.root, f"{name} is {found}, not a tensor")
                return
        else:
            edge = Edge(self.view.constant(found))
            if not is_scalar(edge.base):
                self._fail(state, self.root, f"{name} is the tensor {found}, not a number")
                return
        if name in state.inputs:
            if self.view.same_value(state.inputs[name], edge.base):
                yield state
            else:
                self._fail(state, edge.base, self._two_bindings(name, state.inputs[name], edge.base))
            return
        yield _State(
            {**state.inputs, name: edge.base},
            state.pairs,
            state.edges,
            state.inner,
            (*state.crossed, *edge.crossed),
        )

    def _two_bindings(self, name: str, one: Any, other: Any) -> str:
        if is_tensor(one) and is_tensor(other):
            first, second = self.view.edge(one), self.view.edge(other)
            rounds = first.roundings or second.roundings
            if first.base is second.base and rounds:
                return f"a cast rounds {name} to {str(rounds[0]).removeprefix('torch.')} in one place, not in another"
        return f"{name} is {one} in one place and {other} in another"

    # -- the end of a match --------------------------------------------------------------------------------------
    def _finish(self, state: _State) -> Match | None:
        tensors = [state.inputs[name] for name in self.pattern.tensors()]
        device = value(tensors[0]).device.type
        for name in self.pattern.tensors():
            if not value(state.inputs[name]).dtype.is_floating_point:
                self._fail(state, state.inputs[name], f"{name} is {value(state.inputs[name]).dtype}")
                return None
        dtypes = {name: value(state.inputs[name]).dtype for name in self.pattern.tensors()}
        policy = self.pattern.policy(dtypes, device, self.view.effects.region[self.root])
        outputs, tail = [], []
        for edge, (dtype, rounds) in zip(self.pattern.outputs, policy.outputs, strict=True):
            node = state.pairs[edge.base].nodes[0]
            climbed = self._climb(node, dtype, rounds)
            if climbed is None:
                wanted = ", ".join(str(d).removeprefix("torch.") for d in (*rounds, dtype))
                self._fail(state, node, f"its result is not cast to {wanted} before it is used")
                return None
            outputs.append(climbed[-1])
            tail.extend(climbed)
        return Match(
            fusion=self.pattern.fusion.name,
            outputs=tuple(outputs),
            nodes=frozenset((*state.inner, *tail)),
            crossed=frozenset(state.crossed),
            inputs=state.inputs,
            statics=self.pattern.statics,
            pattern=self.pattern,
            pairs=state.pairs,
            edges=state.edges,
        )

    def _climb(self, node: fx.Node, dtype: torch.dtype, rounds: tuple[torch.dtype, ...]) -> list[fx.Node] | None:
        """From a result up through the casts that belong to it, until it has the pattern's dtype."""
        path = [node]
        while (value(path[-1]).dtype, roundings([value(n).dtype for n in path])) != (dtype, rounds):
            users = list(path[-1].users)
            if len(users) != 1 or self.view.transparent(users[0]) is not path[-1]:
                return None
            path.append(users[0])
        return path

    def _fail(self, state: _State, node: Any, reason: str) -> None:
        # The first failure at the greatest depth: a second operand order fails later and says less.
        if len(state.pairs) > self.near.matched or not self.near.reason:
            node = node if isinstance(node, fx.Node) else self.root
            self.near = NearMiss(
                self.pattern.fusion.name, self.root, node, len(state.pairs), len(self.pattern.terms), reason
            )


def _describe(term: Term) -> str:
    if term.op != "opaque":
        return term.op
    node = term.attrs[0]
    return (
        node.op
        if node.op != "call_method" and node.op != "call_function"
        else str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))
    )


def _attrs(term: Term) -> str:
    return ", ".join(str(a) for a in term.attrs)
