"""Trace and compile a function of tensors whose number of rows changes, apart from any graph of Dynamo's.

Gone (``standalone_compile``): ``compiled_for_rows`` returns None, and the function runs uncompiled.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions as core_decompositions
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, statically_known_true

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


def traced_for_rows(
    function: Callable[..., Any], operands: Sequence[Operand], decompositions: dict[Any, Callable[..., Any]] | None = None
) -> tuple[fx.GraphModule, list[Any]]:  # fmt: skip
    """Return the graph of aten ops that ``function`` runs on operands of any number of rows, and the fake operands."""
    with unset_fake_temporarily(), without_tracing_context():
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        rows = mode.from_tensor(torch.empty(_HINT), symbolic_context=context, source=ConstantSource("rows")).shape[0]
        with mode:
            fakes = [_fake(operand, rows) for operand in operands]
        with torch.no_grad():
            gm = make_fx(function, decomposition_table=decompositions, tracing_mode="symbolic")(*fakes)
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


# Kernels without a reduction go over rows and classes, not over elements of a chunk: what each row has is loaded once a row.
# The gradient of an entropy and a log-probability of 2048 x 128256 takes 0.33 ms then, not 0.75 (H200).
_BY_ROWS = {"triton.prefer_nd_tiling": True}
# Inductor writes a value with several readers to memory where its expression has more reads or ops than these.
_RECOMPUTE = {"realize_reads_threshold": 2**20, "realize_opcount_threshold": 2**20, "realize_acc_reads_threshold": 2**20}
# Inductor visits such an expression op by op: ops in one that is computed again.
_LONGEST = 1000


def compiled_for_rows(function: Callable[..., Any], operands: Sequence[Operand]) -> Callable[..., Any] | None:
    """Return ``function`` as Inductor compiles it, for any number of rows from 2 on.

    Kernels compute what they need of a row and a class again from the operands, and write no such value to memory but the
    results: reading a chunk of logits once more costs 2 bytes a class, an intermediate value in float32 costs 8."""
    compile_ = getattr(torch._inductor, "standalone_compile", None)
    if compile_ is None:
        return None
    gm, fakes = traced_for_rows(function, operands, decompositions_of_rows())
    config = torch._inductor.config
    wanted = {**_BY_ROWS, **(_RECOMPUTE if _longest_expression(gm.graph) < _LONGEST else {})}
    patch = {name: value for name, value in wanted.items() if hasattr(config, name)}
    with unset_fake_temporarily(), without_tracing_context(), torch.no_grad(), config.patch(patch):
        return compile_(gm, fakes, dynamic_shapes="from_graph")


def _longest_expression(graph: fx.Graph) -> int:
    """Return how many ops the longest expression has in which every value is written out at each use, up to reductions."""
    ops: dict[fx.Node, int] = {}
    for node in graph.nodes:
        size, given = _numel(node), [n for n in node.all_input_nodes if n in ops]
        reduces = any(not statically_known_true(_numel(n) <= size) for n in given)
        ops[node] = 0 if node.op == "placeholder" else 1 if reduces else 1 + sum(ops[n] for n in given)
    return max(ops.values(), default=0)


def _numel(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def decompositions_of_rows() -> dict[Any, Callable[..., Any]]:
    """Return decompositions with which Inductor reads a row once for a softmax, and scatters nothing in memory.

    Inductor's own reading of ``log_softmax(x / t)`` and of ``logsumexp`` is one pass longer. Gone
    (``prims.prepare_softmax_online``): those of softmaxes are left to Inductor."""
    table: dict[Any, Callable[..., Any]] = {
        aten.scatter_add.default: _one_added,
        aten.scatter.src: _one_set,
        aten.scatter.value: _one_set,
        **core_decompositions([
            aten._log_softmax_backward_data, aten._softmax_backward_data, aten.nll_loss_forward, aten.nll_loss_backward,
        ]),
    }  # fmt: skip
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.inductor_prims")
    if hasattr(torch.ops.prims, "prepare_softmax_online"):
        table |= {aten._log_softmax.default: _log_softmax, aten._softmax.default: _softmax}
        table |= {aten.logsumexp.default: _logsumexp}
    return table


def _top_and_total(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum along a dim, and the sum of exp(x - maximum)."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.prims.prepare_softmax_online.default(x, dim)
    return found


def _log_softmax(x: torch.Tensor, dim: int, to_float: bool) -> Any:
    if x.dim() == 0 or not x.is_floating_point():
        return NotImplemented
    x = x.float() if to_float else x
    top, total = _top_and_total(x, dim)
    return x - top - total.log()


def _softmax(x: torch.Tensor, dim: int, to_float: bool) -> Any:
    if x.dim() == 0 or not x.is_floating_point():
        return NotImplemented
    x = x.float() if to_float else x
    top, total = _top_and_total(x, dim)
    return (x - top).exp() / total


def _logsumexp(x: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> Any:
    if x.dim() == 0 or not x.is_floating_point() or len(dims) != 1:
        return NotImplemented
    top, total = _top_and_total(x, dims[0])
    found = torch.where(top.abs() == float("inf"), top, top + total.log())
    return found if keepdim else found.squeeze(dims[0])


def _is_one(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor | None:
    """Return where a scatter along the last dim changes x, which it does in at most one place a row; None for others."""
    last = x.dim() - 1
    if x.dim() == 0 or index.dim() != x.dim() or dim not in (-1, last) or not statically_known_true(index.shape[-1] == 1):
        return None
    if not all(statically_known_true(a == b) for a, b in zip(index.shape[:-1], x.shape[:-1], strict=True)):
        return None
    return torch.arange(x.shape[-1], device=x.device) == index


def _one_added(x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> Any:
    there = _is_one(x, dim, index)
    return NotImplemented if there is None else x + torch.where(there, src, 0)


def _one_set(x: torch.Tensor, dim: int, index: torch.Tensor, src: Any) -> Any:
    there = _is_one(x, dim, index)
    return NotImplemented if there is None else torch.where(there, src, x)
