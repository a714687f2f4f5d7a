"""The normal forms: one rule a spelling family, from a call with bound arguments to its term.

A rule returns None for a call that it does not understand; the node is then an opaque leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph import signatures
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.terms import Term, is_tensor, negative_dim, value

if TYPE_CHECKING:
    from fx_fusion.graph.view import View

Bound = dict[str, Any]
REDUCTIONS = ("mean", "sum")
RULES: dict[str, Callable[[View, fx.Node, Bound], Term | None]] = {}


def _rule(*names: str) -> Callable[..., Any]:
    def add(function: Callable[[View, fx.Node, Bound], Term | None]) -> Callable[[View, fx.Node, Bound], Term | None]:
        for name in names:
            RULES[name] = function
        return function

    return add


def inner_term(view: View, operand: Any, op: str) -> Term | None:
    """The term behind an operand, if it is ``op`` and no cast on the way rounds."""
    edge = view.edge(operand)
    if not isinstance(edge.base, fx.Node) or edge.roundings:
        return None
    term = view.term(edge.base)
    return Term(term.op, term.operands, term.attrs, (*edge.crossed, *term.nodes)) if term.op == op else None


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
        if view.same_source(a, b):
            return Term("square", (a,), (), (node,))
        for x, gate in ((a, b), (b, a)):
            if (inner := inner_term(view, gate, "sigmoid")) is None:
                continue
            if view.same_source(x, inner.operands[0]):
                return Term("silu", (x,), (), (node, *inner.nodes))
            scaled = inner_term(view, inner.operands[0], "mul")
            if scaled and 1.702 in scaled.operands:
                other = scaled.operands[1] if scaled.operands[0] == 1.702 else scaled.operands[0]
                if view.same_source(x, other):
                    return Term("quick_gelu", (x,), (), (node, *inner.nodes, *scaled.nodes))
    return Term("mul", (a, b), (), (node,))


@_rule("div")
def _div(view: View, node: fx.Node, bound: Bound) -> Term | None:
    a, b = bound["input"], bound["other"]
    if bound["rounding_mode"] is not None:
        return None
    root = inner_term(view, b, "sqrt") if is_tensor(b) else None
    if root and isinstance(a, (int, float)) and a == 1:
        return Term("rsqrt", root.operands, (), (node, *root.nodes))
    if root and is_tensor(a):
        return Term("mul", (a, Term("rsqrt", root.operands, (), root.nodes)), (), (node,))
    if is_tensor(a) and (total := inner_term(view, a, "sum")) is not None and isinstance(b, int):
        dims, _ = total.attrs
        below = value(total.operands[0])
        if len(dims) == 1 and statically_known_true(below.shape[dims[0]] == b):
            return Term("mean", total.operands, total.attrs, (node, *total.nodes))
    if is_tensor(a) and isinstance(b, int) and (square := inner_term(view, a, "square")) is not None:
        norm = inner_term(view, square.operands[0], "vector_norm")
        if norm is not None and statically_known_true(value(norm.operands[0]).shape[norm.attrs[0][0]] == b):
            inside = Term("square", norm.operands, (), (*square.nodes, *norm.nodes))
            return Term("mean", (inside,), norm.attrs, (node,))
    return Term("div", (a, b), (), (node,))


@_rule("reciprocal")
def _reciprocal(view: View, node: fx.Node, bound: Bound) -> Term | None:
    root = inner_term(view, bound["input"], "sqrt")
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
    return Term(name, (x,), (tuple(sorted(negative_dim(d, rank) for d in dims)), bool(bound["keepdim"])), (node,))


@_rule("linalg_vector_norm", "norm")
def _vector_norm(view: View, node: fx.Node, bound: Bound) -> Term | None:
    order = bound.get("ord", bound.get("p"))
    dims, rank = bound["dim"], value(bound["input"]).dim()
    if order not in (2, 2.0, "fro") or dims is None or bound["dtype"] not in (None, value(node).dtype):
        return None
    dims = dims if isinstance(dims, tuple) else (dims,)
    if len(dims) != 1:
        return None
    return Term(
        "vector_norm", (bound["input"],), (tuple(negative_dim(d, rank) for d in dims), bool(bound["keepdim"])), (node,)
    )


@_rule("unsqueeze")
def _unsqueeze(view: View, node: fx.Node, bound: Bound) -> Term | None:
    x, dim = bound["input"], bound["dim"]
    if not isinstance(dim, int) or not is_tensor(x):
        return None
    dim = negative_dim(dim, value(x).dim() + 1)
    for op in REDUCTIONS:
        inner = inner_term(view, x, op) if dim == -1 else None
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


@_rule("layer_norm")
def _layer_norm(view: View, node: fx.Node, bound: Bound) -> Term | None:
    if not isinstance(bound["normalized_shape"], (tuple, list)) or len(bound["normalized_shape"]) != 1:
        return None
    return _affine_norm("layer_norm", node, (bound["input"],), bound)


@_rule("group_norm")
def _group_norm(view: View, node: fx.Node, bound: Bound) -> Term | None:
    return _affine_norm("group_norm", node, (bound["input"], bound["num_groups"]), bound)


def _affine_norm(name: str, node: fx.Node, first: tuple[Any, ...], bound: Bound) -> Term:
    given = tuple(p for p in ("weight", "bias") if bound[p] is not None)
    return Term(name, (*first, *(bound[p] for p in given), bound["eps"]), given, (node,))


@_rule("var")
def _var(view: View, node: fx.Node, bound: Bound) -> Term | None:
    dims, unbiased, x = bound["dim"], bound["unbiased"], bound["input"]
    if isinstance(dims, bool):  # torch.var(x, unbiased)
        dims, unbiased = None, dims
    correction = bound["correction"] if bound["correction"] is not None else 1 if unbiased is None else int(unbiased)
    rank = value(x).dim()
    dims = tuple(range(-rank, 0)) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    dims = tuple(sorted(negative_dim(d, rank) for d in dims))
    return Term("var", (x,), (dims, bool(bound["keepdim"]), correction), (node,))


@functools.cache
def default_rms_norm_eps(dtype: torch.dtype, device: torch.device) -> float:
    """What ``F.rms_norm`` adds when eps is None: the epsilon of the input's dtype or of float32, by torch version.
    Read off one call: for x much smaller than eps, ``x / rms_norm(x)`` is ``sqrt(eps)``."""
    x = torch.full((8,), 2.0**-13, dtype=dtype, device="cpu" if device.type == "meta" else device)
    measured = (x.double() / torch.nn.functional.rms_norm(x, (8,)).double()).square().mean().item() - 2.0**-26
    return min((torch.finfo(dtype).eps, torch.finfo(torch.float32).eps), key=lambda eps: abs(eps - measured))


@_rule("softmax", "log_softmax")
def _softmax(view: View, node: fx.Node, bound: Bound) -> Term | None:
    dim, x, name = bound["dim"], bound["input"], view.name(node)
    if not isinstance(dim, int) or not is_tensor(x) or name is None or not keeps_values(value(x).dtype, value(node).dtype):
        return None  # with a narrower dtype= it is a cast and a softmax
    return Term(name, (x,), (negative_dim(dim, value(x).dim()),), (node,))


@_rule("cat", "stack")
def _cat(view: View, node: fx.Node, bound: Bound) -> Term | None:
    tensors, dim, name = bound["tensors"], bound["dim"], view.name(node)
    if not isinstance(tensors, tuple) or not isinstance(dim, int) or name is None:
        return None
    return Term(name, tensors, (negative_dim(dim, value(node).dim()),), (node,))


@_rule("flatten")
def _flatten(view: View, node: fx.Node, bound: Bound) -> Term | None:
    x, rank = bound["input"], value(bound["input"]).dim()
    start, end = negative_dim(bound["start_dim"], rank), negative_dim(bound["end_dim"], rank)
    return Term("flatten", (x,), (start, end), (node,))


@_rule("transpose")
def _transpose(view: View, node: fx.Node, bound: Bound) -> Term | None:
    rank = value(node).dim()
    return Term(
        "transpose",
        (bound["input"],),
        tuple(sorted((negative_dim(bound["dim0"], rank), negative_dim(bound["dim1"], rank)))),
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
        return Term("unsqueeze", (x,), (negative_dim(new_axes[0], rank + 1),), (node,))
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
        return Term("select", (tensor,), (negative_dim(dim, value(tensor).dim()), index), (node, x))
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
    dim = negative_dim(dim, value(x).dim())
    if not isinstance(size, int) or not all(b is None or isinstance(b, int) for b in (start, stop, step)):
        return None
    start, stop, step = slice(start, stop, step).indices(size)
    length = stop - start
    if step == 1 and length > 0 and size % length == 0 and start % length == 0:
        return Term("part", (x,), (dim, start // length, size // length), nodes)
    if stop >= size:
        return Term("slice", (x,), (dim, start, "end", step), nodes)
    return Term("slice", (x,), (dim, start, stop, step), nodes)


def reading_shape(view: View, node: fx.Node, name: str) -> Term | None:
    if name == "permute":
        dims = node.args[1:] if len(node.args) > 2 else node.args[1] if len(node.args) > 1 else node.kwargs.get("dims")
        rank = value(node).dim()
        if isinstance(dims, (tuple, list)) and all(isinstance(d, int) for d in dims):
            return Term("permute", (node.args[0],), tuple(negative_dim(d, rank) for d in dims), (node,))
        return None
    if not node.args:
        return None
    x = node.args[0]
    if is_tensor(x) and view.name(x) == "stack":  # puts its members side by side in the last dim, whatever it is called
        before, after = value(x).shape, value(node).shape
        merged = (*before[:-2], before[-2] * before[-1])
        if len(merged) == len(after) and all(statically_known_true(a == b) for a, b in zip(merged, after, strict=True)):
            return Term("flatten", (x,), (-2, -1), (node,))
    return Term("view" if name == "reshape" else name, (x,), ("shape",), (node,))


@_rule("unflatten")
def _unflatten(view: View, node: fx.Node, bound: Bound) -> Term | None:
    return Term("view", (bound["input"],), ("shape",), (node,))


def plain(name: str, node: fx.Node, bound: dict[str, Any]) -> Term:
    operands = tuple(v for v in bound.values() if isinstance(v, (fx.Node, int, float)) and not isinstance(v, bool))
    attrs = tuple((k, v) for k, v in bound.items() if not isinstance(v, (fx.Node, int, float)) or isinstance(v, bool))
    return Term(name, operands, attrs, (node,))
