"""The gradient of a graph's number with respect to the seams of a region, where it is known before they are computed.

The *tail* is the graph from the seams to a number that all their gradients come through: a mean, a sum over a mask. Its
gradient is traced. If that reads no value of a seam, the op can compute the gradients of the logits in its forward. The
upstream gradient of the number, whatever is made of it, is then one factor of all of them. Of several such numbers the
last is taken.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.fusion.match import Match
from fx_fusion.graph.rows_of_logits.finder import LINEAR
from fx_fusion.graph.rows_of_logits.values import Made, Region, Seam, is_plain_call
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.rewrite.editor import Editor
from fx_fusion.torch_internals.aten import draws, is_overload, mutates
from fx_fusion.torch_internals.containers import map_nodes, tree_leaves, tree_map
from fx_fusion.torch_internals.standalone import traced_gradient

aten = torch.ops.aten
# What reads the shape of a tensor, and no value.
_SHAPES = {aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int}


def cotangents_of(
    editor: Editor, match: Match, region: Region, shaped: Callable[[Seam], fx.Node], at: fx.Node
) -> tuple[list[fx.Node], bool] | None:  # fmt: skip
    """Return a cotangent for each seam, for a gradient of 1 of the graph's number, inserted at the insertion point, and
    whether rows may be left out whose cotangents are 0, because nothing but that number depends on them.

    Returns None where there is no such number, or where the gradient of each reads values that are computed later.

    Args:
        shaped: returns a new tensor without values of a seam's shape in the body: (rows, ..).
        at: the node before which the op is inserted.
    """
    for number in reversed(_numbers(editor, match)):
        found = _of_number(editor, match, region, number, shaped, at)
        if found is not None:
            return found
    return None


def _of_number(
    editor: Editor, match: Match, region: Region, number: fx.Node, shaped: Callable[[Seam], fx.Node], at: fx.Node
) -> tuple[list[fx.Node], bool] | None:  # fmt: skip
    """Return the cotangents of the seams for a gradient of 1 of one number, and whether rows may be left out."""
    nodes = _tail(editor, match, region, number)
    if nodes is None:
        return None
    skips, tail = _is_linear(editor, region, match, nodes, number), tuple(node.name for node in nodes)
    nodes, operands = _with_what_comes_later(editor, match, region, nodes, at)
    if any(not is_tensor(n) or _is_written(editor, n) for n in operands):
        return None
    known = {n: i for i, n in enumerate(operands)}

    def run(seams: list[Tensor], given: list[Tensor]) -> Tensor:
        values = {n: given[i] for n, i in known.items()}
        rows = dict(zip(region.seams, seams, strict=True))
        made: dict[Made, Any] = {}

        def again(how: Any) -> Any:
            if isinstance(how, fx.Node):
                return values[how]
            if isinstance(how, Seam):
                return rows[how].reshape(how.tensor.shape)
            if how not in made:
                args, kwargs = tree_map(operand, (how.args, how.kwargs))
                made[how] = how.op(*args, **kwargs)
            return made[how] if how.item is None else made[how][how.item]

        def operand(item: Any) -> Any:
            if isinstance(item, Tensor):
                item = region.made_by(item)
            return again(item) if isinstance(item, (Seam, Made, fx.Node)) else item

        for node, how in {**region.ends, **region.rest}.items():
            values[node] = again(how)
        for node in nodes:
            args, kwargs = map_nodes(lambda n: values[n] if n in values else example(n), (node.args, node.kwargs))
            target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            values[node] = target(*args, **kwargs)
        return values[number]

    examples = [_flat(seam) for seam in region.seams]
    gradient = traced_gradient(run, examples, [example(n).detach() for n in operands])
    if gradient is None:
        return None
    cotangents = _inserted(editor, match, region, gradient, operands, shaped)
    if cotangents is None:
        return None
    editor.tails[match.root] = tail
    return cotangents, skips


def _tail(editor: Editor, match: Match, region: Region, number: fx.Node) -> list[fx.Node] | None:
    """Return the nodes from the seams up to a number; None where one of them writes, or is in another region."""
    view = editor.view
    reached, wanted = _reached(editor, match.outputs), {number}
    for node in reversed(list(editor.graph.nodes)):
        if node in wanted and node not in match.outputs:
            wanted.update(n for n in node.all_input_nodes if n in reached)
    nodes = [n for n in editor.graph.nodes if n in wanted and n not in match.outputs]
    if any(n not in view.order for n in nodes):
        return None  # another rewrite has made one
    mode = view.effects.region[region.root]
    plain = all(not view.effects.mutated(n) and view.effects.region[n] == mode and is_plain_call(n) for n in nodes)
    hidden = any(view.effects.region[n] != mode for n in match.outputs)
    return nodes if plain and not hidden else None


def _reached(editor: Editor, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return what is made of ``nodes``, and these."""
    reached = set(nodes)
    for node in editor.graph.nodes:
        if node.op != "output" and any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    return reached


