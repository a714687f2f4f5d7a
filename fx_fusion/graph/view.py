"""The canonical view: what each node of a Dynamo graph means, whatever its spelling. The graph itself is not touched.

``View.term(node)`` is the meaning of one node: an op name, operand nodes, literal attributes. All spellings of one
thing are one term::

    x.pow(2)   x ** 2   x * x   torch.square(x)          square(x)
    1 / x.sqrt()   x ** -0.5   torch.rsqrt(x)            rsqrt(x)
    x / y.sqrt()                                         mul(x, rsqrt(y))
    x * torch.sigmoid(x)   F.silu(x)                     silu(x)
    x[..., :d // 2]   x.chunk(2, -1)[0]                  part(x) [dim=-1, 0 of 2]
    x.mean(-1).unsqueeze(-1)                             mean(x) [dim=-1, keepdim]

``View.edge(node)`` follows an operand down through nodes that change no value: casts, ``contiguous``, views and slices
that change nothing, dropout with p = 0. It reports which of the crossed casts round.

The same view reads the pattern functions, so both sides agree by construction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_fusion.graph import normal_forms, signatures
from fx_fusion.graph.bodies import Outside
from fx_fusion.graph.dtypes import keeps_values, roundings
from fx_fusion.graph.effects import Effects, storages
from fx_fusion.graph.gelu import written_out_gelus
from fx_fusion.graph.terms import Edge, Term, is_scalar, is_tensor, same_shape, symmetric, value

__all__ = ["Edge", "Term", "View", "is_scalar", "is_tensor", "same_shape", "symmetric", "value"]


class View:
    """The canonical view of one FX graph whose nodes carry ``example_value`` metadata."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.effects = Effects(graph, self.order)
        self.assumptions: Any = None  # what may be assumed and checked at run time; set by the backend
        self.outside: Outside | None = None  # of a checkpointed body: the graph around it; set by the backend
        self.prover: Any = None  # of its masks, made when the first is asked for
        self.may_defer = False  # whether outputs of this graph may be deferred; set by the backend
        self._terms: dict[fx.Node, Term] = {}
        self._below: dict[fx.Node, fx.Node | None] = {}
        self._edges: dict[fx.Node, Edge] = {}
        for node in graph.nodes:
            if self.name(node) in ("tanh", "erf"):
                self._terms.update(written_out_gelus(self, node))

    def adopt(self, node: fx.Node, beside: fx.Node) -> None:
        """A node that was inserted ``beside`` another after this view was made."""
        self.order[node] = self.order[beside]
        self.effects.adopt(node, beside)

    # -- meaning of a node ---------------------------------------------------------------------------------------
    def term(self, node: fx.Node | Term) -> Term:
        if isinstance(node, Term):
            return node
        if (known := self._terms.get(node)) is not None:
            return known
        term = self._build(node) or Term("opaque", (), (node,), (node,))
        self._terms[node] = term
        return term

    def _build(self, node: fx.Node) -> Term | None:
        name = self.name(node)
        if name is None:
            return None
        args, kwargs = node.args, node.kwargs
        if node.op == "call_method" and node.target in signatures.REFLECTED:
            args = (args[1], args[0])
        if name in signatures.VARIADIC:
            return normal_forms.reading_shape(self, node, name)
        bound = signatures.bind(name, args, dict(kwargs))
        if bound is None:
            return None
        bound = {key: self.constant(item) for key, item in bound.items()}
        rule = normal_forms.RULES.get(name)
        return rule(self, node, bound) if rule else normal_forms.plain(name, node, bound)

    def name(self, node: fx.Node) -> str | None:
        """The op's canonical name; None for placeholders, unknown callables and in-place ops on values still alive."""
        if node.op == "call_method":
            functional, in_place = signatures.METHODS.get(str(node.target)), signatures.IN_PLACE.get(node.target)
            functional = functional or signatures.REFLECTED.get(str(node.target))
        elif node.op == "call_function":
            functional, in_place = _lookup(signatures.FUNCTIONS, node.target), _lookup(signatures.IN_PLACE, node.target)
        else:
            return None
        if functional and not self.effects.mutated(node):
            return functional
        name = functional or in_place
        return name if name and self.effects.overwrites_dead_value(node) else None

    def constant(self, item: Any) -> Any:
        """A node that stands for a known Python number (``x.shape[-1] // 2``, static) becomes that number."""
        if isinstance(item, fx.Node):
            known = value(item)
            is_number = isinstance(known, (int, float)) and not isinstance(known, bool)
            return known if is_number and item.op != "placeholder" else item
        if isinstance(item, (list, tuple)):
            return tuple(self.constant(i) for i in item)
        if isinstance(item, slice):
            return slice(self.constant(item.start), self.constant(item.stop), self.constant(item.step))
        return item

    def is_pure(self, node: fx.Node) -> bool:
        """Whether the node may be computed later, or not at all: a known op that writes nothing and draws nothing."""
        return self.name(node) not in (None, "dropout") and not self.effects.mutated(node)

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
        dtypes = [value(n).dtype for n in (node, *reversed(crossed)) if is_tensor(n)]
        edge = Edge(node, roundings(dtypes) if dtypes else (), tuple(crossed))
        self._edges[operand] = edge
        return edge

    def source(self, operand: Any) -> Edge:
        """Down through what changes neither value nor meaning: stops above a cast that rounds or a copy."""
        if not isinstance(operand, fx.Node):
            return Edge(operand)
        crossed, node = [], operand
        while (below := self.transparent(node)) is not None and is_tensor(node):
            if not keeps_values(value(below).dtype, value(node).dtype) or self._copies(node):
                break
            crossed.append(node)
            node = below
        return Edge(node, (), tuple(crossed))

    def same_source(self, a: Any, b: Any) -> bool:
        """Whether two operands are casts of one node that round alike, or that node."""
        if a is b:
            return True
        left, right = self.edge(a), self.edge(b)
        return isinstance(left.base, fx.Node) and left.base is right.base and left.roundings == right.roundings

    def same_value(self, a: Any, b: Any) -> bool:
        """Whether two nodes hold the same values, roundings included: one node, casts of one node that round alike, or the
        same pure term of the same operands with no write to any of them in between (``cos[:, None]`` written twice)."""
        if self.same_source(a, b):
            return True
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            return not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and type(a) is type(b) and a == b
        one, other = self.term(a), self.term(b)
        if one.op in ("opaque", "dropout") or (one.op, one.attrs, len(one.operands)) != (
            other.op,
            other.attrs,
            len(other.operands),
        ):
            return False
        if "shape" in one.attrs and not same_shape(value(a), value(b)):
            return False
        if value(a).dtype != value(b).dtype or self.effects.mutated(a) or self.effects.mutated(b):
            return False
        if not all(self.same_value(x, y) for x, y in zip(one.operands, other.operands, strict=True)):
            return False
        first, last = sorted((self.order[a], self.order[b]))
        used = {n for n in (a, b, *one.operands, *other.operands) if isinstance(n, fx.Node)}
        return self.effects.writes_between(first, last, used) is None

    def _copies(self, node: fx.Node) -> bool:
        return self.name(node) in ("contiguous", "clone") and value(node).stride() != value(node.args[0]).stride()

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
        """Whether ``node`` is made in a no_grad block and used outside of it: its source has a gradient, it has none."""
        region = self.effects.region
        if region[node][0] or not any(region[user][0] for user in node.users if user.op != "output"):
            return False
        return any(is_tensor(source) and value(source).requires_grad for source in node.all_input_nodes)

    def _hands_on(self, node: fx.Node) -> fx.Node | None:
        name = self.name(node)
        if name is None or not node.args or not isinstance(node.args[0], fx.Node) or not is_tensor(node):
            return None
        below = node.args[0]
        before, after = value(below), value(node)
        if not isinstance(before, torch.Tensor) or before.device != after.device:
            return None
        if before.dtype.is_floating_point != after.dtype.is_floating_point:
            return None  # .int() of scores, a mask made a number: another value
        if name in _CASTS or name in _MAY_BE_NO_OP:
            return below if same_shape(before, after) else None
        if name == "dropout":
            bound = signatures.bind("dropout", node.args, dict(node.kwargs))
            return below if bound and (bound["p"] == 0 or bound["training"] is False) else None
        if name == "getitem":
            return below if _is_full_slice(node.args[1]) and same_shape(before, after) else None
        return None


_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "bool"}
_MAY_BE_NO_OP = {"view", "reshape", "view_as", "expand", "expand_as", "contiguous", "clone", "flatten", "squeeze"}


def _lookup(table: dict[Any, str], target: Any) -> str | None:
    try:
        return table.get(target)
    except TypeError:  # an unhashable callable
        return None


def _is_full_slice(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(item is Ellipsis or isinstance(item, slice) for item in items)
