"""Calls of one graph by another (``invoke_subgraph``): making them, and having Inductor compile them correctly."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.torch_internals.fakes import fake_mode_of


def _operator(name: str = "invoke_subgraph") -> Any:
    return getattr(torch.ops.higher_order, name, None)


def _calls(node: fx.Node, *names: str) -> bool:
    """Return True if a node calls one of these higher-order operators."""
    return node.op == "call_function" and node.target is not None and any(node.target is _operator(name) for name in names)


def is_call(node: fx.Node) -> bool:
    """Return True if a node calls another graph. Gone: False."""
    return _calls(node, "invoke_subgraph")


def call_body(graph: fx.Graph, name: str, operands: Sequence[fx.Node], results: Sequence[Any]) -> fx.Node:
    """Append a call of the body ``name`` of the graph's module to ``graph``; ``results``: fake tensors, one for each result.
    Gone: raises, and each layer is compiled by itself."""
    operator = _operator()
    if operator is None:
        raise RuntimeError(f"torch {torch.__version__} has no operator that calls a graph (invoke_subgraph)")
    call = graph.call_function(operator, (graph.get_attr(name), name, *operands))
    call.meta["val"] = tuple(results)
    return call


def is_launch(node: fx.Node) -> bool:
    """Return True if a node launches a Triton kernel, and returns what that writes."""
    return _calls(node, "triton_kernel_wrapper_functional")


def written_by_launch(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a launch that its kernel writes to, which it copies where it may not write to them."""
    tensors = node.kwargs["kwargs"]
    return [tensors[name] for name in node.kwargs["tensors_to_clone"]]  # type: ignore[index, union-attr]


def described_launch(node: fx.Node) -> Any:
    """Return what a launch has besides tensors: its kernel with configurations, constants and the grid. The numbers by which
    the node names them differ between equal launches."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    options = dict(node.kwargs)
    kernel = kernel_side_table.get_kernel(options.pop("kernel_idx"))
    constants = kernel_side_table.get_constant_args(options.pop("constant_args_idx"))
    options["kwargs"] = dict(options["kwargs"])  # type: ignore[call-overload]
    configurations = tuple(str(c) for c in getattr(kernel, "configs", ()))
    function = kernel.fn if configurations else kernel
    return id(function), configurations, repr(sorted(constants.items())), options


def is_flex_attention(node: fx.Node) -> bool:
    """Return True if a node is FlexAttention or its backward, which take graphs of scores and masks."""
    return _calls(node, "flex_attention", "flex_attention_backward")


def graph_of(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a node takes from its module, and hands to an operator; None for any other node."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    module = getattr(node.graph.owning_module, str(node.target), None)
    return module if isinstance(module, fx.GraphModule) else None


def described_graph(graph: fx.Graph) -> Any:
    """Return what a graph computes, without the names of its nodes; None where it has tensors or graphs of its own."""
    places = {node: i for i, node in enumerate(graph.nodes)}
    if any(node.op == "get_attr" for node in graph.nodes):
        return None
    return tuple(
        (node.op, node.target if node.op == "call_function" else "", repr(fx.map_arg((node.args, node.kwargs), places.get)))
        for node in graph.nodes
    )


def is_seed(node: fx.Node) -> bool:
    """Return True if a node takes one seed of Inductor's random numbers from a tensor of all of them."""
    return node.op == "call_function" and getattr(node.target, "_opname", "") == "inductor_lookup_seed"


def of_one_seed(seeds: Tensor, index: int) -> Tensor:
    """Return the part of a fake tensor of seeds that has one."""
    mode = fake_mode_of(seeds)
    with mode or contextlib.nullcontext():
        return seeds[index : index + 1]


def keep_bodies_apart() -> None:
    """From now on, what Inductor compiles of a call of a graph writes to nothing that the call takes or returns.

    Up to torch 2.15 Inductor takes each result of a call for memory of its own. Two results may be one tensor, or views of
    one, or of an operand; then one is written to while the other is still read. Gradients are silently wrong where a region
    returns what it also saves for its own backward. Up to torch 2.14 a body also writes to the saved tensors of the graph
    around it (pytorch#193960). Gone: nothing is done."""
    try:
        from torch._inductor.graph import SubgraphLowering
        from torch._inductor.lowering import lowerings
    except ImportError:
        return
    lower = lowerings.get(_operator())
    if lower is not None and lower not in _ours:
        lowerings[_operator()] = _never_reusing(lower)
    if SubgraphLowering.__init__ not in _ours:
        SubgraphLowering.__init__ = _without_donations(SubgraphLowering.__init__)  # type: ignore[method-assign]


_ours: set[Callable[..., Any]] = set()  # what keep_bodies_apart has put in the place of PyTorch's functions


def _never_reusing(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lowering of a call whose operands' and results' memory is given to nothing else."""
    from torch._inductor.virtualized import V

    @functools.wraps(lower)
    def lowered(*args: Any) -> Any:
        results = lower(*args)
        for result in results:
            made: Any = getattr(getattr(result, "data", None), "data", None)  # MultiOutput, inside of a box in a box
            if hasattr(made, "inputs"):
                (call,) = made.inputs
                named = (each.maybe_get_name() for each in (made, *call.inputs))  # a symbolic size has no name
                V.graph.never_reuse_buffers.update(name for name in named if name is not None)
        return results

    _ours.add(lowered)
    return lowered


def _without_donations(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.bw_donated_idxs = None

    _ours.add(initialized)
    return initialized
