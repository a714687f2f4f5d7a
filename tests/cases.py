"""Fusions at the cases that they declare: inputs, references, and the ops that they call."""

import dataclasses
import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fx_fusion.backend import compile_graph
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.options import parse
from fx_fusion.testing import make_inputs, rewriting_backend, run


def setting(fusion, device, variant=0, dtype=torch.float32, **sizes):
    """The reference of a variant, and inputs of its small case with some sizes changed."""
    case = fusion.small_case
    small = {dim: min(n, 24) for dim, n in case.sizes.items()} if case.bench else case.sizes
    case = dataclasses.replace(case, sizes={**small, **sizes})
    statics = {**case.statics, **fusion.variants[variant]} if variant else {**fusion.variants[0], **case.statics}
    inputs = make_inputs(fusion, case, statics, dtype, device)
    return reference_of(fusion, statics), inputs


def compiled(fusion, function):
    """Only this fusion: a smaller one may be a part of its reference."""
    return torch.compile(function, backend=rewriting_backend(fusions=[fusion.name]), dynamic=False)


class OpsOfOurs(TorchDispatchMode):
    """Remembers the calls of fx_fusion's ops, with copies of their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "fx_fusion":
            self.calls.append((op, tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)))
        return op(*args, **(kwargs or {}))


def calls_of(fusion, variant, device, dtype=torch.float32, **sizes):
    """The ops that a variant calls, forward and backward, with their arguments."""
    torch._dynamo.reset()
    function, inputs = setting(fusion, device, variant, dtype, **sizes)
    captured = []

    def rest(graph, example_inputs, options):
        def call(*args):
            captured.append((graph, args))
            return graph(*args)

        return call

    options = parse(None, {"select": "always", "strict": True, "fusions": [fusion.name], "defer_outputs": False})
    backend = functools.partial(compile_graph, options=options, rest=rest)
    run(torch.compile(function, backend=backend, dynamic=False), inputs, frozen=fusion.frozen)
    ((graph, args),) = captured
    with OpsOfOurs() as seen:  # Dynamo compiles nothing under such a mode
        outs = [out for out in graph(*args) if out.requires_grad]
        torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])
    return seen.calls
