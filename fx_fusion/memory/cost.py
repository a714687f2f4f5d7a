"""How long it takes to have a value again, and how long a step takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fx_fusion.graph.size_hints import expected
from fx_fusion.memory.candidates import Candidate
from fx_fusion.torch_internals.inductor import bytes_per_second, flops_per_second

_LAUNCH = 3e-6  # seconds between two kernels
_REACHED = 0.55  # of the peak: what a step of a Llama reaches on an H200, all of it counted


def seconds_again(candidate: Candidate) -> float:
    """The time for one value: its traffic at the speed of the memory, and its launches."""
    return candidate.traffic / bytes_per_second(_device(candidate.node)) + candidate.launches * _LAUNCH


def seconds_of_step(graph: fx.Graph) -> float:
    """A low estimate of the time of forward and backward: their products and attention."""
    counted = [(flops, node) for node in graph.nodes if (flops := _flops(node)) > 0]
    if not counted:
        return 0.0
    _, largest = max(counted, key=lambda item: item[0])
    total = sum(flops for flops, _ in counted)
    return total / (_REACHED * flops_per_second(_device(largest), _first(largest).dtype))


def is_expensive(node: fx.Node) -> bool:
    """Whether a node is a product, a convolution, attention or a loss over a vocabulary."""
    return node.op == "call_function" and (_packet(node) in flop_registry or "attention" in str(node.target))


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", node.target)


def _flops(node: fx.Node) -> float:
    formula = flop_registry.get(_packet(node)) if is_expensive(node) else None
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return expected(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _first(node: fx.Node) -> Tensor:
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    return next(value for value in values if isinstance(value, Tensor))


def _device(node: fx.Node) -> torch.device:
    return _first(node).device
