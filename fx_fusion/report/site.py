"""One place in one graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fx_fusion.graph import dtypes
from fx_fusion.graph.terms import example

STATUSES = ("fused", "kept", "declined", "near")


@dataclass(frozen=True)
class Site:
    """One place in one graph.

    Attributes:
        fusion: what fits there, or nearly.
        status: one of STATUSES.
        reason: why it is not fused; what else there is to say.
        module: the path of the module that made the root node.
        location: its source as ``file.py:line``; of the innermost frame.
        shapes: the shapes of the bound inputs by parameter.
        graph: the number of the graph, in its report.
        nodes: the names of the nodes that it is about.
        made: the names of the nodes that are in their place now.
        calls: the frames that led there, outermost first, each ``path:line``.
        estimate: the facts of a ``cost.estimate.Estimate``: what it takes, and what Inductor does; empty where nobody knows.
        unmade: bytes of what the model's code makes (logits, scores) and the replacement never has in memory, by its name.
        stopped: of a near miss, the name of the node that differed first; empty for other sites.
        stopped_at: its line, as ``path:line``.
        tail: the names of nodes behind a loss up to the number that its gradients are computed for in the forward.
        matched: how many ops of the pattern fit before that, and of how many; zeros where a finder read the graph.
    """

    fusion: str
    status: str
    reason: str
    module: str
    location: str
    shapes: dict[str, str] = field(default_factory=dict)
    graph: int = 0
    nodes: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    estimate: dict[str, Any] = field(default_factory=dict)
    unmade: dict[str, int] = field(default_factory=dict)
    stopped: str = ""
    stopped_at: str = ""
    matched: tuple[int, int] = (0, 0)
    tail: tuple[str, ...] = ()


def shapes_of(inputs: Mapping[str, Any]) -> dict[str, str]:
    """``bfloat16[8, 2048]`` for each input that is a tensor."""
    tensors = {n: example(v) for n, v in inputs.items() if isinstance(example(v), torch.Tensor)}
    return {n: f"{dtypes.name(t.dtype)}{list(t.shape)}" for n, t in tensors.items()}
