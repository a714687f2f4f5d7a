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

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion import signatures
from fx_fusion.dtypes import keeps_values, roundings
from fx_fusion.effects import Effects, storages


@dataclass(frozen=True)
class Term:
    """``op(*operands)`` with literal ``attrs``. ``nodes`` are the graph nodes that it stands for, the root first.

    An operand is a node, a number, or a Term of its own where no node of the graph is that value
    (``x / sqrt(y)`` reads ``mul(x, rsqrt(y))``).
    """

    op: str
    operands: tuple[Any, ...]
    attrs: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Edge:
    """An operand: the node that makes its values, the casts on the way that round, and the nodes crossed."""

    base: Any
    roundings: tuple[torch.dtype, ...] = ()
    crossed: tuple[fx.Node, ...] = ()


def value(node: Any) -> Any:
    """The example value (a fake tensor, a symbolic scalar) of a node; anything else is its own value."""
    if isinstance(node, Term):
        node = node.nodes[0]
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(value(node), torch.Tensor)


def is_scalar(node: Any) -> bool:
    """A Python number or a node that is one (``.item()`` under dynamic shapes), not a 0-d tensor."""
    return isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat))


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two shapes are equal for every value of their symbols. Adds no guard."""
    return a.dim() == b.dim() and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))


class View:
    """The canonical view of one FX graph whose nodes carry ``example_value`` metadata."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.effects = Effects(graph, self.order)
        self.assumptions: Any = None  # what may be assumed and checked at run time; set by the backend
        self.may_defer = False  # whether outputs of this graph may be deferred; set by the backend
        self._terms: dict[fx.Node, Term] = {}
        self._below: dict[fx.Node, fx.Node | None] = {}
        self._edges: dict[fx.Node, Edge] = {}
        for node in graph.nodes:
            if self.name(node) in ("tanh", "erf"):
                self._terms.update(written_out_gelus(self, node))

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
            return _reading_shape(self, node, name)
        bound = signatures.bind(name, args, dict(kwargs))
        if bound is None:
            return None
        bound = {key: self.constant(item) for key, item in bound.items()}
        rule = _RULES.get(name)
        return rule(self, node, bound) if rule else _plain(name, node, bound)

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

    def same_value(self, a: Any, b: Any) -> bool:
        """Whether two nodes hold the same values: one node, or the same pure term of the same operands with no write to
        any of them in between (``cos[:, None]`` written twice)."""
        if a is b:
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
        if below is None or not self.effects.writes or set(storages(node)) == set(storages(below)):
            return below
        # A copy: it stands for its source only while neither is written to.
        at = self.order.get(node, -1)
        return None if self.effects.written_after(at, (node, below)) else below

    def _hands_on(self, node: fx.Node) -> fx.Node | None:
        name = self.name(node)
        if name is None or not node.args or not isinstance(node.args[0], fx.Node) or not is_tensor(node):
            return None
        below = node.args[0]
        before, after = value(below), value(node)
        if not isinstance(before, torch.Tensor) or before.device != after.device:
            return None
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
_SYMMETRIC = {"add", "mul"}
REDUCTIONS = {"mean", "sum"}


def _lookup(table: dict[Any, str], target: Any) -> str | None:
    try:
        return table.get(target)
    except TypeError:  # an unhashable callable
        return None