def _numbers(editor: Editor, match: Match) -> list[fx.Node]:
    """Return the nodes without dims through which all paths of gradients from the outputs of a match lead, in order.

    Walks along the graph with the nodes that a gradient comes to and that something behind still reads. A node that an
    op in place reads or writes to counts as read up to the end, because the paths behind the op go through its memory.
    """
    place = {node: i for i, node in enumerate(editor.graph.nodes)}
    trained = {n for n in _reached(editor, match.outputs) if _has_a_gradient(n)}
    mutated = editor.view.effects.mutated

    def read_at(node: fx.Node) -> list[int]:
        users = [user for user in node.users if user in trained or user.op == "output" or mutated(user)]
        return [len(place) if mutated(user) else place[user] for user in users]

    readers = {n: read_at(n) for n in trained}
    waiting, found = {n for n in match.outputs if n in trained}, list[fx.Node]()
    for node in sorted((n for n in trained if readers[n]), key=place.__getitem__):
        waiting = {node, *(n for n in waiting if max(readers[n], default=-1) > place[node])}
        if waiting == {node} and is_tensor(node) and example(node).dim() == 0:
            found.append(node)
    return found


def _has_a_gradient(node: fx.Node) -> bool:
    """Return True if a gradient comes to a node, or to one of several results (a checkpoint's)."""
    return any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(example(node)))


# Ops without a gradient.
_CONSTANT = {
    "detach", "argmax", "argmin", "eq", "ne", "lt", "le", "gt", "ge", "any", "all", "sign", "floor", "ceil", "round",
    "logical_not", "logical_and", "logical_or", "isnan", "isinf", "isfinite", "ones_like", "zeros_like", "full_like",
}  # fmt: skip


def has_no_gradient(op: Any) -> bool:
    """Return True for an aten op through which no gradient comes."""
    return getattr(op, "_opname", "") in _CONSTANT


# Ops that are linear in the losses of rows, and those that mix rows.
_LINEAR = LINEAR | {"transpose", "permute", "expand", "getitem", "sum", "mean", "dot"}
_LINEAR_ATEN = {
    "mul", "div", "neg", "add", "sub", "_to_copy", "view", "_unsafe_view", "squeeze", "unsqueeze", "expand", "sum", "mean",
    "transpose", "permute", "select", "slice", "alias", "clone",
}  # fmt: skip


def _is_linear(editor: Editor, region: Region, match: Match, tail: list[fx.Node], number: fx.Node) -> bool:
    """Return True if the tail alone reads what the region makes, and each of its ops is linear with a gradient. Where that
    gradient reads no seam, the number is then a sum of seams times cotangents, and something that no row is part of."""
    view, inside = editor.view, {*tail, *match.nodes}
    waiting: list[Any] = list(region.rest.values())
    read = [n for n in (*match.outputs, *tail) if n is not number]
    if any(user not in inside for node in read for user in node.users):
        return False
    if not all(is_tensor(n) and example(n).requires_grad for n in (*tail, *match.outputs)):
        return False
    for node in tail:
        bound = view.arguments_of(node, *_LINEAR)
        if bound is None or bound.get("rounding_mode") is not None:
            return False
    while waiting:
        made = waiting.pop()
        if isinstance(made, Made):
            if getattr(made.op, "_opname", "") not in _LINEAR_ATEN or "rounding_mode" in made.kwargs:
                return False
            waiting += [region.made_by(t) for t in tree_leaves((made.args, made.kwargs)) if isinstance(t, Tensor)]
    return True


