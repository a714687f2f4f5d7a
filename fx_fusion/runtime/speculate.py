"""Versions of one graph: one that assumes a padding mask of ones, or a causal mask, and others for where that is not so.

Collators pass an ``attention_mask`` with every batch, nearly always all ones; then attention is causal. The graph is
compiled under that assumption. Before each call the assumption is checked (one small reduction and one host sync, skipped
while the same tensor comes back unchanged, or batches are padded one after another); where it does not hold, another
version runs, compiled at first need.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.masks.assumed import GUESS, KINDS, ONES
from fx_fusion.graph.terms import example
from fx_fusion.runtime.mask_values import Padding, is_of_kind
from fx_fusion.torch_internals.dynamo import capturing_items
from fx_fusion.torch_internals.fakes import FakeTensor
from fx_fusion.torch_internals.nodes import write_for_dynamo

Compiled = Callable[..., Any]
_numbers = itertools.count()


@dataclass
class Calls:
    """How often a graph with assumptions was called: as assumed, and otherwise. Counted for as long as the process runs."""

    assumed: int = 0
    otherwise: int = 0


def speculate(
    fast: Compiled,
    checks: Sequence[tuple[int, str]],
    compile_version: Callable[[bool, str | None], Compiled],
    calls: Calls,
) -> Compiled:
    """Call ``fast`` where the arguments are what it assumes, else another version, made at first need; count both.

    Args:
        checks: positions of arguments, and what they have to be: all ones, or a kind of mask.
        compile_version: returns the version for padding that is all ones or not, and for masks of the best kind that all of
            them are of (None if there is none; a guess if there are no masks).
    """
    if not checks:
        return fast
    ones = {i: Padding() for i, kind in checks if kind == ONES}
    masks = [(i, kind) for i, kind in checks if kind != ONES]
    versions: dict[tuple[bool, str | None], Compiled] = {}

    def run(*args: Any) -> Any:
        if any(isinstance(args[i], FakeTensor) or args[i].is_meta for i, _ in checks):
            return fast(*args)  # who has no values asks for the types of the results: all versions have the same
        on_gpu = any(args[i].is_cuda for i, _ in checks)
        unknown = on_gpu and torch.cuda.is_current_stream_capturing()  # whoever replays the kernels brings other masks
        held = not unknown and all(padding.is_absent(args[i]) for i, padding in ones.items())
        if held and all(is_of_kind(args[i], kind) for i, kind in masks):
            calls.assumed += 1
            return fast(*args)
        calls.otherwise += 1
        kinds = () if unknown else KINDS
        best = next((kind for kind in kinds if all(is_of_kind(args[i], kind) for i, _ in masks)), None)
        version = held, best if masks else GUESS
        if version not in versions:
            versions[version] = compile_version(*version)
        return versions[version](*args)

    return run


def compiled_apart(
    graph: fx.GraphModule,
    backend: Callable[..., Compiled],
    around: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Compiled:
    """``torch.compile(graph, backend=backend)`` outside of the frame that Dynamo is running: a compilation of its own, with
    guards and dynamic shapes of its own. Each call runs inside of ``around()``."""

    write_for_dynamo(graph)

    def forward(*args: Any) -> Any:
        return graph(*args)  # Dynamo skips the code that the graph module was made with while Dynamo ran

    # Dynamo keeps versions, limits and sizes by code object and its name: each graph has its own.
    forward.__code__ = forward.__code__.replace(co_name=f"graph_without_assumptions_{next(_numbers)}")
    # Sizes that come in as numbers beside tensors: symbolic, as in the graph, or a tensor whose dims the user marked as
    # dynamic contradicts them.
    symbolic = any(isinstance(example(n), torch.SymInt) for n in graph.graph.find_nodes(op="placeholder"))
    compiled = torch.compile(forward, backend=backend, dynamic=True if symbolic else None)

    # A float that changes comes in as a tensor, and the graph takes it out.
    takes_numbers = bool(graph.graph.find_nodes(op="call_method", target="item"))
    called: list[bool] = []

    def call(*args: Any) -> Any:
        with around(), capturing_items() if takes_numbers else contextlib.nullcontext():
            return compiled(*args)

    def run(*args: Any) -> Any:
        # The first call compiles what the user's first call would have: no recompilation for a stance to refuse.
        if called:
            return call(*args)
        called.append(True)
        with torch.compiler.set_stance("default"):
            results = call(*args)
        # Compilers leave exceptions behind in cycles, and those hold the frames of all callers: a training loop's logits.
        # Dynamo collects the young ones.
        gc.collect()
        return results

    return run
