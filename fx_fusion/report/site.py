"""One place in one graph, and where a node comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fx_fusion.graph import dtypes
from fx_fusion.graph.terms import example

STATUSES = ("fused", "kept", "declined", "near")


@dataclass(frozen=True)
class Site:
    """One place in one graph.

    ``module`` is the path of the module that made the root node, ``location`` its source as ``file.py:line``,
    ``shapes`` the shapes of the bound inputs by parameter.
    """

    fusion: str
    status: str
    reason: str
    module: str
    location: str
    shapes: dict[str, str] = field(default_factory=dict)
    graph: int = 0


def module_of(node: fx.Node) -> str:
    """The path of the innermost module that made the node, as ``layers.0.mlp``; empty for a free function."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]", lambda m: "." + (m.group(1) or m.group(2)), str(path))
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return re.sub(r"^(L\.)?self\.|^L\.?(self)?\.?", "", path).lstrip(".").removeprefix("fn.")


def location_of(node: fx.Node) -> str:
    """``file.py:line`` of the user's code that made the node."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def shapes_of(inputs: Mapping[str, Any]) -> dict[str, str]:
    """``bfloat16[8, 2048]`` for each input that is a tensor."""
    tensors = {n: example(v) for n, v in inputs.items() if isinstance(example(v), torch.Tensor)}
    return {n: f"{dtypes.name(t.dtype)}{list(t.shape)}" for n, t in tensors.items()}
