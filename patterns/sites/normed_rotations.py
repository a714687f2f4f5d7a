"""A rotation of what an RMSNorm alone made: both become one call of kernels/rms_norm_rope.py.

Models normalize queries and keys before they rotate them: each head (Qwen3, Gemma 3, Flux) or all heads of a token (OLMo 2,
Wan). Both sites are replaced by then, so that this reads two calls of ours, in whatever words the model wrote them. Flux
normalizes text and image apart and rotates both behind a ``cat``: each part is rotated by its rows of the tables.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.match import Match
from fx_fusion.graph.terms import example, is_tensor, negative_dim, same_sizes
from fx_fusion.kernels.lib.integers import next_power_of_2
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.kernels.rms_norm_rope import MOST_ACROSS, rms_norm_rope
from fx_fusion.kernels.rope import four_dims, rope
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.torch_internals.containers import map_nodes
from fx_fusion.torch_internals.nodes import is_erased

_MOVES = {"transpose", "permute"}
_SPLITS = {"view", "reshape", "unflatten"}
_CASTS = {"to", "type_as", "float", "half", "bfloat16"}  # to the dtype that the tensor has


@dataclass(frozen=True)
class _Normed:
    """A call of the norm, its result, and the views and casts behind that, which nobody else reads."""

    norm: fx.Node
    result: fx.Node
    between: tuple[fx.Node, ...]
    across: bool


def fold_norms(editor: Editor, match: Match, made: Sequence[fx.Node]) -> str | None:
    """Replace calls of the rotation among ``made``, and the norms that make their operands.

    Returns a note for the report, if there is one."""
    folded = [_fold(editor, node, match.root) for node in made if node.target is rope]
    return "with the norm in front of it" if any(folded) else None


def _fold(editor: Editor, call: fx.Node, like: fx.Node) -> bool:
    """Replace one call of the rotation. Returns False where no norm makes an operand of it."""
    q, k, cos, sin, *static = call.args
    operands = [n for n in (q, k) if n is not None]
    parts = [_parts(editor, call, n, example(cos)) for n in operands]
    if not any(parts):
        return False
    results = {item.args[1]: item for item in call.users}
    known = set(editor.graph.nodes)
    new: dict[int, fx.Node] = {}
    try:
        with editor.graph.inserting_before(call):
            for i, (operand, normed) in enumerate(zip(operands, parts, strict=True)):
                if normed:
                    pairs = zip(normed, _tables(editor, call, like, normed), strict=True)
                    rotated = [_rotated(editor, like, part, tables, static) for part, tables in pairs]
                    new[i] = rotated[0]
                    if len(rotated) > 1:
                        new[i] = editor.call(torch.cat, (rotated, _positions(example(cos))), like=like)
                else:
                    new[i] = editor.item(editor.call(rope, (operand, None, cos, sin, *static), like=like), 0, like=like)
            editor.check([results[i] for i in new if i in results], [new[i] for i in new if i in results])
    except Mismatch:
        for node in reversed(list(editor.graph.nodes)):
            if node not in known:
                editor.graph.erase_node(node)
        return False
    for i, node in new.items():
        if i in results:
            editor.replace(results[i], node)
    _erase(editor, [*results.values(), call])
    for operand, normed in zip(operands, parts, strict=True):
        _erase(editor, [operand] * bool(normed))
        for part in normed:
            x = part.norm.args[0]
            for node in (part.result, *part.between):
                for user in [u for u in node.users if _reads_the_dtype(u, node) and example(x).dtype == example(node).dtype]:
                    user.replace_input_with(node, x)
            _erase(editor, [*reversed(part.between), part.result, part.norm])
    return True


def _erase(editor: Editor, nodes: Iterable[fx.Node]) -> None:
    """Erase calls that nobody reads any more, from the last on, and their readers that nobody reads."""
    for node in nodes:
        if not is_erased(node):
            for user in [user for user in node.users if _is_dead(editor, user)]:
                editor.graph.erase_node(user)
            if not node.users:
                editor.graph.erase_node(node)


def _is_dead(editor: Editor, node: fx.Node) -> bool:
    return not node.users and node.op != "output" and editor.view.is_pure(node)


def _parts(editor: Editor, call: fx.Node, operand: fx.Node, cos: torch.Tensor) -> list[_Normed]:
    """Return the norms that make an operand of a rotation: one, or those of a ``cat`` of positions. Empty where not all of
    it is made by norms."""
    normed = _normed(editor, call, operand, cos)
    if normed is not None:
        return [normed]
    name = editor.view.name(operand) if operand.op in ("call_function", "call_method") else None
    bound = editor.view.arguments(operand) if name == "cat" and _is_read_once(editor, operand) else None
    if bound is None or negative_dim(bound["dim"], 4) != _positions(cos):
        return []
    found = [_normed(editor, call, editor.now(n), cos) for n in bound["tensors"]]
    sizes = [example(n).shape[bound["dim"]] for n in bound["tensors"]]
    fits = all(isinstance(n, int) for n in sizes) and example(operand).dim() == 4
    return [n for n in found if n is not None] if fits and None not in found else []


def _positions(cos: torch.Tensor) -> int:
    """Return the dim of the positions of what is rotated, as a negative number."""
    return -2 if four_dims(cos).shape[1] == 1 else -3


def _tables(editor: Editor, call: fx.Node, like: fx.Node, parts: list[_Normed]) -> list[list[Any]]:
    """Return for each part the rows of cos and sin that belong to its positions."""
    cos, sin = call.args[2:4]
    if len(parts) == 1:
        return [[cos, sin]]
    dim, start, found = _positions(example(cos)), 0, list[list[Any]]()
    for part in parts:
        length = example((part.result, *part.between)[-1]).shape[dim]
        tables = [cos, sin]
        if example(cos).dim() >= -dim and not statically_known_true(example(cos).shape[dim] == 1):
            tables = [editor.method("narrow", (t, dim, start, length), like=like) for t in tables]
        start += length
        found.append(tables)
    return found


def _rotated(editor: Editor, like: fx.Node, part: _Normed, tables: list[Any], static: list[Any]) -> fx.Node:
    """Insert the views of the norm's operand, and the call that normalizes and rotates."""
    x, weight, *numbers = part.norm.args
    for view in part.between:
        if editor.view.name(view) in _CASTS:
            continue
        args, kwargs = map_nodes(lambda n: x if is_tensor(n) else n, (view.args, view.kwargs))  # noqa: B023
        insert = editor.method if view.op == "call_method" else editor.call
        x = insert(view.target, args, kwargs, like=like)  # type: ignore[arg-type, assignment]
    arguments = (x, weight, *tables, *numbers, part.across, *static)
    return editor.item(editor.call(rms_norm_rope.overload, arguments, like=like), 0, like=like)


