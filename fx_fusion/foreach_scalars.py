"""A float that changes between calls (a learning rate) reaches foreach ops as a tensor: no recompile for each value.

Dynamo hands a Python float that has changed to the graph as a 0-d fp64 tensor and the ``item()`` of it. AOTAutograd turns
that and its arithmetic (``1 - lr * weight_decay``) back into tensors where it knows the op that takes the number, and has
Dynamo specialise on the value where it does not: at ``torch._foreach_*``. So Inductor compiles a foreach optimizer, the
default on CUDA, anew for every learning rate of a schedule, and after eight of them the step runs eagerly. Here the number
is multiplied with a one first, which AOTAutograd knows, and the foreach op takes the product: it has an overload for that.

The number is rounded once, from fp64 to the dtype that the op computes in, as a scalar is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._prims_common import get_computation_dtype

from fx_fusion.canonicalize import View, value
from fx_fusion.rewrite import Editor

_TAKE_ONE = {getattr(torch, f"_foreach_{name}{end}") for name in ("mul", "div") for end in ("", "_")}
# Calls that scale their second operand, and the name of what they scale it by.
_SCALE = {getattr(torch, f"_foreach_{name}{end}"): "alpha" for name in ("add", "sub") for end in ("", "_")}
_SCALE |= {getattr(torch, f"_foreach_{name}{end}"): "value" for name in ("addcmul", "addcdiv") for end in ("", "_")}


def keep_tensors(gm: fx.GraphModule) -> int:
    """Rewrite the calls in place; how many there were."""
    calls = [node for node in gm.graph.nodes if _number(node) is not None]
    if not calls:
        return 0
    editor = Editor(View(gm.graph))
    kept = sum(_take_tensor(editor, node) for node in calls)
    gm.graph.lint()
    gm.recompile()
    return kept


def _number(node: fx.Node) -> fx.Node | None:
    """What a foreach call multiplies or divides by, if that is a float and no constant."""
    if node.op != "call_function":
        return None
    if node.kwargs:
        number = node.kwargs.get(_SCALE.get(node.target, "")) if len(node.kwargs) == 1 else None
    else:
        number = node.args[1] if node.target in _TAKE_ONE and len(node.args) == 2 else None
    return number if isinstance(number, fx.Node) and isinstance(value(number), torch.SymFloat) else None


def _take_tensor(editor: Editor, node: fx.Node) -> bool:
    number, scales = _number(node), bool(node.kwargs)
    tensors = node.args[1] if scales else node.args[0]
    examples = value(tensors) if isinstance(tensors, fx.Node) else [value(t) for t in tensors]
    computed = {get_computation_dtype(t.dtype) for t in examples if t.dtype.is_floating_point}
    if len(computed) != 1 or not all(t.dtype.is_floating_point for t in examples):
        return False
    dtype = computed.pop()
    # A tensor without dims widens others without dims, unless they are written in place.
    if not node.target.__name__.endswith("_") and any(t.dim() == 0 and t.dtype != dtype for t in examples):
        return False
    with editor.graph.inserting_before(node):
        tensor = editor.once((number, dtype), functools.partial(_as_tensor, editor, number, dtype, node))
        if scales:
            scaled = editor.call(torch._foreach_mul, (tensors, tensor), like=node)
            node.args, node.kwargs = (node.args[0], scaled, *node.args[2:]), {}
        else:
            node.args = (tensors, tensor)
    return True


def _as_tensor(editor: Editor, number: Any, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    one = editor.call(torch.ones, ((),), {"dtype": dtype}, like=like)
    return editor.call(torch.mul, (one, number), like=like)
