"""Floats that change between calls, a learning rate say: foreach ops are compiled once, and never get another value's code.

Dynamo hands a Python float that has changed to the graph as a 0-d fp64 tensor and the ``item()`` of it, a SymFloat.
AOTAutograd turns the SymFloat and its arithmetic (``1 - lr * weight_decay``) back into tensors at the ops that it knows, and
makes it a constant, with a guard, at the others. Two things are amiss with that (torch 2.13).

``torch._foreach_*`` are among the others: Inductor compiles a foreach optimizer, the default on CUDA, anew for every
learning rate of a schedule, and after eight of them the step runs eagerly. ``keep_tensors`` multiplies the float with a one
first, which AOTAutograd knows, and the foreach op takes the product: it has an overload for a tensor. Arithmetic on the way
is done with that tensor (torch 2.11 keeps a float only where an op takes itself, not ``-lr``), in fp64 as Python's, and
rounded once to the dtype that the op computes in, as a scalar is.

Where ops of both kinds take one float, ``x * s`` and ``x.clamp(max=s)``, the graph is compiled anew for each value, but to
the compile caches it is the same graph: they answer with the code of the value before, and without its guard. Silently
wrong, so such a graph is compiled ``without_caches``.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.rewrite.editor import Editor
from fx_fusion.torch_internals.dispatch import computation_dtype, foreach
from fx_fusion.torch_internals.inductor import without_caches as caches_off

# Foreach ops that can take a tensor instead: what they call the number that scales their second operand, or None where the
# number itself is the second operand.
_FOREACH: dict[Any, str | None] = {
    op: scale
    for names, scale in ((("mul", "div"), None), (("add", "sub"), "alpha"), (("addcmul", "addcdiv"), "value"))
    for name in names
    for end in ("", "_")
    if (op := foreach(name + end)) is not None
}

_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg}


def without_caches(gm: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Return what a graph that changing floats go into, or into its bodies, is compiled under."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    items = (example(node) for graph in graphs for node in graph.find_nodes(op="call_method", target="item"))
    if not any(isinstance(item, torch.SymFloat) for item in items):
        return contextlib.nullcontext()
    return caches_off()


def keep_tensors(gm: fx.GraphModule) -> int:
    """Rewrite the foreach calls in place; how many there were."""
    calls = [(node, taken) for node in gm.graph.nodes if (taken := _taken(node)) is not None]
    if calls:
        editor = Editor(View(gm.graph))
        for node, taken in calls:
            _take_tensor(editor, node, *taken)
        gm.graph.lint()
        gm.recompile()
    return len(calls)


def _taken(node: fx.Node) -> tuple[fx.Node, Any, torch.dtype] | None:
    """The changing float of a foreach call, the tensors that meet it and what they are computed in; None where there is no
    such float, or a tensor can't take its place."""
    if node.op != "call_function" or node.target not in _FOREACH or len(node.args) < 2:
        return None
    name = _FOREACH[node.target]
    number, tensors = (node.args[1], node.args[0]) if name is None else (node.kwargs.get(name), node.args[1])
    if not isinstance(number, fx.Node) or not isinstance(example(number), torch.SymFloat):
        return None
    if is_tensor(tensors):
        return None  # one for all of a list
    examples = example(tensors) if isinstance(tensors, fx.Node) else [example(t) for t in tensors]
    if len(node.kwargs) != (name is not None) or not all(is_tensor(t) and t.dtype.is_floating_point for t in examples):
        return None
    dtypes = {computation_dtype(t.dtype) for t in examples}
    # A tensor without dims widens others without dims, unless they are written in place.
    widens = not node.target.__name__.endswith("_") and any(t.dim() == 0 and t.dtype not in dtypes for t in examples)
    return None if len(dtypes) != 1 or widens else (number, tensors, dtypes.pop())


def _take_tensor(editor: Editor, node: fx.Node, number: fx.Node, tensors: Any, dtype: torch.dtype) -> None:
    with editor.graph.inserting_before(node):
        exact = editor.once(("tensor of", number), lambda: _as_tensor(editor, number, node))
        tensor = editor.once((exact, dtype), lambda: editor.cast(exact, dtype, like=node))
        if node.kwargs:
            scaled = editor.call(foreach("mul"), (tensors, tensor), like=node)
            node.args, node.kwargs = (node.args[0], scaled, *node.args[2:]), {}
        else:
            node.args = (tensors, tensor)


def _as_tensor(editor: Editor, number: fx.Node, like: fx.Node) -> fx.Node:
    """A changing float as a 0-d fp64 tensor."""
    behind, waiting = set(), [number]
    while waiting:
        node = waiting.pop()
        if node not in behind:
            behind.add(node)
            waiting += node.all_input_nodes if node.target in _ARITHMETIC else []
    made: dict[fx.Node, fx.Node] = {}
    for node in [n for n in editor.graph.nodes if n in behind]:
        operands = [made[a] if isinstance(a, fx.Node) else a for a in node.args] if node.target in _ARITHMETIC else [node]
        made[node] = editor.once(("fp64", node), functools.partial(_computed, editor, node, operands, like))
    return made[number]


def _computed(editor: Editor, node: fx.Node, operands: list[Any], like: fx.Node) -> fx.Node:
    """A float out of what it is computed of; one that is not computed here out of itself."""
    exact = {"dtype": torch.float64, "device": "cpu"}
    if node.target not in _ARITHMETIC:
        return editor.call(torch.mul, (editor.call(torch.ones, ((),), exact, like=like), *operands), like=like)
    # PyTorch multiplies a number with a reciprocal where Python divides.
    tensors = [a if isinstance(a, fx.Node) else editor.call(torch.full, ((), float(a)), exact, like=like) for a in operands]
    return editor.call(node.target, tuple(tensors), like=like)
