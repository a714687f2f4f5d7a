"""Launches of Triton kernels as nodes of a functional graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def launched(node: fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """The kernel that a node launches and its arguments by name, constants included; None for another node.
    Gone: None, and such a launch is never made twice."""
    try:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
    except ImportError:
        return None
    if node.target is not triton_kernel_wrapper_functional:
        return None
    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
    return kernel, {**constants, **node.kwargs["kwargs"]}  # type: ignore[dict-item]


def launch_with_result(
    node: fx.Node, name: str, memory: fx.Node, changed: Mapping[str, Any]
) -> tuple[fx.Node, fx.Node]:
    """Put a launch in the place of ``node`` that has some arguments changed (nodes, numbers, bools) and writes to one more,
    ``name``, for which it is given ``memory``. Returns it and that result. An argument that is not a node's: raises, and
    nothing was changed."""
    arguments: Mapping[str, Any] = node.kwargs["kwargs"]  # type: ignore[assignment]
    if not arguments.keys() >= {name, *changed}:
        raise KeyError(f"{', '.join({name, *changed} - arguments.keys())} are no arguments of {node}")
    written: Sequence[str] = node.kwargs["tensors_to_clone"]  # type: ignore[assignment]
    given = {**node.kwargs, "kwargs": {**arguments, **changed, name: memory}, "tensors_to_clone": [*written, name]}
    graph = node.graph
    with graph.inserting_after(node):
        launch = graph.call_function(node.target, kwargs=given)
    launch.meta = {**node.meta, "val": {**node.meta["val"], name: memory.meta["val"]}}
    _say_how_they_lie(launch, (name, *changed))
    with graph.inserting_after(launch):
        result = graph.call_function(operator.getitem, (launch, name))
    result.meta["val"] = memory.meta["val"]
    node.replace_all_uses_with(launch)
    graph.erase_node(node)
    return launch, result


def writes_to(node: fx.Node) -> list[str]:
    """The names of the arguments that a launch writes to, each one of its results."""
    return list(node.kwargs["tensors_to_clone"])  # type: ignore[arg-type]


def change_launch(node: fx.Node, changed: Mapping[str, Any], written: Sequence[str]) -> None:
    """Give a launch other arguments, and other results. An argument that it has not: raises, and nothing was changed."""
    arguments: Mapping[str, Any] = node.kwargs["kwargs"]  # type: ignore[assignment]
    if not arguments.keys() >= {*changed, *written}:
        raise KeyError(f"{', '.join({*changed, *written} - arguments.keys())} are no arguments of {node}")
    given = {**arguments, **changed}
    values = {name: given[name].meta["val"] for name in written}
    node.kwargs = {**node.kwargs, "kwargs": given, "tensors_to_clone": list(written)}
    node.meta["val"] = values
    _say_how_they_lie(node, changed)


def memory_for(result: torch.Tensor, rows: fx.Node, before: fx.Node) -> fx.Node:
    """A node in front of ``before`` that allocates contiguous memory for ``result``, an example. ``rows`` has its shape: of
    symbolic sizes a graph has no numbers."""
    options = {"dtype": result.dtype, "memory_format": torch.contiguous_format}
    with before.graph.inserting_before(before):
        memory = before.graph.call_function(torch.ops.aten.empty_like.default, (rows,), options)
    memory.meta["val"] = result
    return memory


def launch_into(node: fx.Node, name: str, memory: fx.Node) -> None:
    """Give a launch other memory for its result ``name``, also where the old one stood for an argument that it has not."""
    arguments: Mapping[str, Any] = node.kwargs["kwargs"]  # type: ignore[assignment]
    changed = [n for n, value in arguments.items() if value is arguments[name]]
    node.kwargs = {**node.kwargs, "kwargs": {**arguments, **dict.fromkeys(changed, memory)}}
    node.meta["val"] = {**node.meta["val"], name: memory.meta["val"]}
    _say_how_they_lie(node, changed)


def _say_how_they_lie(node: fx.Node, names: Iterable[str]) -> None:
    """Tell Inductor how the named arguments of a launch lie, which are others than it was traced with: it gives a kernel its
    arguments so, whatever passes of its own (``pad_mm``) make of the nodes.

    Gone: nobody to tell."""
    if "eager_input_vals" not in node.meta:
        return
    args, given = node.meta["eager_input_vals"]
    arguments: Mapping[str, Any] = node.kwargs["kwargs"]  # type: ignore[assignment]
    values = {n: arguments[n].meta["val"] if isinstance(arguments[n], fx.Node) else None for n in names}
    # torch 2.11 compares the types of containers with those of the node.
    told = type(arguments)({**given["kwargs"], **values})  # type: ignore[call-arg]
    node.meta["eager_input_vals"] = args, {**given, "kwargs": told, "tensors_to_clone": node.kwargs["tensors_to_clone"]}


def functional_graph(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """``function`` traced on fake tensors, in the ops that Inductor has, with launches and writes as functional nodes, as
    AOTAutograd has them. Gone: raises, and the graph stays as it is there."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        inputs = [example.detach() for example in examples]  # one tensor given twice would be one input
        traced = make_fx(dispatch_functionalize(function, FunctionalTensorMode()), select_decomp_table())(*inputs)
    traced.graph.eliminate_dead_code()
    return traced


def insert(traced: fx.GraphModule, graph: fx.Graph, operands: Sequence[fx.Node], after: fx.Node) -> list[fx.Node]:
    """Copy the nodes of a traced function of ``operands`` into a graph, behind ``after``; the last ones are its results."""
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    copies: dict[fx.Node, fx.Node] = dict(zip(inputs, operands, strict=True))
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with graph.inserting_after(after):
            copies[node] = after = graph.node_copy(node, copies.__getitem__)
    results = [copies[n] for n in traced.graph.output_node().all_input_nodes]
    made = list(copies.values())[len(inputs) :]
    return [*(n for n in made if n not in results), *results]
