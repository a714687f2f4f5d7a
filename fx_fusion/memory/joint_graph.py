"""AOTAutograd's joint graph, forward and backward in one, as the question sees it: what does the backward read?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, fx

from fx_fusion.graph.size_hints import elements
from fx_fusion.torch_internals.partitioner import input_number, is_alias, is_fusible, is_tangent, is_view

_COPY = torch.ops.aten.copy_.default


class JointGraph:
    """The nodes of a joint graph. Those that lead to an output of the forward are its own, all others the backward's: what a
    backward computes before it meets a gradient (the derivative of an activation) too."""

    def __init__(self, graph: fx.Graph, *, written: Collection[int] = (), parameters: Collection[int] = ()):
        self.graph, self._written, self._parameters = graph, written, parameters
        self._behind_tangents = behind_tangents = set[fx.Node]()
        for node in graph.nodes:
            if is_tangent(node) or any(n in behind_tangents for n in node.all_input_nodes):
                behind_tangents.add(node)
        self._returned = {n for n in graph.output_node().all_input_nodes if n not in behind_tangents}
        # Inductor lets the graph itself write to buffers, and what it writes leads to no output.
        writes = [n for n in graph.find_nodes(op="call_function", target=_COPY) if n not in behind_tangents]
        ours, stack = {*self._returned, *writes}, [*self._returned, *writes]
        while stack:
            found = [n for n in stack.pop().all_input_nodes if n not in ours]
            ours.update(found)
            stack += found
        self.backward = {n for n in graph.nodes if n.op == "call_function" and n not in ours} if behind_tangents else set()

    @property
    def forward(self) -> Iterator[fx.Node]:
        """The nodes of the forward."""
        return (n for n in self.graph.nodes if n not in self.backward and n.op == "call_function")

    def with_views(self, node: fx.Node) -> list[fx.Node]:
        """A node and its views that need no gradient, the backward's too: one storage."""
        found = [node]
        for member in found:
            found += [u for u in member.users if is_view(u) and u not in self._behind_tangents and u not in found]
        return found

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes of the backward that read a node of the forward, or a view of it."""
        views = self.with_views(node)
        users = (u for member in views for u in member.users if u in self.backward and u not in views)
        return [u for u in users if not isinstance(u.meta.get("val"), torch.SymInt)]  # who asks for a size reads nothing

    def needs(self, node: fx.Node, others: Collection[fx.Node]) -> bool:
        """Return True if a node needs the result of one of others: it is one, or reads one, if by way of others. The nodes
        stand in an order in which they can run."""
        first = min(others, default=None)
        stack, seen = [node], {node}
        while stack:
            member = stack.pop()
            if member in others:
                return True
            found = [n for n in member.all_input_nodes if first is not None and not n < first and n not in seen]
            seen.update(found)
            stack += found
        return False

    def fused_with(self, node: fx.Node) -> list[fx.Node]:
        """The results, in memory, of the kernels of the backward that Inductor makes of a node and what follows from it."""
        found = [node] if is_fusible(node) else []
        for member in found:
            found += [u for u in member.users if is_fusible(u) and u in self.backward and u not in found]
        return [n for n in found if not is_view(n) and any(not is_fusible(u) for u in users(n))]

    def read_instead(self, node: fx.Node, again: fx.Node) -> list[fx.Node]:
        """Let the backward read ``again`` where it reads ``node``, and copies of its views, which are returned. What stands
        before ``again`` and depends on it then moves behind it."""
        copies, after = {node: again}, again
        moving = list[fx.Node]()
        for member in self.with_views(node):
            if member is not node:
                with self.graph.inserting_after(after):
                    copies[member] = after = self.graph.node_copy(member, lambda n: copies.get(n, n))
            for reader in [u for u in member.users if u in self.backward]:
                reader.replace_input_with(member, copies[member])
                moving.append(reader)
        self._move_behind(after, moving)
        made = list(copies.values())[1:]
        self.backward.update(made)
        return made

    def _move_behind(self, place: fx.Node, moving: Collection[fx.Node]) -> None:
        early = {n for n in moving if n < place}
        stack = list(early)
        while stack:
            found = [u for u in stack.pop().users if u < place and u not in early]
            early.update(found)
            stack += found
        for node in sorted(early):
            place.append(node)
            place = node

    def is_of_backward(self, *nodes: fx.Node) -> None:
        """Count nodes that were put in to the backward, behind a gradient."""
        self.backward.update(nodes)
        self._behind_tangents.update(nodes)

    def is_there(self, node: fx.Node) -> bool:
        """Return True if the backward has a value anyway: it reads it, or it is a parameter. (Of an op with several results
        each is read by itself.) Of a comparison, say, it could have the result, which is smaller."""
        node = base(node)
        if self.is_lost(node):
            return False
        if node.op == "get_attr" or input_number(node) in self._parameters:
            return True
        size = bytes_of(node)
        last = (r in self._behind_tangents or not is_fusible(r) or bytes_of(r) >= size for r in self.readers(node))
        return size > 0 and any(last)

    def is_lost(self, node: fx.Node) -> bool:
        """Return True if a node is an input that the graph may write to, or a part of one: the backward finds it as it was
        left."""
        node = owner(node)
        number = input_number(node)
        return node.op == "placeholder" and (number in self._written or (number is None and bool(self._written)))

    def from_lost(self) -> Iterator[fx.Node]:
        """Yield what the forward computes of inputs that it may write to."""
        for node in filter(self.is_lost, self.graph.find_nodes(op="placeholder")):
            aliases = [node]
            for user in (u for member in aliases for u in member.users):
                if is_alias(user):
                    aliases += [user] if user not in aliases else []
                elif user.op == "call_function" and user not in self.backward:
                    yield user

    def read_as_it_is(self, node: fx.Node) -> bool:
        """Return True if something in the backward needs a node in memory: a product, a kernel, no kernel of Inductor."""
        return any(not is_fusible(reader) for reader in self.readers(node))

    def is_returned(self, node: fx.Node) -> bool:
        """Return True if the forward returns a node or a view of it: it stays in memory anyway."""
        return any(member in self._returned for member in self.with_views(node))


def users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield who reads a node, by way of views too."""
    for user in node.users:
        yield from users(user) if is_view(user) else (user,)


def base(node: fx.Node) -> fx.Node:
    """Return what a node is a view of, in the end."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def owner(node: fx.Node) -> fx.Node:
    """Return what has a node's memory first."""
    while node.op == "call_function" and is_alias(node):
        node = node.all_input_nodes[0]
    return node


def bytes_of(node: fx.Node) -> float:
    """The size of what a node holds, by the expected sizes where they are symbolic; 0 for no tensor."""
    value = node.meta.get("val")
    return elements(value) * value.dtype.itemsize if isinstance(value, Tensor) else 0


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of ``nodes`` that nothing reads, and what was there for them alone."""
    stack, erased = list(nodes), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            stack += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)
