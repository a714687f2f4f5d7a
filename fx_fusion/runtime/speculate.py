"""Versions of one graph: one that assumes a padding mask of ones, or a causal mask, and others for where that is not so.

Collators pass an ``attention_mask`` with every batch, nearly always all ones; then attention is causal. The graph is
compiled under that assumption, unless the batch that it is compiled for is padded. Before each call the assumption is
checked (one small reduction and one host sync, skipped while the same tensor comes back unchanged, or batches are padded one
after another); for what the graph was not compiled for another version runs, compiled at first need.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.graph.masks.assumed import GUESS, KINDS, ONES
from fx_fusion.graph.terms import example
from fx_fusion.runtime.capture import is_capturing
from fx_fusion.runtime.mask_values import Padding, is_of_kind
from fx_fusion.torch_internals.dynamo import NOT_COMPILED, capturing_items, compiling_alone
from fx_fusion.torch_internals.fakes import FakeTensor, unset_fake_temporarily
from fx_fusion.torch_internals.nodes import write_for_dynamo

Compiled = Callable[..., Any]
Checks = Sequence[tuple[int, str]]
"""Positions of arguments, and what is assumed of them: all ones, or a kind of mask."""
Inputs = tuple[bool, str | None] | None
"""What the arguments of a call are: as assumed (None), or whether padding is all ones, and the best kind that all masks are
of (None if there is none; a guess if there are no masks)."""
_numbers = itertools.count()


@dataclass
class Calls:
    """The numbers of calls of a graph with assumptions: as assumed, and otherwise. Counted for as long as the process
    runs."""

    assumed: int = 0
    otherwise: int = 0


def speculate(
    first: Compiled, of_first: Inputs, checks: Checks, compile_version: Callable[[Inputs], Compiled], calls: Calls,
    of_first_alone: Calls | None = None,
) -> Compiled:  # fmt: skip
    """Call the version of a graph for what its arguments are, made at first need: ``first`` is the one for ``of_first``.
    Count how often they are what was assumed of them; ``of_first_alone``: the counter of ``first``, which counts only the
    calls that reach it."""
    if not checks:
        return first
    padding = {i: Padding() for i, kind in checks if kind == ONES}
    versions: dict[Inputs, Compiled] = {of_first: first}

    def run(*args: Any) -> Any:
        if any(_has_no_values(args[i]) for i, _ in checks):
            return first(*args)  # who has no values asks for the types of the results: all versions have the same
        inputs = _inputs_of(checks, args, lambda i: padding[i].is_absent(args[i]))
        calls.assumed += inputs is None
        calls.otherwise += inputs is not None
        if of_first_alone is not None:
            of_first_alone.otherwise += inputs != of_first
        if inputs in versions:
            return versions[inputs](*args)
        version = compile_version(inputs)
        if not is_capturing():  # else it is the graph as it is
            versions[inputs] = version
        return version(*args)

    return run


def first_inputs(checks: Checks, examples: Sequence[Any]) -> Inputs:
    """Return what the arguments are that a graph is compiled for, as far as they have values; else as assumed."""
    if not checks or not all(isinstance(examples[i], torch.Tensor) and not _has_no_values(examples[i]) for i, _ in checks):
        return None
    with unset_fake_temporarily():
        return _inputs_of(checks, examples, lambda i: is_of_kind(examples[i], ONES))


def _has_no_values(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _inputs_of(checks: Checks, args: Sequence[Any], is_absent: Callable[[int], bool]) -> Inputs:
    """``is_absent``: whether the padding at a position is all ones."""
    on_gpu = any(args[i].is_cuda for i, _ in checks)
    unknown = on_gpu and is_capturing()  # whoever replays the kernels brings other masks
    masks = [(i, kind) for i, kind in checks if kind != ONES]
    ones = not unknown and all(is_absent(i) for i, kind in checks if kind == ONES)
    if ones and all(is_of_kind(args[i], kind) for i, kind in masks):
        return None
    kinds = () if unknown else KINDS
    best = next((kind for kind in kinds if all(is_of_kind(args[i], kind) for i, _ in masks)), None)
    return ones, best if masks else GUESS


def compiled_apart(
    graph: fx.GraphModule,
    backend: Callable[..., Compiled],
    around: Callable[[], contextlib.AbstractContextManager[Any]],
    failed: Callable[[BaseException], None],
    *,
    sizes_change: bool = False,
) -> Compiled:
    """``torch.compile(graph, backend=backend)`` outside of the frame that Dynamo is running: a compilation of its own, with
    guards and dynamic shapes of its own. Each call runs inside of ``around()``. Where it cannot be compiled, ``failed`` is
    told, and it runs as it is. ``sizes_change``: of its arguments, from call to call, and equal ones stay equal. Raises
    RuntimeError while a CUDA graph is captured."""
    if is_capturing():
        raise RuntimeError("nothing is compiled while a CUDA graph is captured: call the model with a padded batch before")
    write_for_dynamo(graph)

    def forward(*args: Any) -> Any:
        return graph(*args)  # Dynamo skips the code that the graph module was made with while Dynamo ran

    # Dynamo keeps versions, limits and sizes by code object and its name: each graph has its own.
    forward.__code__ = forward.__code__.replace(co_name=f"graph_without_assumptions_{next(_numbers)}")
    # Sizes that come in as numbers beside tensors: symbolic, as in the graph, or a tensor whose dims the user marked as
    # dynamic contradicts them.
    symbolic = sizes_change or any(isinstance(example(n), torch.SymInt) for n in graph.graph.find_nodes(op="placeholder"))
    with compiling_alone():
        compiled = torch.compile(forward, backend=backend, dynamic=True if symbolic else None)

    # A float that changes comes in as a tensor, and the graph takes it out.
    takes_numbers = bool(graph.graph.find_nodes(op="call_method", target="item"))
    called: list[bool] = []
    gone: list[BaseException] = []

    def call(*args: Any) -> Any:
        with around(), compiling_alone(), capturing_items() if takes_numbers else contextlib.nullcontext():
            return compiled(*args)

    def run(*args: Any) -> Any:
        # The first call compiles what the user's first call would have: no recompilation for a stance to refuse.
        if gone:
            return graph(*args)
        if called:
            return call(*args)
        called.append(True)
        try:
            with torch.compiler.set_stance("default"):
                results = call(*args)
        except NOT_COMPILED as error:
            failed(error)
            gone.append(error.with_traceback(None))
            return graph(*args)
        # Compilers leave exceptions behind in cycles, and those hold the frames of all callers: a training loop's logits.
        # Dynamo collects the young ones.
        gc.collect()
        return results

    return run
