"""Find where a graph contains a pattern.

A match walks the pattern and the graph together, root first, both through the canonical view. A parameter of the
pattern binds a node by name, the same name is the same node, a literal must be equal; the operands of ``add`` and
``mul`` are tried in both orders, so bindings are *generated* and the caller takes the first that is legal. Where one side
has a sum and the other a difference, the sign of a negative operand moves. Casts are transparent here and recorded; at the
end they are compared with the pattern's dtype policy, and the shapes of views with those that the pattern makes of the
match's inputs.

What comes close and fails leaves a near miss: how far it got and the first thing that differed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fx_fusion.fusion.dims import mismatch
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.pattern import DtypePolicy, Pattern
from fx_fusion.graph.arithmetic_forms import with_a_sign_moved
from fx_fusion.graph.dtypes import name as dtype_name
from fx_fusion.graph.dtypes import roundings
from fx_fusion.graph.terms import Edge, Term, described, example, is_scalar, is_tensor, same_shape, symmetric
from fx_fusion.graph.view import View


@dataclass(frozen=True)
class _State:
    """The bindings of an attempt so far. Copied, never changed: backtracking is forgetting a copy."""

    inputs: Mapping[str, Any]
    pairs: Mapping[fx.Node, Term]
    edges: Mapping[tuple[fx.Node, int], tuple[torch.dtype, ...]]
    inner: tuple[fx.Node, ...]
    crossed: tuple[fx.Node, ...]


class Attempt:
    """Match one pattern at one root; ``matches()`` generates, ``near`` is the furthest failure afterwards."""

    def __init__(self, view: View, pattern: Pattern, root: fx.Node):
        self.view, self.pattern, self.root = view, pattern, root
        self.near = NearMiss(pattern.fusion.name, root, root, "", 0, len(pattern.terms))

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
            elif self.view.same_value(known.nodes[0], term.nodes[0]):  # q[..., half:] written twice
                yield replace(state, inner=(*state.inner, *term.nodes))
            else:
                self._fail(state, term.nodes[0], f"{known.nodes[0].name} is used where {term.nodes[0].name} is here")
            return
        pattern = self.pattern.terms[wanted]
        if {pattern.op, term.op} == {"add", "sub"}:
            term = with_a_sign_moved(self.view, term) or term
        if pattern.op != term.op or len(pattern.operands) != len(term.operands):
            ops = described(pattern), described(term)
            hint = self.pattern.fusion.hints.get(ops) or f"expected {ops[0]}, found {ops[1]}"
            self._fail(state, term.nodes[0], hint)
            return
        if pattern.attrs != term.attrs:
            self._fail(state, term.nodes[0], _other_attrs(pattern, term))
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
        base = self.pattern.view.folded(base)
        if not isinstance(base, fx.Node):
            yield from self._literal(base, found, state)
        elif base.op == "placeholder":
            yield from self._parameter(str(base.target), found, state)
        else:
            edge = Edge(found) if isinstance(found, Term) else self.view.edge(found)
            if not isinstance(edge.base, (fx.Node, Term)) or not is_tensor(edge.base):
                self._fail(state, self.root, f"expected {described(self.pattern.terms[base])}, found {_shown(found)}")
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
        found = self.view.folded(found)
        if isinstance(found, (int, float)) and found == wanted:
            yield state
        else:
            node = found if isinstance(found, fx.Node) else self.root
            self._fail(state, node, f"expected {wanted}, found {_shown(found)}")

    def _parameter(self, name: str, found: Any, state: _State) -> Iterator[_State]:
        if isinstance(found, Term):
            return
        if name in self.pattern.fusion.specs:
            edge = self.view.source(found)
            if not is_tensor(edge.base):
                self._fail(state, self.root, f"{name} is {found}, not a tensor")
                return
        else:
            edge = Edge(self.view.folded(found))
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
                return f"a cast rounds {name} to {dtype_name(rounds[0])} in one place, not in another"
        return f"{name} is {one} in one place and {other} in another"

    # -- the end of a match --------------------------------------------------------------------------------------
    def _finish(self, state: _State) -> Match | None:
        tensors = {name: example(state.inputs[name]) for name in self.pattern.tensors}
        for name, tensor in tensors.items():
            if not tensor.dtype.is_floating_point:
                self._fail(state, state.inputs[name], f"{name} is {dtype_name(tensor.dtype)}")
                return None
        device = next(iter(tensors.values())).device.type
        region = self.view.effects.region[self.root]
        policy = self.pattern.policy({name: t.dtype for name, t in tensors.items()}, device, region)
        if isinstance(policy, str):
            self._fail(state, self.root, policy)
            return None
        outputs, tail = [], []
        for edge, (dtype, rounds) in zip(self.pattern.outputs, policy.outputs, strict=True):
            node = state.pairs[edge.base].nodes[0]
            climbed = self._climb(node, dtype, rounds)
            if climbed is None:
                wanted = ", ".join(map(dtype_name, dict.fromkeys((*rounds, dtype))))
                self._fail(state, node, f"its result is not cast to {wanted} before it is used")
                return None
            outputs.append(climbed[-1])
            tail.extend(climbed)
        nodes = frozenset((*state.inner, *tail))
        match = Match(
            fusion=self.pattern.fusion.name,
            outputs=tuple(outputs),
            nodes=nodes,
            crossed=frozenset(state.crossed),
            inputs=state.inputs,
            statics=self.pattern.statics,
            terms=tuple(state.pairs.values()),
            rounded=nodes,  # compared with the pattern's casts, one by one
            differs=self._other_dtypes(state, policy),
        )
        read = self.pattern.fusion.read
        if read is not None:
            return read(match)
        return match if match.differs is not None else replace(match, differs=self._other_shapes(state))

    def _other_dtypes(self, state: _State, policy: DtypePolicy) -> str | None:
        """Return where the graph computes or rounds otherwise than the pattern, given the dtypes of its inputs."""
        for node, term in state.pairs.items():
            found, wanted = example(term).dtype, policy.results[node]
            if found != wanted:
                what = f"{described(term)} is computed in {dtype_name(found)}"
                return f"{what}; the kernel computes it in {dtype_name(wanted)}"
        for (node, i), found_roundings in state.edges.items():
            wanted_roundings = policy.operands[node, i]
            if found_roundings != wanted_roundings:
                at = f"before {described(state.pairs[node])}"
                if found_roundings and not wanted_roundings:
                    return f"a cast to {dtype_name(found_roundings[0])} rounds {at}; the kernel does not round there"
                if wanted_roundings and not found_roundings:
                    return f"nothing rounds to {dtype_name(wanted_roundings[0])} {at}; the kernel does"
                found, wanted = dtype_name(found_roundings[0]), dtype_name(wanted_roundings[0])
                return f"{found} {at} where the kernel rounds to {wanted}"
        return None

    def _other_shapes(self, state: _State) -> str | None:
        """Return where a view of the graph has another shape than the pattern's for these inputs: one view is not
        another."""
        if not self.pattern.reads_shapes:
            return None
        inputs = {n: example(state.inputs[n]) for n in self.pattern.parameters}
        if mismatch(self.pattern.fusion.specs, {n: inputs[n] for n in self.pattern.tensors}) is not None:
            return None  # legality says so
        wanted = self.pattern.values(inputs)
        for node, term in state.pairs.items():
            found = example(term)
            if not same_shape(found, wanted[node]):
                return f"{described(term)} makes shape {tuple(found.shape)}; the pattern's makes {tuple(wanted[node].shape)}"
        return None

    def _climb(self, node: fx.Node, dtype: torch.dtype, rounds: tuple[torch.dtype, ...]) -> list[fx.Node] | None:
        """From a result up through the casts that belong to it, until it has the pattern's dtype."""
        path = [node]
        while (example(path[-1]).dtype, roundings([example(n).dtype for n in path])) != (dtype, rounds):
            users = list(path[-1].users)
            if len(users) != 1 or self.view.transparent(users[0]) is not path[-1]:
                return None
            path.append(users[0])
        return path

    def _fail(self, state: _State, node: Any, reason: str) -> None:
        # The first failure at the greatest depth: a second operand order fails later and says less.
        node = node if isinstance(node, fx.Node) else self.root
        # At one depth, what is computed says more than an input that another order of operands came to.
        vague = self.near.node.op == "placeholder" and self.near.reason.startswith("expected ")
        better = len(state.pairs) == self.near.matched and vague and node.op != "placeholder"
        if len(state.pairs) > self.near.matched or not self.near.reason or better:
            fusion = self.pattern.fusion.name
            self.near = NearMiss(fusion, self.root, node, reason, len(state.pairs), len(self.pattern.terms))


def _shown(found: Any) -> str:
    """Return an operand as a near miss names it."""
    return described(found) if isinstance(found, Term) else str(found)


def _other_attrs(pattern: Term, term: Term) -> str:
    if described(pattern) != described(term):
        return f"expected {described(pattern)}, found {described(term)}"
    over, wanted_over = (_over(t, t.attrs[1:] != other.attrs[1:]) for t, other in ((term, pattern), (pattern, term)))
    return f"{pattern.op} is over {over}, here it has to be over {wanted_over}"


def _over(term: Term, with_rest: bool) -> str:
    """Return what an op is distinguished by: the dims of a reduction in words, whether it keeps them if that is asked
    for."""
    dims, *rest = term.attrs
    if not isinstance(dims, tuple) or not all(isinstance(dim, int) for dim in dims):
        return ", ".join(str(a) for a in term.attrs)
    kept = f" with keepdim={rest[0]}" if with_rest and rest else ""
    return f"dim{'s' * (len(dims) != 1)} {', '.join(map(str, dims))}{kept}"
