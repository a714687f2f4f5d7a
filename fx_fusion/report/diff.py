"""A graph as text, one node a line, and the unified diff of two."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from fx_fusion.report.report import GraphReport


def text(module: fx.GraphModule) -> str:
    """Every node of the module and of the bodies inside it: ``name: dtype[shape] = op(operands)``."""
    lines = [_line(node) for node in module.graph.nodes if node.op != "placeholder"]
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            lines.append(f"{name}:")
            lines.extend("  " + line for line in text(child).splitlines())
    return "\n".join(lines)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    arguments = [*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
    return f"{node.name}{_type(node)} = {_target(node)}({', '.join(arguments)})"


def _argument(item: Any) -> str:
    return str(item).replace("(None, None, None)", "(:)")


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    if node.op == "call_method":
        return f".{node.target}"
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _type(node: fx.Node) -> str:
    known = node.meta.get("example_value")
    if not isinstance(known, torch.Tensor):
        return ""
    return f": {str(known.dtype).removeprefix('torch.')}[{', '.join(map(str, known.shape))}]"


def unified(graph: GraphReport) -> str:
    """The unified diff of one graph, before to after."""
    lines = difflib.unified_diff(
        graph.before.splitlines(), graph.after.splitlines(), f"graph {graph.index} before", "after", lineterm="", n=1
    )
    return "\n".join(lines)
