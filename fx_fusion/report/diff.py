"""A graph as rows, one a node, and the unified diff of two."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fx_fusion.graph import dtypes
from fx_fusion.graph.places import location_of, module_of
from fx_fusion.graph.terms import example
from fx_fusion.torch_internals.nodes import is_operator


class Row(NamedTuple):
    """One node. ``text``: ``name: dtype[shape] = op(operands)``, indented in the body of a higher-order op; ``operands``:
    their names; ``module`` and ``location``: where it comes from."""

    name: str
    text: str
    operands: tuple[str, ...] = ()
    module: str = ""
    location: str = ""


def rows(module: fx.GraphModule) -> tuple[Row, ...]:
    """Every node of a module, inputs left out, and of the bodies inside it."""
    return tuple(_rows(module))


def _rows(module: fx.GraphModule) -> Iterator[Row]:
    for node in module.graph.nodes:
        if node.op != "placeholder":
            operands = tuple(n.name for n in node.all_input_nodes)
            yield Row(node.name, _line(node), operands, module_of(node), location_of(node))
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            yield Row("", f"{name}:")
            for row in _rows(child):
                yield Row(row.name, "  " + row.text, row.operands, row.module, row.location)


def text(rows: Sequence[Row]) -> str:
    """A line a node."""
    return "\n".join(row.text for row in rows)


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
