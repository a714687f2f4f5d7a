"""Trace and compile a function of tensors whose number of rows changes, apart from any graph of Dynamo's.

Gone (``standalone_compile``): ``compiled_for_rows`` returns None, and the function runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fx_fusion.torch_internals.fakes import fake_mode_of, without_guards, without_tracing_context

aten = torch.ops.aten
_HINT = 1024  # rows


@dataclass(frozen=True)
class Operand:
    """An operand of the function: ``per_row``, it has a first dim of rows in front of ``shape``.

    ``stride``: of that first dim, in elements; None for a contiguous operand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    per_row: bool
    stride: int | None = None


def traced_for_rows(function: Callable[..., Any], operands: Sequence[Operand]) -> tuple[fx.GraphModule, list[Any]]:
    """Return the graph of aten ops that ``function`` runs on operands of any number of rows, and the fake operands."""
    with unset_fake_temporarily(), without_tracing_context():
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        rows = mode.from_tensor(torch.empty(_HINT), symbolic_context=context, source=ConstantSource("rows")).shape[0]
        with mode:
            fakes = [_fake(operand, rows) for operand in operands]
        with torch.no_grad():
            gm = make_fx(function, tracing_mode="symbolic")(*fakes)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm, fakes


def _fake(operand: Operand, rows: Any) -> torch.Tensor:
    sizes = (rows, *operand.shape) if operand.per_row else operand.shape
    strides: list[int] = []
    step = 1
    for size in reversed(operand.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    if operand.per_row:
        strides.insert(0, operand.stride or step)
    return torch.empty_strided(sizes, strides, dtype=operand.dtype, device=operand.device)


def traced_gradient(
    function: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor],
    leaves: list[torch.Tensor],
    others: list[torch.Tensor],
) -> fx.Graph | None:
    """Return the graph of the gradients of ``function(leaves, others)``, a number, with respect to ``leaves``.

    The operands are fake tensors of one mode. The graph's placeholders are ``leaves`` and ``others``; it returns a gradient,
    or None, for each leaf. Returns None where the function can't be traced."""

    def gradient(*flat: torch.Tensor) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            given = [t.detach().requires_grad_(t.is_floating_point()) for t in flat[: len(leaves)]]
            number = function(given, list(flat[len(leaves) :]))
            wanted = [t for t in given if t.requires_grad]
            one = torch.ones((), dtype=number.dtype, device=number.device)
            found = iter(torch.autograd.grad(number, wanted, one, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in given]

    mode = fake_mode_of(leaves[0])
    if mode is None:
        return None
    tracing = "symbolic" if any(isinstance(n, torch.SymInt) for t in (*leaves, *others) for n in t.shape) else "fake"
    with without_tracing_context(), without_guards(mode), torch.no_grad():
        try:
            gm = make_fx(gradient, tracing_mode=tracing)(*leaves, *others)
        except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None
    for node in gm.graph.nodes:
        fill = _FILLS.get(node.target) if node.op == "call_function" else None
        value = node.meta.get("val")
        if fill is None or not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
            continue
        with gm.graph.inserting_before(node):
            words = {"dtype": value.dtype, "device": value.device}
            node.replace_all_uses_with(gm.graph.call_function(aten.full.default, (list(value.shape), fill(node)), words))
    gm.graph.eliminate_dead_code()
    return gm.graph


# Ops that read the shape of their operand, and no value; what they fill a tensor with.
_FILLS: dict[Any, Callable[[fx.Node], Any]] = {
    aten.ones_like.default: lambda node: 1,
    aten.zeros_like.default: lambda node: 0,
    aten.new_ones.default: lambda node: 1,
    aten.new_zeros.default: lambda node: 0,
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
}


def compiled_for_rows(function: Callable[..., Any], operands: Sequence[Operand]) -> Callable[..., Any] | None:
    """Return ``function`` as Inductor compiles it, for any number of rows from 2 on."""
    compile_ = getattr(torch._inductor, "standalone_compile", None)
    if compile_ is None:
        return None
    gm, fakes = traced_for_rows(function, operands)
    with unset_fake_temporarily(), without_tracing_context(), torch.no_grad():
        return compile_(gm, fakes, dynamic_shapes="from_graph")
