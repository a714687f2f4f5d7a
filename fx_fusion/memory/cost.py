"""Estimate how long it takes to have a value again, and how long a step takes.

The peak of a GPU is reckoned from its multiprocessors: what Inductor has for it is meant for comparisons, and is 1000 times
too small for an H200 (torch 2.11 with triton 3.6).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fx_fusion.graph.dtypes import on_tensor_cores
from fx_fusion.graph.size_hints import expected
from fx_fusion.memory.candidates import Candidate
from fx_fusion.memory.joint_graph import JointGraph, base, bytes_of, users
from fx_fusion.torch_internals.inductor import bytes_per_second
from fx_fusion.torch_internals.partitioner import is_empty, is_fusible, is_view

_LAUNCH = 3e-6  # seconds between two kernels
_REACHED = 0.6  # of the peak: what the products of a step of a Llama reach on an H200, all of its time counted
# FLOPs a second of one multiprocessor: dense products in 16 bits by compute capability, float32 without tensor cores.
_PEAKS = {(7, 0): 1.5e12, (8, 0): 2.9e12, (9, 0): 7.4e12, (10, 0): 15e12, (10, 3): 15e12}
_PEAK_OF_GRAPHICS, _PEAK_IN_FLOAT32 = 2.4e12, 4e11
_PEAK_OF_A_CORE = 5e10  # of a CPU


def seconds_again(candidate: Candidate) -> float:
    """The time for one value: its traffic at the speed of the memory, and its launches."""
    return candidate.traffic / bytes_per_second(_device(candidate.node)) + candidate.launches * _LAUNCH


def seconds_of_step(joint: JointGraph) -> float:
    """The time of forward and backward: their products and attention, and what all other kernels read and write."""
    counted = [(flops, node) for node in joint.graph.nodes if (flops := _flops(node)) > 0]
    if not counted:
        return 0.0
    _, largest = max(counted, key=lambda item: item[0])
    total = sum(flops for flops, _ in counted)
    device = _device(largest)
    return total / (_REACHED * flops_per_second(device, _first(largest).dtype)) + _traffic(joint) / bytes_per_second(device)


def _traffic(joint: JointGraph) -> float:
    """Bytes that kernels read and write which are no products: ours by themselves; Inductor's at their borders."""
    read, moved = set[tuple[fx.Node, bool]](), 0.0
    for node in (n for n in joint.graph.nodes if n.op == "call_function" and not is_view(n) and not is_empty(n)):
        backward = node in joint.backward
        if is_fusible(node):
            sources = map(base, node.all_input_nodes)
            read.update((s, backward) for s in sources if not is_fusible(s) or (s in joint.backward) != backward)
            if any(not is_fusible(user) or (user in joint.backward) != backward for user in users(node)):
                moved += bytes_of(node)
        elif node.target is not operator.getitem and not is_expensive(node):
            results = [node, *(u for u in node.users if u.target is operator.getitem)]
            moved += sum(map(bytes_of, (*results, *node.all_input_nodes)))
    return moved + sum(bytes_of(node) for node, _ in read)


def flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """The peak of a device in products of this dtype; of a GPU that is not here, an H200's."""
    if device.type != "cuda":
        return _PEAK_OF_A_CORE * torch.get_num_threads()
    capability, processors = (9, 0), 132
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        capability, processors = (properties.major, properties.minor), properties.multi_processor_count
    peak = _PEAKS.get(capability, _PEAK_OF_GRAPHICS)
    if dtype.itemsize > 2:
        peak = peak / 2 if on_tensor_cores(dtype) else _PEAK_IN_FLOAT32
    return peak * processors


def is_expensive(node: fx.Node) -> bool:
    """Return True for a product, a convolution, attention or a loss over a vocabulary."""
    counted = _packet(node) in flop_registry or "attention" in str(node.target) or _is_grouped(node)
    return node.op == "call_function" and counted


def _is_grouped(node: fx.Node) -> bool:
    """Return True for a grouped product, of torch or of transformers. torch 2.15 counts no FLOPs of them."""
    return "grouped_mm" in str(node.target)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", node.target)


def _flops(node: fx.Node) -> float:
    if node.op == "call_function" and _is_grouped(node) and isinstance(node.meta.get("val"), Tensor):
        left, right = (_sizes(n) for n in node.all_input_nodes[:2])  # each row or column is in one group
        return 2 * math.prod(left) * right[-1]
    formula = flop_registry.get(_packet(node)) if is_expensive(node) else None
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        return expected(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except AssertionError:  # torch 2.11's formulas know no attention with fewer heads of keys
        return 0


def _sizes(node: fx.Node) -> tuple[float, ...]:
    """Return the sizes of a node's tensor, symbolic ones as they were when the graph was captured."""
    return tuple(expected(size) for size in node.meta["val"].shape)


def _first(node: fx.Node) -> Tensor:
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    return next(value for value in values if isinstance(value, Tensor))


def _device(node: fx.Node) -> torch.device:
    return _first(node).device