def _is_full_slice(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(item is Ellipsis or isinstance(item, slice) for item in items)


def _negative(dim: int, rank: int) -> int:
    return dim - rank if dim >= 0 else dim


def _plain(name: str, node: fx.Node, bound: dict[str, Any]) -> Term:
    operands = tuple(v for v in bound.values() if isinstance(v, (fx.Node, int, float)) and not isinstance(v, bool))
    attrs = tuple((k, v) for k, v in bound.items() if not isinstance(v, (fx.Node, int, float)) or isinstance(v, bool))
    return Term(name, operands, attrs, (node,))


# -- rules: one a spelling family. Each returns the term, or None for "opaque" --------------------------------------
Bound = dict[str, Any]
_RULES: dict[str, Callable[[View, fx.Node, Bound], Term | None]] = {}


def _rule(*names: str) -> Callable[..., Any]:
    def add(function: Callable[[View, fx.Node, Bound], Term | None]) -> Callable[[View, fx.Node, Bound], Term | None]:
        for name in names:
            _RULES[name] = function
        return function

    return add


def _inner(view: View, operand: Any, op: str) -> Term | None:
    """The term behind an operand, if it is ``op`` and no cast on the way rounds."""
    edge = view.edge(operand)
    if not isinstance(edge.base, fx.Node) or edge.roundings:
        return None
    term = view.term(edge.base)
    return Term(term.op, term.operands, term.attrs, (*edge.crossed, *term.nodes)) if term.op == op else None


def _same(view: View, a: Any, b: Any) -> bool:
    """Whether two operands are the same values."""
    if a is b:
        return True
    left, right = view.edge(a), view.edge(b)
    return isinstance(left.base, fx.Node) and left.base is right.base and left.roundings == right.roundings


@_rule("pow")
def _pow(view: View, node: fx.Node, bound: Bound) -> Term | None:
    x, exponent = bound["input"], bound["exponent"]
    if exponent == 2:
        return Term("square", (x,), (), (node,))
    if exponent == 0.5:
        return Term("sqrt", (x,), (), (node,))
    if exponent == -0.5:
        return Term("rsqrt", (x,), (), (node,))
    return Term("pow", (x, exponent), (), (node,))


@_rule("mul")
def _mul(view: View, node: fx.Node, bound: Bound) -> Term | None:
    a, b = bound["input"], bound["other"]
    if is_tensor(a) and is_tensor(b):
        if _same(view, a, b):
            return Term("square", (a,), (), (node,))
        for x, gate in ((a, b), (b, a)):
            if (inner := _inner(view, gate, "sigmoid")) is None:
                continue
            if _same(view, x, inner.operands[0]):
                return Term("silu", (x,), (), (node, *inner.nodes))
            scaled = _inner(view, inner.operands[0], "mul")
            if scaled and 1.702 in scaled.operands:
                other = scaled.operands[1] if scaled.operands[0] == 1.702 else scaled.operands[0]
                if _same(view, x, other):
                    return Term("quick_gelu", (x,), (), (node, *inner.nodes, *scaled.nodes))
    return Term("mul", (a, b), (), (node,))


@_rule("div")
def _div(view: View, node: fx.Node, bound: Bound) -> Term | None:
    a, b = bound["input"], bound["other"]
    if bound["rounding_mode"] is not None:
        return None
    root = _inner(view, b, "sqrt") if is_tensor(b) else None
    if root and isinstance(a, (int, float)) and a == 1:
        return Term("rsqrt", root.operands, (), (node, *root.nodes))
    if root and is_tensor(a):
        return Term("mul", (a, Term("rsqrt", root.operands, (), root.nodes)), (), (node,))
    if is_tensor(a) and (total := _inner(view, a, "sum")) is not None and isinstance(b, int):
        dims, _ = total.attrs
        below = value(total.operands[0])
        if len(dims) == 1 and statically_known_true(below.shape[dims[0]] == b):
            return Term("mean", total.operands, total.attrs, (node, *total.nodes))
    if is_tensor(a) and isinstance(b, int) and (square := _inner(view, a, "square")) is not None:
        norm = _inner(view, square.operands[0], "vector_norm")
        if norm is not None and statically_known_true(value(norm.operands[0]).shape[norm.attrs[0][0]] == b):
            inside = Term("square", norm.operands, (), (*square.nodes, *norm.nodes))
            return Term("mean", (inside,), norm.attrs, (node,))
    return Term("div", (a, b), (), (node,))


@_rule("reciprocal")
def _reciprocal(view: View, node: fx.Node, bound: Bound) -> Term | None:
    root = _inner(view, bound["input"], "sqrt")
    if root:
        return Term("rsqrt", root.operands, (), (node, *root.nodes))
    return Term("reciprocal", (bound["input"],), (), (node,))


@_rule("add", "sub")
def _add(view: View, node: fx.Node, bound: Bound) -> Term | None:
    name = view.name(node)
    if bound["alpha"] != 1 or name is None:
        return None
    return Term(name, (bound["input"], bound["other"]), (), (node,))


@_rule("mean", "sum")
def _reduce(view: View, node: fx.Node, bound: Bound) -> Term | None:
    dims, name, x = bound["dim"], view.name(node), bound["input"]
    if not is_tensor(x) or value(x).dtype != value(node).dtype or name is None:
        return None
    rank = value(x).dim()
    dims = tuple(range(-rank, 0)) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    return Term(name, (x,), (tuple(sorted(_negative(d, rank) for d in dims)), bool(bound["keepdim"])), (node,))


@_rule("linalg_vector_norm", "norm")
def _vector_norm(view: View, node: fx.Node, bound: Bound) -> Term | None:
    order = bound.get("ord", bound.get("p"))
    dims, rank = bound["dim"], value(bound["input"]).dim()
    if order not in (2, 2.0, "fro") or dims is None or bound["dtype"] not in (None, value(node).dtype):
        return None
    dims = dims if isinstance(dims, tuple) else (dims,)
    if len(dims) != 1:
        return None
    return Term("vector_norm", (bound["input"],), (tuple(_negative(d, rank) for d in dims), bool(bound["keepdim"])), (node,))


@_rule("unsqueeze")
def _unsqueeze(view: View, node: fx.Node, bound: Bound) -> Term | None:
    x, dim = bound["input"], bound["dim"]
    if not isinstance(dim, int) or not is_tensor(x):
        return None
    dim = _negative(dim, value(x).dim() + 1)
    for op in REDUCTIONS:
        inner = _inner(view, x, op) if dim == -1 else None
        if inner and inner.attrs == ((-1,), False):
            return Term(op, inner.operands, ((-1,), True), (node, *inner.nodes))
    return Term("unsqueeze", (x,), (dim,), (node,))


@_rule("silu")
def _silu(view: View, node: fx.Node, bound: Bound) -> Term | None:
    return Term("silu", (bound["input"],), (), (node,))


@_rule("gelu")
def _gelu(view: View, node: fx.Node, bound: Bound) -> Term | None:
    return Term(f"gelu_{bound['approximate']}", (bound["input"],), (), (node,))


@_rule("rms_norm")
def _rms_norm(view: View, node: fx.Node, bound: Bound) -> Term | None:
    x, weight, eps = bound["input"], bound["weight"], bound["eps"]
    if not isinstance(bound["normalized_shape"], (tuple, list)) or len(bound["normalized_shape"]) != 1:
        return None
    if eps is None:
        eps = default_rms_norm_eps(value(x).dtype, value(x).device)
    return Term("rms_norm", (x, eps) if weight is None else (x, weight, eps), (), (node,))


@functools.cache
def default_rms_norm_eps(dtype: torch.dtype, device: torch.device) -> float:
    """What ``F.rms_norm`` adds when eps is None: the epsilon of the input's dtype or of float32, by torch version.
    Read off one call: for x much smaller than eps, ``x / rms_norm(x)`` is ``sqrt(eps)``."""
    x = torch.full((8,), 2.0**-13, dtype=dtype, device=device)
    measured = (x.double() / torch.nn.functional.rms_norm(x, (8,)).double()).square().mean().item() - 2.0**-26
    return min((torch.finfo(dtype).eps, torch.finfo(torch.float32).eps), key=lambda eps: abs(eps - measured))


@_rule("softmax", "log_softmax")
def _softmax(view: View, node: fx.Node, bound: Bound) -> Term | None:
    dim, x, name = bound["dim"], bound["input"], view.name(node)
    if not isinstance(dim, int) or not is_tensor(x) or name is None or value(x).dtype != value(node).dtype:
        return None  # with dtype= it is a cast and a softmax
    return Term(name, (x,), (_negative(dim, value(x).dim()),), (node,))


@_rule("cat", "stack")
def _cat(view: View, node: fx.Node, bound: Bound) -> Term | None:
    tensors, dim, name = bound["tensors"], bound["dim"], view.name(node)
    if not isinstance(tensors, tuple) or not isinstance(dim, int) or name is None:
        return None
    return Term(name, tensors, (_negative(dim, value(node).dim()),), (node,))


@_rule("flatten")
def _flatten(view: View, node: fx.Node, bound: Bound) -> Term | None:
    x, rank = bound["input"], value(bound["input"]).dim()
    start, end = _negative(bound["start_dim"], rank), _negative(bound["end_dim"], rank)
    return Term("flatten", (x,), (start, end), (node,))


@_rule("transpose")
def _transpose(view: View, node: fx.Node, bound: Bound) -> Term | None:
    rank = value(node).dim()
    return Term(
        "transpose",
        (bound["input"],),
        tuple(sorted((_negative(bound["dim0"], rank), _negative(bound["dim1"], rank)))),
        (node,),
    )


@_rule("narrow")
def _narrow(view: View, node: fx.Node, bound: Bound) -> Term | None:
    if not isinstance(bound["start"], int) or not isinstance(bound["length"], int):
        return None
    return _piece(bound["input"], bound["dim"], bound["start"], bound["start"] + bound["length"], 1, (node,))


@_rule("getitem")
def _getitem(view: View, node: fx.Node, bound: Bound) -> Term | None:
    x, index = bound["input"], bound["index"]
    if is_tensor(x):
        return _index(node, x, index)
    if isinstance(x, fx.Node) and isinstance(index, int):
        return _piece_of_tuple(view, node, x, index)
    return None


def _index(node: fx.Node, x: fx.Node, index: Any) -> Term | None:
    """``x[index]`` with one slice that cuts, or one new axis."""
    items = list(index) if isinstance(index, tuple) else [index]
    rank = value(x).dim()
    if Ellipsis in items:
        at = items.index(Ellipsis)
        taken = sum(item is not None for item in items) - 1
        items[at : at + 1] = [slice(None)] * (rank - taken)
    if not all(item is None or isinstance(item, slice) for item in items):
        return None
    new_axes = [i for i, item in enumerate(items) if item is None]
    cuts = [(i, item) for i, item in enumerate(i for i in items if i is not None) if item != slice(None)]
    if len(new_axes) == 1 and not cuts:
        return Term("unsqueeze", (x,), (_negative(new_axes[0], rank + 1),), (node,))
    if len(cuts) == 1 and not new_axes:
        dim, cut = cuts[0]
        return _piece(x, dim, cut.start, cut.stop, cut.step or 1, (node,))
    literal = tuple((i.start, i.stop, i.step) if isinstance(i, slice) else i for i in items)
    return None if any(isinstance(b, fx.Node) for i in literal if i for b in i) else Term("index", (x,), literal, (node,))


def _piece_of_tuple(view: View, node: fx.Node, x: fx.Node, index: int) -> Term | None:
    name = view.name(x)
    if name not in ("chunk", "split", "unbind"):
        return None
    bound = signatures.bind(name, x.args, dict(x.kwargs))
    if bound is None:
        return None
    tensor = bound["tensor"] if name == "split" else bound["input"]
    dim = bound["dim"]
    size = value(tensor).shape[dim]
    index = index % len(value(x)) if isinstance(value(x), (tuple, list)) else index
    if not isinstance(size, int) or not isinstance(dim, int):
        return None
    if name == "unbind":
        return Term("select", (tensor,), (_negative(dim, value(tensor).dim()), index), (node, x))
    if name == "chunk":
        step = -(-size // bound["chunks"])
        return _piece(tensor, dim, index * step, (index + 1) * step, 1, (node, x))
    sizes = view.constant(bound["split_size_or_sections"])
    if isinstance(sizes, int):
        return _piece(tensor, dim, index * sizes, (index + 1) * sizes, 1, (node, x))
    if not all(isinstance(s, int) for s in sizes):
        return None
    start = sum(sizes[:index])
    return _piece(tensor, dim, start, start + sizes[index], 1, (node, x))


def _piece(x: fx.Node, dim: int, start: Any, stop: Any, step: Any, nodes: tuple[fx.Node, ...]) -> Term | None:
    """A cut along one dim: ``part i of k`` where it is one, whatever the size; else a slice with literal bounds."""
    size = value(x).shape[dim]
    dim = _negative(dim, value(x).dim())
    if not isinstance(size, int) or not all(b is None or isinstance(b, int) for b in (start, stop, step)):
        return None
    start, stop, step = slice(start, stop, step).indices(size)
    length = stop - start
    if step == 1 and length > 0 and size % length == 0 and start % length == 0:
        return Term("part", (x,), (dim, start // length, size // length), nodes)
    if stop >= size:
        return Term("slice", (x,), (dim, start, "end", step), nodes)
    return Term("slice", (x,), (dim, start, stop, step), nodes)


def _reading_shape(view: View, node: fx.Node, name: str) -> Term | None:
    if name == "permute":
        dims = node.args[1:] if len(node.args) > 2 else node.args[1] if len(node.args) > 1 else node.kwargs.get("dims")
        rank = value(node).dim()
        if isinstance(dims, (tuple, list)) and all(isinstance(d, int) for d in dims):
            return Term("permute", (node.args[0],), tuple(_negative(d, rank) for d in dims), (node,))
        return None
    return Term(name, (node.args[0],), ("shape",), (node,)) if node.args else None


def symmetric(term: Term) -> bool:
    """Whether the first two operands may be swapped."""
    return term.op in _SYMMETRIC and len(term.operands) == 2


# -- GELU written out by hand -----------------------------------------------------------------------------------
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "square": lambda a: a * a,
    "neg": lambda a: -a,
    "tanh": torch.tanh,
    "erf": torch.erf,
}
_SAMPLES = torch.linspace(-6, 6, 61, dtype=torch.float64)
_GELUS = {
    f"gelu_{kind}": torch.nn.functional.gelu(_SAMPLES, approximate=kind)  # the values that identify each form
    for kind in ("none", "tanh")
}


def written_out_gelus(view: View, inner: fx.Node) -> dict[fx.Node, Term]:
    """GELUs around one ``tanh`` or ``erf`` node, however associated and whatever the spelling of their constants.

    The product above the node is a function of one tensor made of at most 12 arithmetic steps; it is evaluated in
    float64 at 61 points and compared with ``F.gelu``. Agreement to 1e-8 leaves room for the digits of a constant
    (0.7978845608 for sqrt(2/pi)) and for nothing else.
    """
    roots: list[fx.Node] = []
    above = [inner]
    for _ in range(4):
        above = [user for node in above for user in node.users]
        roots.extend(node for node in above if view.name(node) == "mul")
    for root in reversed(roots):
        leaves: set[fx.Node] = set()
        inside: dict[fx.Node, None] = {}
        if not _collect(view, root, leaves, inside) or inner not in inside:
            continue
        if len(leaves) != 1:
            continue
        leaf = leaves.pop()
        values = _evaluate(view, root, leaf)
        for name, expected in _GELUS.items():
            if torch.allclose(values, expected, rtol=0, atol=1e-8):
                return {root: Term(name, (leaf,), (), (root, *(n for n in inside if n is not root)))}
    return {}


def _collect(view: View, node: fx.Node, leaves: set[fx.Node], inside: dict[fx.Node, None]) -> bool:
    """The arithmetic nodes below ``node`` and the tensors they start from. False if it grows beyond one activation."""
    inside[node] = None
    for operand in view.term(node).operands:
        edge = view.edge(operand)
        if isinstance(edge.base, (int, float)):
            continue
        if not isinstance(edge.base, fx.Node) or not is_tensor(edge.base) or edge.roundings:
            return False
        term = view.term(edge.base)
        one_user = all(user in inside for user in edge.base.users)
        if term.op in _ARITHMETIC and (one_user or _is_power(term)) and len(inside) < 16:
            inside.update(dict.fromkeys((*edge.crossed, edge.base)))
            if not _collect(view, edge.base, leaves, inside):
                return False
        else:
            leaves.add(edge.base)
    return True


def _is_power(term: Term) -> bool:
    return term.op in ("square", "pow", "tanh", "erf")


def _evaluate(view: View, node: fx.Node, leaf: fx.Node) -> torch.Tensor:
    if node is leaf:
        return _SAMPLES
    term = view.term(node)
    bases = [view.edge(operand).base for operand in term.operands]
    return _ARITHMETIC[term.op](*(_evaluate(view, b, leaf) if isinstance(b, fx.Node) else b for b in bases))
