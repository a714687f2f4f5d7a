"""A new tensor that is written in two halves, as one value.

    out = torch.empty_like(x)
    out[..., 0::2] = a                      becomes      torch.stack((a, b), -1).flatten(-2)
    out[..., 1::2] = b

So diffusers' Wan and others write a rotation; its halves may also be ``[..., :n]`` and ``[..., n:]`` (``torch.cat``). What
the fusions read are values, and Inductor need not merge two masked copies.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fx_fusion.graph.effects import storages
from fx_fusion.graph.indices import WHOLE, index_of
from fx_fusion.graph.terms import example, is_tensor, same_shape, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.rewrite.editor import Editor, Mismatch, differs
from fx_fusion.torch_internals.nodes import rename

_EMPTY = {"empty_like", "empty", "new_empty"}


def join_written_halves(gm: fx.GraphModule) -> int:
    """Rewrite such tensors in place, those of bodies too. Returns how many there were."""
    count = 0
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            found = [node for node in module.graph.nodes if _may_be_halves(node)]
            if found:
                editor = Editor(View(module.graph))
                count += sum(_joined(editor, node) for node in found)
                module.graph.lint()
                module.recompile()
    return count


def _may_be_halves(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    plain = node.op in ("call_function", "call_method") and name in _EMPTY and is_tensor(node)
    return plain and all(user.target is operator.setitem for user in list(node.users)[:2]) and len(node.users) > 2


def _joined(editor: Editor, empty: fx.Node) -> bool:
    """Rewrite one new tensor, if its first two readers write all of it and nobody writes to it later."""
    effects, order, tensor = editor.view.effects, editor.view.order, example(empty)
    first, second, *readers = sorted(empty.users, key=order.__getitem__)
    memory = set(storages(empty))
    written = [write for write in effects.writes if memory.intersection(*map(storages, effects.mutated(write)))]
    one_region = len({effects.region[n] for n in (empty, first, second)}) == 1
    if written != [first, second] or not one_region or not tensor.is_contiguous():
        return False
    kinds = [_half(tensor, write) for write in (first, second)]
    if kinds not in ([("pairs", 0), ("pairs", 1)], [("halves", 0), ("halves", 1)]):
        return False
    values = [write.args[2] for write in (first, second)]
    if effects.writes_between(order[first], order[second], [v for v in values[:1] if is_tensor(v)]) is not None:
        return False  # the first half would hold what is written later
    alike = all(is_tensor(v) and same_shape(example(v), example(values[0])) for v in values)
    if not alike or not same_sizes(example(values[0]).shape, (*tensor.shape[:-1], tensor.shape[-1] // 2)):
        return False
    known = set(editor.graph.nodes)
    try:
        with editor.graph.inserting_before(second.next):
            if example(values[0]).dtype != example(values[1]).dtype:
                values = [editor.cast(v, tensor.dtype, like=first) for v in values]
            if kinds[0] == ("halves", 0):
                joined = editor.call(torch.cat, (values, -1), like=first)
            else:
                joined = editor.call(torch.stack, (values, -1), like=first)
                joined = editor.method("flatten", (joined, -2), like=first)
            joined = editor.cast(joined, tensor.dtype, like=first)
        if differs(tensor, example(joined)) is not None:
            raise Mismatch
    except Mismatch:
        editor.erase(n for n in list(editor.graph.nodes) if n not in known)
        return False
    rename(joined, f"{empty.name}_joined")  # the same in each copy of the graph
    for reader in readers:
        reader.replace_input_with(empty, joined)
    for node in (second, first, empty):
        editor.graph.erase_node(node)
    return True


def _half(tensor: torch.Tensor, write: fx.Node) -> tuple[str, int] | None:
    """Return which half of the last dim a ``setitem`` writes, of which kind; None for another part."""
    index = index_of(write.args[1], tensor.dim()) if len(write.args) == 3 else None
    width = tensor.shape[-1]
    if index is None or not index.only_slices or index.new_axes or not isinstance(width, int) or width % 2:
        return None
    if any(item != WHOLE for item in index.items[:-1]):
        return None
    part = index.items[-1]
    if not all(n is None or isinstance(n, int) for n in (part.start, part.stop, part.step)):
        return None
    covered = range(width)[part]
    for i in range(2):
        if covered == range(i, width, 2):
            return "pairs", i
        if covered == range(width // 2 * i, width // 2 * (i + 1)):
            return "halves", i
    return None
