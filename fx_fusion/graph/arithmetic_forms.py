"""Normal forms of arithmetic, reductions and activations."""

from __future__ import annotations

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.forms import Bound, Rules, inner_term, multiplied_and_summed
from fx_fusion.graph.gelu import written_out_gelu
from fx_fusion.graph.terms import Reader, Term, example, is_tensor, negative_dim

RULES = Rules()


@RULES.of("pow")
def _pow(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    x, exponent = bound["input"], bound["exponent"]
    if exponent == 2:
        return Term("square", (x,), (), (node,))
    if exponent == 0.5:
        return Term("sqrt", (x,), (), (node,))
    if exponent == -0.5:
        return Term("rsqrt", (x,), (), (node,))
    return Term("pow", (x, exponent), (), (node,))


@RULES.of("mul")
def _mul(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
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
    return written_out_gelu(view, node, a, b) or Term("mul", (a, b), (), (node,))


@RULES.of("div")
def _div(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    a, b = bound["input"], bound["other"]
    if bound["rounding_mode"] is not None:
        return None
    if (logistic := _logistic(view, node, a, b)) is not None:
        return logistic
    root = inner_term(view, b, "sqrt") if is_tensor(b) else None
    if root and isinstance(a, (int, float)) and a == 1:
        return Term("rsqrt", root.operands, (), (node, *root.nodes))
    if root and is_tensor(a):
        return Term("mul", (a, Term("rsqrt", root.operands, (), root.nodes)), (), (node,))
    count = int(b) if isinstance(b, float) and b.is_integer() else b
    if is_tensor(a) and (total := inner_term(view, a, "sum")) is not None and isinstance(count, int):
        dims, _ = total.attrs
        summed = total.operands[0]
        below = example(summed.operands[0] if isinstance(summed, Term) else summed)
        if len(dims) == 1 and statically_known_true(below.shape[dims[0]] == count):
            return Term("mean", total.operands, total.attrs, (node, *total.nodes))
    if is_tensor(a) and isinstance(count, int) and (square := inner_term(view, a, "square")) is not None:
        norm = inner_term(view, square.operands[0], "vector_norm")
        if norm is not None and statically_known_true(example(norm.operands[0]).shape[norm.attrs[0][0]] == count):
            inside = Term("square", norm.operands, (), (*square.nodes, *norm.nodes))
            return Term("mean", (inside,), norm.attrs, (node,))
    return Term("div", (a, b), (), (node,))


def _logistic(view: Reader, node: fx.Node, a: object, b: object) -> Term | None:
    """``1 / (1 + exp(-x))`` is sigmoid(x), ``x / (1 + exp(-x))`` is silu(x)."""
    total = inner_term(view, b, "add") if is_tensor(b) else None
    if total is None or not any(isinstance(o, (int, float)) and o == 1 for o in total.operands):
        return None
    one_first = isinstance(total.operands[0], (int, float))
    power = inner_term(view, total.operands[1 if one_first else 0], "exp")
    negative = None if power is None else inner_term(view, power.operands[0], "neg")
    if power is None or negative is None or not is_tensor(negative.operands[0]):
        return None
    nodes = (node, *total.nodes, *power.nodes, *negative.nodes)
    if isinstance(a, (int, float)) and a == 1:
        return Term("sigmoid", negative.operands, (), nodes)
    return Term("silu", (a,), (), nodes) if is_tensor(a) and view.same_source(a, negative.operands[0]) else None


@RULES.of("reciprocal")
def _reciprocal(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    root = inner_term(view, bound["input"], "sqrt")
    if root:
        return Term("rsqrt", root.operands, (), (node, *root.nodes))
    return Term("reciprocal", (bound["input"],), (), (node,))


@RULES.of("add", "sub")
def _add(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    name = view.name(node)
    if bound["alpha"] != 1 or name is None:
        return None
    a, b = bound["input"], bound["other"]
    if name == "add" and is_tensor(a) and is_tensor(b):
        squares = _mean_of_squares(view, node, a, b) or _mean_of_squares(view, node, b, a)
        if squares is not None:
            return squares
    return Term(name, (bound["input"], bound["other"]), (), (node,))


@RULES.of("addcmul")
def _addcmul(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    ops = {1: "add", -1: "sub"}
    value = bound["value"]
    if not isinstance(value, (int, float)) or value not in ops:
        return None
    product = Term("mul", (bound["tensor1"], bound["tensor2"]), (), (node,))
    return Term(ops[int(value)], (bound["input"], product), (), (node,))


def with_a_sign_moved(view: Reader, term: Term) -> Term | None:
    """Return ``a + (-b)`` as ``a - b`` and ``a - (-b)`` as ``a + b``, the same numbers; None if no operand is negative."""
    if term.op not in ("add", "sub"):
        return None
    a, b = term.operands
    if (opposite := _opposite(view, b)) is not None:
        return Term("sub" if term.op == "add" else "add", (a, opposite[0]), (), (*term.nodes, *opposite[1]))
    if term.op == "add" and (opposite := _opposite(view, a)) is not None:
        return Term("sub", (b, opposite[0]), (), (*term.nodes, *opposite[1]))
    return None


def _opposite(view: Reader, operand: object) -> tuple[object, tuple[fx.Node, ...]] | None:
    """Return the positive form of ``-b``, ``(-b) * c`` or ``b * (-c)``, and the ``neg`` nodes above it; else None."""
    if (negative := inner_term(view, operand, "neg")) is not None:
        return negative.operands[0], negative.nodes
    product = inner_term(view, operand, "mul")
    for i, factor in enumerate(() if product is None else product.operands):
        if product is not None and (negative := inner_term(view, factor, "neg")) is not None:
            factors = (*product.operands[:i], negative.operands[0], *product.operands[i + 1 :])
            return Term("mul", factors, (), (*product.nodes, *negative.nodes)), ()
    return None


def _mean_of_squares(view: Reader, node: fx.Node, spread: fx.Node, level: fx.Node) -> Term | None:
    """``var(x) + mean(x)²``, the variance of all that is there (correction 0)."""
    var, square = inner_term(view, spread, "var"), inner_term(view, level, "square")
    mean = None if square is None else inner_term(view, square.operands[0], "mean")
    if var is None or square is None or mean is None or var.attrs[2] != 0 or var.attrs[:2] != mean.attrs:
        return None
    if not view.same_source(var.operands[0], mean.operands[0]):
        return None
    inside = Term("square", mean.operands, (), (*square.nodes, *mean.nodes))
    return Term("mean", (inside,), mean.attrs, (node, *var.nodes))


@RULES.of("mean", "sum")
def _reduce(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    name = view.name(node)
    return None if name is None else reduction(name, node, bound)


def reduction(name: str, node: fx.Node, bound: Bound) -> Term | None:
    """The term of a mean or sum over some dims."""
    dims, x = bound["dim"], bound["input"]
    if not is_tensor(x) or example(x).dtype != example(node).dtype:
        return None
    rank = example(x).dim()
    dims = tuple(range(-rank, 0)) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    return Term(name, (x,), (tuple(sorted(negative_dim(d, rank) for d in dims)), bool(bound["keepdim"])), (node,))


@RULES.of("einsum")
def _sum_of_squares(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    """``einsum("...d,...d->...", x, x)``."""
    operands = multiplied_and_summed(bound)
    if not operands or not view.same_source(*operands) or example(node).dtype != example(operands[0]).dtype:
        return None
    return Term("sum", (Term("square", (operands[0],), (), (node,)),), ((-1,), False), (node,))


@RULES.of("linalg_vector_norm", "norm")
def _vector_norm(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    order = bound.get("ord", bound.get("p"))
    dims, rank = bound["dim"], example(bound["input"]).dim()
    if order not in (2, 2.0, "fro") or dims is None or bound["dtype"] not in (None, example(node).dtype):
        return None
    dims = dims if isinstance(dims, tuple) else (dims,)
    if len(dims) != 1:
        return None
    return Term(
        "vector_norm", (bound["input"],), (tuple(negative_dim(d, rank) for d in dims), bool(bound["keepdim"])), (node,)
    )


@RULES.of("var")
def _var(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    dims, unbiased, x = bound["dim"], bound["unbiased"], bound["input"]
    if isinstance(dims, bool):  # torch.var(x, unbiased)
        dims, unbiased = None, dims
    correction = bound["correction"] if bound["correction"] is not None else 1 if unbiased is None else int(unbiased)
    rank = example(x).dim()
    dims = tuple(range(-rank, 0)) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    dims = tuple(sorted(negative_dim(d, rank) for d in dims))
    return Term("var", (x,), (dims, bool(bound["keepdim"]), correction), (node,))


@RULES.of("softmax", "log_softmax")
def _softmax(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    dim, x, name = bound["dim"], bound["input"], view.name(node)
    if not isinstance(dim, int) or not is_tensor(x) or name is None:
        return None
    if not keeps_values(example(x).dtype, example(node).dtype):
        return None  # with a narrower dtype= it is a cast and a softmax
    return Term(name, (x,), (negative_dim(dim, example(x).dim()),), (node,))


@RULES.of("silu")
def _silu(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    return Term("silu", (bound["input"],), (), (node,))


@RULES.of("gelu")
def _gelu(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    return Term(f"gelu_{bound['approximate']}", (bound["input"],), (), (node,))
