"""A graph as rows, one a node."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fx_fusion.graph import dtypes
from fx_fusion.graph.places import location_of, module_of
from fx_fusion.graph.terms import example
from fx_fusion.torch_internals.dynamo import parameter_path
from fx_fusion.torch_internals.nodes import is_operator, schemas_of


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
        return f"return {_argument(node.args[0])}"
    made = f"{node.name}{_type(example(node))} = "
    if node.target is operator.getitem and len(node.args) == 2:
        return f"{made}{_argument(node.args[0])}[{_index(node.args[1])}]"
    schemas = schemas_of(node.target) or []
    names = [parameter.name for parameter in schemas[0].arguments] if len(schemas) == 1 else []
    named = dict(zip(names, node.args, strict=False)) | node.kwargs
    arguments = [*map(_argument, node.args[len(names) :]), *(f"{k}={_argument(v)}" for k, v in named.items())]
    return f"{made}{_target(node)}({', '.join(arguments)})"


def _argument(item: Any) -> str:
    """An operand as Python has it: nodes by name, parameters of the model by their path."""
    if isinstance(item, fx.Node):
        return parameter_path(item) or item.name
    if isinstance(item, (tuple, list)):
        inner = ", ".join(map(_argument, item)) + "," * (isinstance(item, tuple) and len(item) == 1)
        return f"({inner})" if isinstance(item, tuple) else f"[{inner}]"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(value)}" for key, value in item.items()) + "}"
    return repr(item) if isinstance(item, str) else str(item)


def _index(item: Any) -> str:
    """Return what stands between the brackets of a subscript."""
    if isinstance(item, tuple) and item:
        return ", ".join(map(_index, item)) + "," * (len(item) == 1)
    if isinstance(item, slice):
        start, stop, step = ("" if part is None else _argument(part) for part in (item.start, item.stop, item.step))
        return f"{start}:{stop}" + f":{step}" * bool(step)
    return "..." if item is Ellipsis else _argument(item)


def _target(node: fx.Node) -> str:
    if is_operator(node.target):
        return str(node.target).removesuffix(".default")
    if node.op == "call_method":
        return f".{node.target}"
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _type(value: Any) -> str:
    found = _kind(value)
    return f": {found}" if found else ""


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return dtypes.kind_of(value)
    if isinstance(value, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in value):
        return f"({', '.join(_kind(one) or str(one) for one in value)})"
    return ""
