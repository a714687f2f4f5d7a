"""Two equal calls of a graph whose results are both returned: they have to stay two tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.signatures import names_of
from fx_fusion.graph.terms import example
from fx_fusion.ops.layouts import copied
from fx_fusion.torch_internals.containers import map_nodes, tree_leaves
from fx_fusion.torch_internals.nodes import namespace_of

_VIEWS = (
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "permute", "transpose", "squeeze", "unsqueeze",
    "expand", "expand_as", "contiguous", "to", "neg",
)  # fmt: skip

_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}
_TORCHS = ("torch", "aten", "_operator", "math", "builtins", "")


def keep_results_apart(graph: fx.Graph) -> None:
    """Copy a returned result of a call that the graph makes twice. AOTAutograd makes equal calls one, and knows only of
    results that are returned directly that they must not become one tensor."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    numbers = _value_numbers(graph)
    first: dict[int, fx.Node] = {}  # of equal calls with returned results
    done: set[fx.Node] = set()  # results that were copied, and their copies
    for item in tree_leaves(output.args):
        found = _origin(item)
        if found is None:
            continue
        made, result = found
        if done & {made, result} or first.setdefault(numbers[made], made) is made:
            continue
        with graph.inserting_after(result):  # not at the output: views of it that are returned too share its memory
            copy = graph.call_function(copied, (result,))
        copy.meta.update(result.meta)
        result.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        done |= {result, copy}


def _value_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number for each node: that of an earlier one where the same call has the same operands, or it does nothing to it."""
    numbers: dict[fx.Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        if (same := _does_nothing_to(node)) is not None:
            numbers[node] = numbers[same]
            continue
        args, kwargs = map_nodes(lambda n: f"#{numbers[n]}", (node.args, node.kwargs))
        own = node.name if node.op == "placeholder" else str(node.target)
        numbers[node] = known.setdefault((node.op, own, str(args), str(kwargs)), len(known))
    return numbers


def _does_nothing_to(node: fx.Node) -> fx.Node | None:
    """The tensor that a node adds 0 to or multiplies by 1, if that is all: Inductor removes it before it looks for equal
    calls, from torch 2.14 on."""
    name, _ = names_of(node)
    if name not in _NEUTRAL or len(node.args) != 2 or node.kwargs:
        return None
    commutes = name in ("add", "mul")
    for tensor, number in (node.args, node.args[::-1]) if commutes else (node.args,):
        if isinstance(tensor, fx.Node) and isinstance(number, (int, float)) and number == _NEUTRAL[name]:
            return tensor
    return None


def _origin(item: Any) -> tuple[fx.Node, fx.Node] | None:
    """The call that a returned node is a result or a view of, and that result, where the call is attention or no function of
    torch: ours, or one of a plug-in. None if it is neither."""
    result = item
    while isinstance(item, fx.Node) and item.args and (item.target is operator.getitem or item.target in _VIEWS):
        result, item = item, item.args[0]
    if not isinstance(item, fx.Node):
        return None
    is_attention = item.target is torch.nn.functional.scaled_dot_product_attention
    if not is_attention and namespace_of(item.target) in _TORCHS:
        return None
    picks = isinstance(result, fx.Node) and result.target is operator.getitem and isinstance(result.args[1], int)
    return item, result if picks and not isinstance(example(item), torch.Tensor) else item