def _normed(editor: Editor, call: fx.Node, node: fx.Node, cos: torch.Tensor) -> _Normed | None:
    """Return the norm that alone makes an operand of a rotation, through views that keep its rows together."""
    rotated, between = node, list[fx.Node]()
    while _is_read_once(editor, node) and is_tensor(node.args[0]) and editor.view.name(node) in _MOVES | _SPLITS | _CASTS:
        below = node.args[0]
        between.insert(0, node)
        if example(below).dtype != example(node).dtype:
            return None
        node = below
    norm = node.args[0] if node.target is operator.getitem and _is_read_once(editor, node) else None
    if not isinstance(norm, fx.Node) or norm.target is not rms_norm.overload:
        return None
    regions = [editor.view.effects.region.get(editor.replaced_by(n)) for n in (node, *call.users)]
    if None in regions or any(region != regions[0] for region in regions):
        return None  # one of them is in a no_grad or autocast block
    if editor.view.effects.written_after(-1, [n for n in norm.args[:2] if isinstance(n, fx.Node)]) is not None:
        return None
    x, d = example(norm.args[0]), example(rotated).shape[-1]
    labels: list[Any] = [*range(x.dim() - 1), "row"]
    for view in (n for n in between if editor.view.name(n) not in _CASTS):
        found = _labels(editor, labels, view)
        if found is None:
            return None
        labels = found
    if labels[-1] == "row":
        return _Normed(norm, node, tuple(between), across=False)
    at = 1 if _positions(cos) == -2 else 2
    heads = example(rotated).shape[at]
    fits = isinstance(heads, int) and next_power_of_2(heads) * next_power_of_2(d) <= MOST_ACROSS
    return _Normed(norm, node, tuple(between), across=True) if fits and labels[-1] == "d" and labels[at] == "head" else None


def _is_read_once(editor: Editor, node: fx.Node) -> bool:
    """Return True for a call that one call reads. Calls that nobody reads do not count."""
    live = [user for user in node.users if not _is_dead(editor, user) and not _reads_the_dtype(user, node)]
    return node.op in ("call_function", "call_method") and len(live) == 1 and len(node.args) > 0


def _reads_the_dtype(user: fx.Node, node: fx.Node) -> bool:
    """Return True for ``other.type_as(node)``."""
    return user.target in ("type_as", torch.Tensor.type_as) and user.args[0] is not node


def _labels(editor: Editor, labels: list[Any], view: fx.Node) -> list[Any] | None:
    """Return what the dims of a view are, ``"row"`` for those that a row of the norm has: "head" and "d" where it is split.
    None where the view takes rows apart in another way."""
    before, after = example(view.args[0]), example(view)
    if editor.view.name(view) in _MOVES:
        rank = before.dim()
        tags = torch.empty_strided((2,) * rank, tuple(range(rank)), device="meta")  # the stride of a dim is its number
        args, kwargs = map_nodes(lambda n: tags if is_tensor(n) else example(n), (view.args, view.kwargs))
        moved = getattr(torch.Tensor, str(view.target)) if view.op == "call_method" else view.target
        return [labels[i] for i in moved(*args, **kwargs).stride()]
    if labels[-1] != "row":
        return None
    if statically_known_true(after.shape[-1] == before.shape[-1]):
        return [*([None] * (after.dim() - 1)), "row"]
    leads = after.dim() == before.dim() + 1 and same_sizes(after.shape[:-2], before.shape[:-1])
    return [*labels[:-1], "head", "d"] if leads else None
