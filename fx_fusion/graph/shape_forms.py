"""Normal forms of views, slices and pieces."""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_fusion.graph import arithmetic_forms, norm_forms
from fx_fusion.graph.forms import Bound, Rules, inner_term, plain
from fx_fusion.graph.indices import Index, index_of
from fx_fusion.graph.terms import Reader, Term, example, is_tensor, negative_dim, same_sizes

RULES = Rules()
REDUCTIONS = ("mean", "sum")


@RULES.of("unsqueeze")
def _unsqueeze(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    x, dim = bound["input"], bound["dim"]
    if not isinstance(dim, int) or not is_tensor(x):
        return None
    dim = negative_dim(dim, example(x).dim() + 1)
    for op in REDUCTIONS:
        inner = inner_term(view, x, op) if dim == -1 else None
        if inner and inner.attrs == ((-1,), False):
            return Term(op, inner.operands, ((-1,), True), (node, *inner.nodes))
    return Term("unsqueeze", (x,), (dim,), (node,))


@RULES.of("cat", "stack")
def _cat(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    tensors, dim, name = bound["tensors"], bound["dim"], view.name(node)
    if not isinstance(tensors, tuple) or not isinstance(dim, int) or name is None:
        return None
    dim = negative_dim(dim, example(node).dim())
    return (_swapped(view, node, tensors, dim) if name == "cat" else None) or Term(name, tensors, (dim,), (node,))


def _swapped(view: Reader, node: fx.Node, tensors: tuple[Any, ...], dim: int) -> Term | None:
    """Return the term of a tensor's second half and its first one: the tensor is rolled by half."""
    halves = [half for t in tensors if (half := inner_term(view, t, "part")) is not None]
    if len(tensors) != 2 or [half.attrs for half in halves] != [(dim, 1, 2), (dim, 0, 2)]:
        return None
    second, first = halves
    same = view.same_source(first.operands[0], second.operands[0])
    return Term("roll", first.operands, (dim, "half"), (node, *second.nodes, *first.nodes)) if same else None


@RULES.of("roll")
def _roll(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    x = bound["input"]
    shift, dim = (b[0] if isinstance(b, tuple) and len(b) == 1 else b for b in (bound["shifts"], bound["dims"]))
    size = example(x).shape[dim] if isinstance(shift, int) and isinstance(dim, int) else None
    if not isinstance(size, int) or size == 0 or 2 * (shift % size) != size:
        return plain("roll", node, bound)
    return Term("roll", (x,), (negative_dim(dim, example(x).dim()), "half"), (node,))


@RULES.of("flatten")
def _flatten(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    x, rank = bound["input"], example(bound["input"]).dim()
    start, end = negative_dim(bound["start_dim"], rank), negative_dim(bound["end_dim"], rank)
    if (start, end) == (-2, -1) and (joined := _joined(view, node, x)) is not None:
        return joined
    return Term("flatten", (x,), (start, end), (node,))


def _joined(view: Reader, node: fx.Node, x: fx.Node) -> Term | None:
    """A stack over the last dim but one, whose last two dims become one: its members behind each other."""
    stack = inner_term(view, x, "stack")
    if stack is None or stack.attrs != (-2,):
        return None
    return Term("cat", stack.operands, (-1,), (node, *stack.nodes))


@RULES.of("transpose")
def _transpose(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    rank = example(node).dim()
    return Term(
        "transpose",
        (bound["input"],),
        tuple(sorted((negative_dim(bound["dim0"], rank), negative_dim(bound["dim1"], rank)))),
        (node,),
    )


@RULES.of("mT", "T")
def _matrix_transpose(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    is_matrix = bound["name"] == "mT" or example(bound["input"]).dim() == 2  # .T turns all dims around
    return Term("transpose", (bound["input"],), (-2, -1), (node,)) if is_matrix else None


@RULES.of("narrow")
def _narrow(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    x, dim, start, length = bound["input"], bound["dim"], bound["start"], bound["length"]
    if not isinstance(start, int) or not isinstance(length, int) or not isinstance(dim, int):
        return None
    if start < 0:  # counted from the end
        size = example(x).shape[dim]
        start += size if isinstance(size, int) else 0
    return None if start < 0 else _piece(x, dim, start, start + length, 1, (node,))


@RULES.of("getitem")
def _getitem(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    x, index = bound["input"], bound["index"]
    if is_tensor(x):
        # Folding makes a tuple of a list, and `x[[0, 1]]` is not `x[0, 1]`.
        unfolded = (view.arguments(node) or {}).get("index")
        return None if isinstance(unfolded, list) else _index(view, node, x, index)
    if isinstance(x, fx.Node) and isinstance(index, int):
        return _piece_of_tuple(view, node, x, index)
    return None


def _index(view: Reader, node: fx.Node, x: fx.Node, index: Any) -> Term | None:
    """Return the term of ``x[index]``. A single slice, integer or new axis has a term of its own; several are literals."""
    rank = example(x).dim()
    read = index_of(index, rank)
    if read is None or not read.is_view:
        return None
    new_axes, cuts, picks = read.new_axes, read.cuts, read.picks
    if len(new_axes) + len(cuts) + len(picks) == 1:
        if new_axes:
            return _unsqueeze(view, node, {"input": x, "dim": new_axes[0]})
        if picks:
            return _member(view, x, *picks[0], (node,))
        dim, cut = cuts[0]
        rolled = _of_rolled(view, node, x, dim, cut)
        return rolled or _piece(x, dim, cut.start, cut.stop, cut.step or 1, (node,))
    return _literal_index(node, x, read)


def _literal_index(node: fx.Node, x: fx.Node, index: Index) -> Term | None:
    if any(_from_the_front(x, dim, i) is None for dim, i in index.picks):
        return None
    literal: list[Any] = []
    dim = 0
    for item in index.items:
        cut = (item.start, item.stop, item.step) if isinstance(item, slice) else ()
        if any(isinstance(bound, fx.Node) for bound in cut):
            return None
        literal.append(None if item is None else cut or _from_the_front(x, dim, item))
        dim += item is not None
    return Term("index", (x,), tuple(literal), (node,))


@RULES.of("select")
def _select(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    dim, index = bound["dim"], bound["index"]
    return _member(view, bound["input"], dim, index, (node,)) if isinstance(dim, int) and isinstance(index, int) else None


@RULES.of("squeeze")
def _squeeze(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    """Read ``x.narrow(dim, i, 1).squeeze(dim)`` as ``x.select(dim, i)``."""
    x, dim = bound["input"], bound["dim"]
    piece = inner_term(view, x, "part") if isinstance(dim, int) else None
    if piece is None or piece.attrs[0] != negative_dim(dim, example(x).dim()) or example(x).shape[dim] != 1:
        return plain("squeeze", node, bound)
    return _member(view, piece.operands[0], dim, piece.attrs[1], (node, *piece.nodes))


def _member(view: Reader, x: fx.Node, dim: int, index: int, nodes: tuple[fx.Node, ...]) -> Term | None:
    """Return the term of one index along a dim, without that dim; None if the index is out of range."""
    dim, counted = negative_dim(dim, example(x).dim()), _from_the_front(x, dim, index)
    if counted is None:
        return None
    return _of_split_columns(view, x, dim, counted, nodes) or Term("select", (x,), (dim, counted), nodes)


def _from_the_front(x: fx.Node, dim: int, index: int) -> int | None:
    """Return an index counted from the front, unchanged along a dim of symbolic size; None if it is out of range."""
    size = example(x).shape[dim]
    if not isinstance(size, int):
        return index
    return index % size if -size <= index < size else None


def _piece_of_tuple(view: Reader, node: fx.Node, x: fx.Node, index: int) -> Term | None:
    name = view.name(x)
    if name in ("var_mean", "native_layer_norm"):
        return _statistic(view, node, x, index)
    if name not in ("chunk", "split", "unbind"):
        return None
    bound = view.arguments(x)
    if bound is None:
        return None
    tensor = bound["tensor"] if name == "split" else bound["input"]
    dim = bound["dim"]
    size = example(tensor).shape[dim]
    index = index % len(example(x)) if isinstance(example(x), (tuple, list)) else index
    if not isinstance(size, int) or not isinstance(dim, int):
        return None
    if name == "unbind":
        return _member(view, tensor, dim, index, (node, x))
    if name == "chunk":
        if not isinstance(chunks := view.folded(bound["chunks"]), int):
            return None
        step = -(-size // chunks)
        return _piece(tensor, dim, index * step, (index + 1) * step, 1, (node, x))
    sizes = view.folded(bound["split_size_or_sections"])
    if isinstance(sizes, int):
        return _piece(tensor, dim, index * sizes, (index + 1) * sizes, 1, (node, x))
    if not isinstance(sizes, tuple) or not all(isinstance(s, int) for s in sizes):
        return None
    start = sum(sizes[:index])
    return _piece(tensor, dim, start, start + sizes[index], 1, (node, x))


def _of_split_columns(view: Reader, x: fx.Node, dim: int, index: int, nodes: tuple[fx.Node, ...]) -> Term | None:
    """One of the two dims that a view made of the last one, at an index: every so many columns, or a part of them."""
    below = x.args[0] if x.args and view.name(x) in ("view", "reshape", "unflatten") else None
    if not is_tensor(below) or example(below).dim() != example(x).dim() - 1 or dim not in (-1, -2):  # type: ignore[arg-type]
        return None
    before, after = example(below).shape, example(x).shape
    if not isinstance(after[-1], int) or not isinstance(after[-2], int) or before[-1] != after[-2] * after[-1]:
        return None
    if not same_sizes(before[:-1], after[:-2]):
        return None
    if dim == -1:
        return _piece(below, -1, index, None, after[-1], (*nodes, x))  # type: ignore[arg-type]
    return _piece(below, -1, index * after[-1], (index + 1) * after[-1], 1, (*nodes, x))  # type: ignore[arg-type]


def _of_rolled(view: Reader, node: fx.Node, x: fx.Node, dim: int, cut: slice) -> Term | None:
    """A cut of ``roll(x)`` that does not go around the end, as a cut of x."""
    bound = view.arguments(x) if view.name(x) == "roll" else None
    size = example(x).shape[dim]
    if bound is None or not isinstance(size, int) or not isinstance(bound["shifts"], int) or cut.step not in (None, 1):
        return None
    if not isinstance(bound["dims"], int) or bound["dims"] % example(x).dim() != dim or size == 0:
        return None
    if not all(b is None or isinstance(b, int) for b in (cut.start, cut.stop)):
        return None
    start, stop, _ = cut.indices(size)
    first = (start - bound["shifts"]) % size
    last = first + stop - start
    return _piece(bound["input"], dim, first, last, 1, (node, x)) if start < stop and last <= size else None


def _statistic(view: Reader, node: fx.Node, x: fx.Node, index: int) -> Term | None:
    """One result of a call that returns several, as the call that returns it alone."""
    bound = view.arguments(x)
    if bound is None:
        return None
    bound = {name: view.folded(item) for name, item in bound.items()}
    if view.name(x) == "native_layer_norm":
        term = norm_forms.RULES["layer_norm"](view, node, dict(bound)) if index == 0 else None
    elif index == 0:
        term = arithmetic_forms.RULES["var"](view, node, dict(bound))
    else:
        of_mean = {"input": bound["input"], "dim": bound["dim"], "keepdim": bound["keepdim"]}
        term = None if isinstance(bound["dim"], bool) else arithmetic_forms.reduction("mean", node, of_mean)
    return None if term is None else Term(term.op, term.operands, term.attrs, (*term.nodes, x))


def _piece(x: fx.Node, dim: int, start: Any, stop: Any, step: Any, nodes: tuple[fx.Node, ...]) -> Term | None:
    """A cut along one dim: ``part i of k`` where it is one, whatever the size; else a slice with literal bounds."""
    size = example(x).shape[dim]
    dim = negative_dim(dim, example(x).dim())
    if not isinstance(size, int) or not all(b is None or isinstance(b, int) for b in (start, stop, step)):
        return None
    start, stop, step = slice(start, stop, step).indices(size)
    length = stop - start
    if step == 1 and length > 0 and size % length == 0 and start % length == 0:
        return Term("part", (x,), (dim, start // length, size // length), nodes)
    if stop >= size:
        return Term("slice", (x,), (dim, start, "end", step), nodes)
    return Term("slice", (x,), (dim, start, stop, step), nodes)


@RULES.of("unflatten")
def _unflatten(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    return Term("view", (bound["input"],), ("shape",), (node,))


@RULES.of("view", "reshape", "expand", "to", "type")
def _shape(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    """A call whose shape is read off its example; ``reshape`` is ``view``."""
    name, x = view.name(node), bound["input"]
    if name is None:
        return None
    if is_tensor(x) and view.name(x) == "stack" and example(x).dim() > 1:
        # Puts its members side by side in the last dim, whatever the call is named.
        before, after = example(x).shape, example(node).shape
        if same_sizes((*before[:-2], before[-2] * before[-1]), after):
            return _joined(view, node, x) or Term("flatten", (x,), (-2, -1), (node,))
    return Term("view" if name == "reshape" else name, (x,), ("shape",), (node,))


@RULES.of("permute")
def _permute(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    dims = bound["dims"][0] if len(bound["dims"]) == 1 else bound["dims"] or bound["keywords"].get("dims")
    if not isinstance(dims, tuple) or not all(isinstance(d, int) for d in dims):
        return None
    return Term("permute", (bound["input"],), tuple(negative_dim(d, example(node).dim()) for d in dims), (node,))