def _with_what_comes_later(
    editor: Editor, match: Match, region: Region, nodes: list[fx.Node], at: fx.Node
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the tail and what it reads, with what is computed behind ``at`` (a number of rows), and what makes several
    tensors (``topk``), as a part of the tail."""
    order = editor.view.order
    while True:
        operands = _operands(region, match, nodes)
        late = [
            n for n in operands
            if n.op in ("call_function", "call_method") and (order.get(n, -1) >= order[at] or _is_several(n))
        ]  # fmt: skip
        if not late or any(n not in order for n in late):
            return nodes, operands
        nodes = sorted({*nodes, *late}, key=order.__getitem__)


def _operands(region: Region, match: Match, nodes: list[fx.Node]) -> list[fx.Node]:
    """Return what the tail reads beside the seams."""
    found: dict[fx.Node, None] = {}
    inside = {*nodes, *match.outputs}
    for node in nodes:
        given = (n for n in node.all_input_nodes if n not in inside and (is_tensor(n) or _is_several(n)))
        found.update(dict.fromkeys(given))
    return list(found | region.nodes_below(region.rest.values()))


def _is_several(node: fx.Node) -> bool:
    return isinstance(example(node), (tuple, list))


def _is_written(editor: Editor, node: fx.Node) -> bool:
    return editor.view.effects.written_after(editor.view.order.get(node, -1), [node]) is not None


def _flat(seam: Seam) -> Tensor:
    few = seam.tensor.shape[len(seam.tensor.shape) - len(seam.typed.inner) :] if seam.typed.inner else ()
    return seam.tensor.detach().reshape(-1, *few)


def _is_plain(op: Any) -> bool:
    """Return True for an op that neither draws random numbers, nor writes, nor waits for other ranks."""
    if not is_overload(op):
        return op is operator.getitem or getattr(op, "__module__", "") in ("_operator", "math")
    return op.namespace == "aten" and not mutates(op) and not draws(op)


def _inserted(
    editor: Editor, match: Match, region: Region, gradient: fx.Graph, operands: list[fx.Node],
    shaped: Callable[[Seam], fx.Node],
) -> list[fx.Node] | None:  # fmt: skip
    """Insert a traced gradient. Returns None where it reads a value of a seam."""
    placeholders = gradient.find_nodes(op="placeholder")
    seams, given = placeholders[: len(region.seams)], placeholders[len(region.seams) :]
    if any(user.target not in _SHAPES for seam in seams for user in seam.users):
        return None
    if any(node.op == "get_attr" for node in gradient.nodes):
        return None  # a tensor with values that the tail makes
    if any(not _is_plain(node.target) for node in gradient.nodes if node.op == "call_function"):
        return None
    values: dict[fx.Node, Any] = {
        **{p: editor.method("detach", (n,), like=match.root) for p, n in zip(given, operands, strict=True) if p.users},
        **{p: shaped(seam) for p, seam in zip(seams, region.seams, strict=True) if p.users},
    }
    for node in gradient.nodes:
        if node.op == "call_function":
            args, kwargs = map_nodes(values.__getitem__, (node.args, node.kwargs))
            values[node] = editor.call(node.target, args, kwargs, like=match.root)
    found = gradient.output_node().args[0]
    return [
        shaped(seam) if result is None else editor.cast(values[result], seam.tensor.dtype, like=match.root)
        for result, seam in zip(found, region.seams, strict=True)  # type: ignore[arg-type]
    ]
