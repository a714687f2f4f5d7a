"""The canonical view: what each node of a Dynamo graph means, whatever its spelling. The graph itself is not touched.

``View.term(node)`` is the meaning of one node: an op name, operand nodes, literal attributes. All spellings of one
thing are one term::

    x.pow(2)   x ** 2   x * x   torch.square(x)          square(x)
    1 / x.sqrt()   x ** -0.5   torch.rsqrt(x)            rsqrt(x)
    x / y.sqrt()                                         mul(x, rsqrt(y))
    x * torch.sigmoid(x)   F.silu(x)                     silu(x)
    x[..., :d // 2]   x.chunk(2, -1)[0]                  part(x) [dim=-1, 0 of 2]
    x[..., 2]   x.unbind(-1)[2]   x.select(-1, 2)        select(x) [dim=-1, 2]
    x.mean(-1).unsqueeze(-1)                             mean(x) [dim=-1, keepdim]

``View.edge(node)`` follows an operand down through nodes that change no value: casts, ``contiguous``, views and slices
that change nothing, dropout with p = 0. It reports which of the crossed casts round.

The same view reads the pattern functions, so both sides agree by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_fusion.graph import normal_forms, signatures
from fx_fusion.graph.dtypes import keeps_values, roundings
from fx_fusion.graph.effects import Effects, storages
from fx_fusion.graph.indices import index_of
from fx_fusion.graph.terms import Edge, Term, example, is_tensor, same_shape
from fx_fusion.torch_internals.containers import tree_leaves


@dataclass(frozen=True)
class Outside:
    """The graph around a body, the calls that run it, in order, and their operand for each placeholder of the body: None
    where the calls have different ones."""

    view: View
    calls: tuple[fx.Node, ...]
    operands: dict[fx.Node, Any]


class View:
    """The canonical view of one FX graph whose nodes carry example values.

    Args:
        graph: the graph.
        outside: for a body, the graph around it.
    """

    def __init__(self, graph: fx.Graph, outside: Outside | None = None):
        self.graph, self.outside = graph, outside
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        around = None if outside is None else outside.view.effects.region[outside.calls[0]]
        self.effects: Effects = Effects(graph, self.order, around)
        self._terms: dict[fx.Node, Term] = {}
        self._arguments: dict[fx.Node, Mapping[str, Any] | None] = {}
        self._below: dict[fx.Node, fx.Node | None] = {}
        self._edges: dict[fx.Node, Edge] = {}

    def adopt(self, node: fx.Node, beside: fx.Node) -> None:
        """Take in a node that was inserted ``beside`` another after this view was made."""
        self.order[node] = self.order[beside]
        self.effects.adopt(node, beside)

    # -- meaning of a node ---------------------------------------------------------------------------------------
    def term(self, node: fx.Node | Term) -> Term:
        """Return what a node means; an opaque term where it is not known."""
        if isinstance(node, Term):
            return node
        if (known := self._terms.get(node)) is not None:
            return known
        term = self._build(node) or Term("opaque", (), (node,), (node,))
        self._terms[node] = term
        return term

    def _build(self, node: fx.Node) -> Term | None:
        name, arguments = self.name(node), self.arguments(node)
        if name is None or arguments is None:
            return None
        bound = {key: self.folded(item) for key, item in arguments.items()}
        rule = normal_forms.RULES.get(name)
        return rule(self, node, bound) if rule else normal_forms.plain(name, node, bound)

    def name(self, node: fx.Node) -> str | None:
        """The op's canonical name; None for placeholders, unknown callables and in-place ops on values still alive."""
        functional, in_place = signatures.names_of(node)
        if functional == "view" and any(isinstance(given, torch.dtype) for given in (*node.args, *node.kwargs.values())):
            return None  # the same bytes as other numbers
        if functional and not self.effects.mutated(node):
            return functional
        name = functional or in_place
        return name if name and self.effects.overwrites_dead_value(node) else None

    def arguments(self, node: fx.Node) -> Mapping[str, Any] | None:
        """The arguments of a call by parameter, defaults filled in, dims as numbers; None where the call or its arguments
        are not known, or a dim changes between calls."""
        if node not in self._arguments:
            name = self.name(node)
            bound = None if name is None else signatures.bind(name, node)
            self._arguments[node] = None if bound is None else self._with_dims(bound)
        return self._arguments[node]

    def _with_dims(self, bound: dict[str, Any]) -> dict[str, Any] | None:
        dims = {name: self.folded(bound[name]) for name in signatures.DIMS if name in bound}
        # The dim of torch.max(a, b) is b.
        changes = any(isinstance(dim, fx.Node) and not is_tensor(dim) for dim in tree_leaves(dims))
        return None if changes else bound | dims

    def arguments_of(self, node: Any, *names: str) -> Mapping[str, Any] | None:
        """``arguments`` if ``node`` is a call of one of these ops."""
        return self.arguments(node) if isinstance(node, fx.Node) and self.name(node) in names else None

    def only_reader(self, node: fx.Node | None, *names: str) -> fx.Node | None:
        """Return the only reader of a node, if it is a call of one of these ops; None for None."""
        user = next(iter(node.users)) if node is not None and len(node.users) == 1 else None
        return user if user is not None and self.name(user) in names else None

    def folded(self, item: Any) -> Any:
        """``item`` with each node that stands for a known Python number (``x.shape[-1] // 2``, static) as that number."""
        if isinstance(item, fx.Node):
            known = example(item)
            is_number = isinstance(known, (int, float)) and not isinstance(known, bool)
            return known if is_number and item.op != "placeholder" else item
        if isinstance(item, (list, tuple)):
            return tuple(self.folded(i) for i in item)
        if isinstance(item, slice):
            return slice(self.folded(item.start), self.folded(item.stop), self.folded(item.step))
        return item

    def is_pure(self, node: fx.Node) -> bool:
        """Return True if the node may be computed later, or not at all: a known op that writes nothing and draws nothing. (A
        detached tensor shares memory with one that has a gradient.)"""
        known = self.name(node) not in (None, "detach", "alias")
        return known and not self.draws(node) and not self.effects.mutated(node)

    def draws(self, node: fx.Node) -> bool:
        """Return True if a known op draws random numbers."""
        attention = self.arguments_of(node, "scaled_dot_product_attention")
        return self.name(node) == "dropout" or (attention is not None and attention["dropout_p"] != 0)

    # -- operands ------------------------------------------------------------------------------------------------
    def edge(self, operand: Any) -> Edge:
        """Down through everything that changes no value; casts that round are crossed too, and reported."""
        if not isinstance(operand, fx.Node):
            return Edge(operand)
        if (known := self._edges.get(operand)) is not None:
            return known
        crossed, node = [], operand
        while (below := self.transparent(node)) is not None:
            crossed.append(node)
            node = below
        dtypes = [example(n).dtype for n in (node, *reversed(crossed)) if is_tensor(n)]
        edge = Edge(node, roundings(dtypes) if dtypes else (), tuple(crossed))
        self._edges[operand] = edge
        return edge

    def source(self, operand: Any) -> Edge:
        """Down through what changes neither value nor meaning: stops above a cast that rounds or a copy."""
        if not isinstance(operand, fx.Node):
            return Edge(operand)
        crossed, node = [], operand
        while (below := self.transparent(node)) is not None and is_tensor(node):
            if not keeps_values(example(below).dtype, example(node).dtype) or self._copies(node):
                break
            crossed.append(node)
            node = below
        return Edge(node, (), tuple(crossed))

    def same_source(self, a: Any, b: Any) -> bool:
        """Return True if two operands are casts of one node that round alike, or that node."""
        if a is b:
            return True
        left, right = self.edge(a), self.edge(b)
        return isinstance(left.base, fx.Node) and left.base is right.base and left.roundings == right.roundings

    def same_value(self, a: Any, b: Any) -> bool:
        """Return True if two nodes hold the same values, roundings included: one node, casts of one node that round alike,
        or the same pure term of the same operands with no write that tells them apart (``cos[:, None]`` written twice), both
        with their gradient or both without."""
        if self.same_source(a, b):
            return True
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            return not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and type(a) is type(b) and a == b
        one, other = self.term(a), self.term(b)
        if one.op == "opaque" or self.draws(a) or (one.op, one.attrs) != (other.op, other.attrs):
            return False
        # By the grad mode: what Dynamo's fake tensors say of views under no_grad is not what eager's do.
        if example(a).is_floating_point() and self.effects.region[a][0] != self.effects.region[b][0]:
            return False
        if len(one.operands) != len(other.operands):
            return False
        if "shape" in one.attrs and not same_shape(example(a), example(b)):
            return False
        if example(a).dtype != example(b).dtype or self.effects.mutated(a) or self.effects.mutated(b):
            return False
        if not all(self.same_value(x, y) for x, y in zip(one.operands, other.operands, strict=True)):
            return False
        # Start at the first node that either term stands for, because in 1 / x.sqrt() the square root reads x.
        read_at = [self.order[n] for n in (*one.nodes, *other.nodes)]
        first, last = min(read_at), max(read_at)
        used = {n for n in (a, b, *one.operands, *other.operands) if isinstance(n, fx.Node)}
        if self.effects.writes_between(first, last, used) is not None:
            return False
        # A later write to one of them makes them two values; to what both are views of, it changes both alike.
        return set(storages(a)) == set(storages(b)) or self.effects.written_after(last, (a, b)) is None

    def _copies(self, node: fx.Node) -> bool:
        return self.name(node) in ("contiguous", "clone") and example(node).stride() != example(node.args[0]).stride()

    def transparent(self, node: fx.Node) -> fx.Node | None:
        """The operand whose values ``node`` hands on unchanged (up to a cast); None if it computes something."""
        if node not in self._below:
            self._below[node] = self._look_through(node)
        return self._below[node]

    def _look_through(self, node: fx.Node) -> fx.Node | None:
        below = self._hands_on(node)
        if below is None or self.hides_gradient(node):
            return None
        if not self.effects.writes or set(storages(node)) == set(storages(below)):
            return below
        # A copy: it stands for its source only while neither is written to.
        at = self.order.get(node, -1)
        return None if self.effects.written_after(at, (node, below)) else below

    def hides_gradient(self, node: fx.Node) -> bool:
        """Return True if ``node`` is made in a no_grad block and used outside of it: its source has a gradient, it has
        none."""
        region = self.effects.region
        if region[node][0] or not any(region[user][0] for user in node.users if user.op != "output"):
            return False
        seen: set[fx.Node] = set()
        waiting = list(node.all_input_nodes)
        while waiting:  # through everything that is made in such a block
            source = waiting.pop()
            if source in seen or not is_tensor(source):
                continue
            if example(source).requires_grad:
                return True
            seen.add(source)
            waiting += [] if region[source][0] else source.all_input_nodes
        return False

    def _hands_on(self, node: fx.Node) -> fx.Node | None:
        name = self.name(node)
        if name is None or not node.args or not isinstance(node.args[0], fx.Node) or not is_tensor(node):
            return None
        below = node.args[0]
        before, after = example(below), example(node)
        if not isinstance(before, torch.Tensor) or before.device != after.device:
            return None
        if before.dtype.is_floating_point != after.dtype.is_floating_point:
            return None  # .int() of scores, a mask made a number: another value
        if name == "view" and before.dtype != after.dtype:
            return None  # the same memory, read as another dtype
        if name in _CASTS or name in _MAY_BE_NO_OP:
            return below if same_shape(before, after) else None
        if name == "dropout":
            bound = self.arguments(node)
            return below if bound and (bound["p"] == 0 or bound["training"] is False) else None
        if name == "getitem":
            index = index_of(node.args[1], before.dim())
            plain = index is not None and index.only_slices and not index.new_axes
            return below if plain and same_shape(before, after) else None
        return None


_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "bool"}
_MAY_BE_NO_OP = {"view", "reshape", "expand", "expand_as", "contiguous", "clone", "flatten", "squeeze"}
