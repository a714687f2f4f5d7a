"""A graph as text, one node a line, and the unified diff of two."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import fx

from fx_fusion.graph import dtypes
from fx_fusion.graph.terms import example
from fx_fusion.torch_internals.nodes import is_operator


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
    if is_operator(node.target):
        return str(node.target).removesuffix(".default")
    if node.op == "call_method":
        return f".{node.target}"
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _type(node: fx.Node) -> str:
    known = example(node)
    if not isinstance(known, torch.Tensor):
        return ""
    return f": {dtypes.name(known.dtype)}[{', '.join(map(str, known.shape))}]"


def unified(before: str, after: str, title: str) -> str:
    """The unified diff of two texts."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"{title} before", "after", lineterm="", n=1)
    return "\n".join(lines)
