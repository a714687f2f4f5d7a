"""Tiny fusions for tests of the engine: patterns, an op on CPU for each, no gradient."""

import torch

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.ops.fused_op import FusedOp
from fx_fusion.ops.on_cpu import Reference
from fx_fusion.torch_internals.nodes import namespace_of

LIBRARY = torch.library.Library("fx_fusion_tests_tiny", "DEF")


def op(name, schema, function, *, fake=None, where=""):
    """``fx_fusion_tests_tiny::name``, as a kernel. ``fake``: what it makes, if not what ``function`` makes."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"fx_fusion_tests_tiny::{name}", fake or function, lib=LIBRARY)
    overload = getattr(torch.ops.fx_fusion_tests_tiny, name).default
    return FusedOp(name, overload, ("y",), Reference(where or f"{__name__}:{name}"), __name__)


def dyt(x, alpha, weight, bias):
    """Zhu et al. 2025, arXiv:2503.10622."""
    return torch.tanh(alpha * x) * weight + bias


def scaled_tanh(x, alpha):
    return torch.tanh(alpha * x)


def both(x, y):
    return x.sigmoid() + y, x.sigmoid() * 2


DYT = op("dyt", "(Tensor x, float alpha, Tensor weight, Tensor bias) -> Tensor y", dyt)
SCALED_TANH = op("scaled_tanh", "(Tensor x, float alpha) -> Tensor y", scaled_tanh)
BOTH = op("both", "(Tensor x, Tensor y) -> (Tensor, Tensor)", both)
# Results that look otherwise than the pattern's.
NARROW = op("narrow", "(Tensor x, float alpha) -> Tensor y", lambda x, alpha: scaled_tanh(x, alpha).half(), where=f"{__name__}:scaled_tanh")
STRIDED = op("strided", "(Tensor x, float alpha) -> Tensor y", lambda x, alpha: scaled_tanh(x, alpha).t().contiguous().t(), where=f"{__name__}:scaled_tanh")
REFUSING = op("refusing", "(Tensor x, float alpha, Tensor weight, Tensor bias) -> Tensor y", lambda x, alpha, weight, bias: x[:1], where=f"{__name__}:dyt")


def fusion_dyt(**changes):
    """``tanh(alpha x) weight + bias``, declared as it should be; ``changes`` to that."""
    fields = {"name": "dyt", "pattern": dyt, "inputs": {"x": "... n", "alpha": 0.5, "weight": "n", "bias": "n"}, "kernel": DYT, "on_cpu": True}
    return Fusion(**{**fields, **changes})


def fusion_tanh(**changes):
    """``tanh(alpha x)``, a part of the other."""
    fields = {"name": "scaled_tanh", "pattern": scaled_tanh, "inputs": {"x": "... n", "alpha": 0.5}, "kernel": SCALED_TANH, "on_cpu": True}
    return Fusion(**{**fields, **changes})


def fusion_both(**changes):
    """Two results, of which neither is made of the other: found by no pattern."""
    fields = {"name": "both", "pattern": both, "inputs": {"x": "... n", "y": "... n"}, "kernel": BOTH, "on_cpu": True, "find": lambda search: ()}
    return Fusion(**{**fields, **changes})


def calls(graph):
    """The names of the tiny ops that a graph calls, in order."""
    ops = [n.target for n in graph.nodes if n.op == "call_function" and namespace_of(n.target) == "fx_fusion_tests_tiny"]
    return [target.name().removeprefix("fx_fusion_tests_tiny::") for target in ops]
