"""Find the stretches of a graph that repeat: equal layers, in a graph that Inductor is about to lower.

The graph is one of AOTAutograd: a forward, a backward or an inference graph, without autograd in it. It is cut only where no
value that Inductor would keep out of memory is handed on. Two stretches between cuts are equal if their ops, literals,
wiring, and the shapes, strides and dtypes of all values are. The operands themselves differ: each layer has other parameters
and other activations.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.memory.joint_graph import bytes_of, owner
from fx_fusion.torch_internals.aten import draws, is_attention, is_convolution, is_overload, mutates
from fx_fusion.torch_internals.collectives import is_collective
from fx_fusion.torch_internals.lowerings import is_a_library_call
from fx_fusion.torch_internals.partitioner import is_alias, is_empty, is_fusible
from fx_fusion.torch_internals.subgraphs import (
    described_graph,
    described_launch,
    graph_of,
    is_flex_attention,
    is_launch,
    is_seed,
    written_by_launch,
)

_CALL = 3  # what a call costs to compile, in nodes
_LEAST = 10  # nodes of a body
_STEPS = (1, 2, 3, 4, 5, 6, 8)  # layers of a body: every 6th of Gemma 3 sees all tokens
# What lies so far apart is put in memory in between, if it is so small a part of all values of the graph.
_FAR, _SMALL = 150, 1e-3
_OUT = -1  # the place of a reader that is the graph's result


@dataclass
class Stretch:
    """Nodes of a graph that may become a call: ``operands`` is what they read from outside, ``results`` what is read of them
    outside. Equal stretches have equal keys."""

    nodes: list[fx.Node]
    operands: list[fx.Node]
    results: list[fx.Node]
    key: Any


class Work:
    """The nodes of a graph that compute something, in order. All others are made wherever they are needed: views, memory
    that is filled later, constants, and numbers.

    Args:
        epilogues: whether Inductor may compute what follows a product in the product's kernel (``max_autotune``).
    """

    def __init__(self, graph: fx.Graph, *, epilogues: bool = False):
        self.epilogues = epilogues
        self.nodes = [n for n in graph.nodes if n.op == "call_function" and not computes_nothing(n)]
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self._readers: dict[fx.Node, frozenset[int]] = {}
        for node in reversed(graph.nodes):
            found = set[int]()
            for user in node.users:
                found |= {_OUT} if user.op == "output" else {self.place[user]} if user in self.place else self._readers[user]
            self._readers[node] = frozenset(found)
        self._numbers: dict[Any, int] = {}
        self._leaves: dict[fx.Node, tuple[int, tuple[fx.Node, ...]]] = {}
        read = [self._with_leaves(n) for n in self.nodes]
        self.leaves = [leaves for _, leaves in read]
        self.kinds = [kind for kind, _ in read]
        self.sums = _Sums(self.kinds)
        self.plain = [_is_plain(n) for n in self.nodes]

    def is_read(self, node: fx.Node) -> bool:
        """Return True if something in the graph reads a node; the graph may return it, too."""
        return bool(self._readers[node] - {_OUT})

    @cached_property
    def may_cut(self) -> list[bool]:
        """Return for each place whether the graph may be cut behind it.

        Inductor may compute two nodes in one kernel if it generates the kernels of both, and if no library call depends on
        the first and is needed by the second. No cut lies between such two, nor between a node and what reads it if nothing
        needs the value in memory: then each reader computes it again.
        """
        behind, before, library = self._dependencies()
        sizes = [bytes_of(node) for node in self.nodes]
        small = _SMALL * sum(sizes)
        closed = [0] * len(self.nodes)  # how many pairs begin to forbid cuts here, less those that end
        for i, node in enumerate(self.nodes):
            readers, last = self._readers[node] - {_OUT}, i
            in_memory = _OUT in self._readers[node] or any(library >> reader & 1 for reader in readers)
            generated = self._is_generated(i) or (self.epilogues and _is_product(node))
            for reader in readers:
                far = reader - i > _FAR and sizes[i] < small
                in_one_kernel = not library >> reader & 1 and not behind[i] & before[reader] & library
                if (generated and not far and (in_one_kernel or not in_memory)) or not isinstance(_value(node), Tensor):
                    last = max(last, reader)
            closed[i] += 1
            closed[last] -= 1
        return [count == 0 for count in accumulate(closed)]

    def _dependencies(self) -> tuple[list[int], list[int], int]:
        """Return for each place the places behind it that depend on it, and those before it that it depends on, and the
        places of library calls; each as the bits of a number."""
        behind, before = [0] * len(self.nodes), [0] * len(self.nodes)
        readers = [self._readers[node] - {_OUT} for node in self.nodes]
        for i in reversed(range(len(self.nodes))):
            for reader in readers[i]:
                behind[i] |= behind[reader] | 1 << reader
        for i in range(len(self.nodes)):
            for reader in readers[i]:
                before[reader] |= before[i] | 1 << i
        return behind, before, sum(1 << i for i in range(len(self.nodes)) if not self._is_generated(i))

    def _is_generated(self, place: int) -> bool:
        """Return True if Inductor generates the kernel of a node, or of the node that it is a result of."""
        node = self.nodes[place]
        while node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        return is_overload(node.target) and not is_a_library_call(node.target)

    def _strides_may_change(self, node: fx.Node) -> bool:
        """Return True if Inductor may give a value other strides than it has in the graph: a body would copy it."""
        return node in self.place and self._is_generated(self.place[node]) and not _value(node).is_contiguous()

    def _number(self, described: Any) -> int:
        return self._numbers.setdefault(described, len(self._numbers))

    def _with_leaves(self, node: fx.Node) -> tuple[int, tuple[fx.Node, ...]]:
        """Return a number for what a node does, with what is made anew for it, and what both of them read, in order."""
        if node not in self._leaves:
            shapes, leaves = list[int](), list[fx.Node]()
            for operand in inputs_of(node):
                shape, below = self._with_leaves(operand) if is_made_anew(operand) else (_OUT, (operand,))
                shapes.append(shape)
                leaves += below
            described = described_launch(node) if is_launch(node) else (node.args, node.kwargs)
            literals = repr(fx.map_arg(described, lambda n: None))
            graph = graph_of(node)
            target = id(node.target) if graph is None else described_graph(graph.graph)
            number = self._number((target, literals, _described(_value(node)), tuple(shapes)))
            self._leaves[node] = number, tuple(leaves)
        return self._leaves[node]

    def stretch(self, first: int, last: int) -> Stretch | None:
        """Return the nodes from one place to another as one that may become a call; None where they may not."""
        if not all(self.plain[first : last + 1]):
            return None
        nodes = self.nodes[first : last + 1]
        numbers, operands = {n: i for i, n in enumerate(nodes)}, dict[fx.Node, int]()

        def reference(node: fx.Node) -> int:
            return numbers[node] if node in numbers else -1 - operands.setdefault(node, len(operands))

        places = range(first, last + 1)
        wiring = [(self.kinds[i], *map(reference, self.leaves[i])) for i in places]
        results = [n for n in nodes if any(not first <= reader <= last for reader in self._readers[n])]
        values, made = [_value(n) for n in operands], [_value(n) for n in results]
        tensors = [v for v in (*values, *made) if isinstance(v, Tensor)]
        fit = all(isinstance(v, (Tensor, torch.SymInt)) for v in values) and all(isinstance(v, Tensor) for v in made)
        alike = len({v.device for v in tensors}) == 1 and all(v.layout is torch.strided for v in tensors)
        if not made or not fit or not alike or any(map(self._strides_may_change, operands)):
            return None
        launches = {n for n in nodes if is_launch(n)}
        launches |= {self.nodes[r] for n in results for r in self._readers[n] if r != _OUT and is_launch(self.nodes[r])}
        written = [(launch, owner(n)) for launch in launches for n in written_by_launch(launch)]
        if any(n in (operands if launch in numbers else numbers) for launch, n in written):
            return None  # a launch copies what it may not write to: what another graph made
        key = tuple(wiring), tuple(map(_described, values)), tuple(numbers[n] for n in results)
        return Stretch(nodes, list(operands), results, key)


def repeated(work: Work) -> list[list[Stretch]]:
    """Return groups of equal stretches, those first that leave fewest nodes; no node is in two."""
    found, taken = list[list[Stretch]](), set[int]()
    while True:
        groups = _best(work, taken)
        if not groups:
            return found
        found += groups
        taken |= {work.place[n] for group in groups for stretch in group for n in stretch.nodes}


def _best(work: Work, taken: set[int]) -> list[list[Stretch]]:
    """Return the groups of the cuts that leave fewest nodes."""
    by_kind = defaultdict(list)
    for place, may_cut in enumerate(work.may_cut):
        if may_cut and place not in taken:
            by_kind[work.kinds[place]].append(place)
    estimates = []
    for places in by_kind.values():
        for step in _STEPS:
            for offset in range(min(step, len(places))):
                ranges = list(_ranges(places[offset::step], work, taken))
                sizes = Counter((work.sums.of(*r), r[1] - r[0]) for r in ranges)
                gain = sum((count - 1) * (size + 1) - _CALL * count for (_, size), count in sizes.items() if count > 1)
                if gain > _LEAST:
                    estimates.append((gain, ranges))
    best: tuple[float, list[list[Stretch]]] = (_LEAST, [])
    for estimate, ranges in sorted(estimates, key=lambda e: -e[0]):
        if estimate <= best[0]:
            break
        groups = _groups(work, ranges)
        gain = sum((len(g) - 1) * len(g[0].nodes) - (_CALL + len(g[0].results) // 2) * len(g) for g in groups)
        best = max(best, (gain, groups), key=lambda b: b[0])
    return best[1]


def _ranges(places: list[int], work: Work, taken: set[int]) -> Iterator[tuple[int, int]]:
    """Return the stretches between cuts, and those in front of the first cut and behind the last that are like others."""
    pairs = [(first + 1, last) for first, last in pairwise(places)]
    if pairs:
        sums, may_cut, size = work.sums, work.may_cut, pairs[0][1] - pairs[0][0]
        for first, last in ((places[0] - size, places[0]), (places[-1] + 1, places[-1] + 1 + size)):
            inside = first >= 0 and last < len(work.nodes)
            if inside and sums.of(first, last) == sums.of(*pairs[0]) and may_cut[last] and (not first or may_cut[first - 1]):
                pairs.append((first, last))
    for first, last in sorted(pairs):
        if last - first + 1 >= _LEAST and taken.isdisjoint(range(first, last + 1)):
            yield first, last


def _groups(work: Work, ranges: Sequence[tuple[int, int]]) -> list[list[Stretch]]:
    found = defaultdict(list)
    for stretch in (work.stretch(*r) for r in ranges):
        if stretch is not None:
            found[stretch.key].append(stretch)
    return [group for group in found.values() if len(group) > 1]


class _Sums:
    """Hashes of stretches of a sequence of numbers, each in constant time."""

    _BASE, _PRIME = 1_000_003, (1 << 61) - 1

    def __init__(self, numbers: Sequence[int]):
        self._sums, self._powers = [0], [1]
        for number in numbers:
            self._sums.append((self._sums[-1] * self._BASE + number + 1) % self._PRIME)
            self._powers.append(self._powers[-1] * self._BASE % self._PRIME)

    def of(self, first: int, last: int) -> int:
        return (self._sums[last + 1] - self._sums[first] * self._powers[last + 1 - first]) % self._PRIME


def computes_nothing(node: fx.Node) -> bool:
    """Return True if a node computes nothing in memory: a view, empty memory, a constant, a size, a seed."""
    return node.op in ("placeholder", "get_attr") or is_made_anew(node) or is_seed(node) or not _has_tensors(_value(node))


def is_made_anew(node: fx.Node) -> bool:
    """Return True if a node is made again in each body that reads it: a view, a graph, and what is made of no tensor."""
    if graph_of(node) is not None:
        return True
    if node.op != "call_function" or not isinstance(_value(node), Tensor):
        return node.op == "call_function" and _has_tensors(_value(node)) and is_alias(node)
    if is_alias(node) or is_empty(node):
        return True
    of_numbers = not any(_has_tensors(_value(n)) for n in node.all_input_nodes)
    return of_numbers and is_overload(node.target) and is_fusible(node) and not draws(node.target)


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a node in order, each as often as it is one."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _is_plain(node: fx.Node) -> bool:
    """Return True if a node may be in a body: it writes to nothing, draws nothing, waits for no other rank, and may be
    captured in a CUDA graph."""
    if is_launch(node):
        return True
    if is_flex_attention(node):
        graphs = [graph for graph in map(graph_of, node.all_input_nodes) if graph is not None]
        return all(described_graph(graph.graph) is not None for graph in graphs)
    if not is_overload(node.target):
        return node.target is operator.getitem
    op = node.target
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None) in op.tags  # type: ignore[union-attr]
    random = draws(op) and not is_attention(op)  # which draws by itself, in the order of the calls
    if is_convolution(op):
        return False  # Inductor lays these out by all convolutions of a graph
    return not (mutates(op) or random or unsafe or is_collective(op))


def _is_product(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _has_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(part, Tensor) for part in parts)


def _described(value: Any) -> Any:
    """Return what code that Inductor generates for a value depends on."""
    if isinstance(value, Tensor):
        start = value.storage_offset()
        aligned = isinstance(start, int) and start * value.dtype.itemsize % 16 == 0
        return type(value).__name__, str(tuple(value.shape)), str(value.stride()), value.dtype, str(value.device), aligned
    if isinstance(value, dict):
        return tuple((name, _described(part)) for name, part in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return type(value).__name__, str(value)
