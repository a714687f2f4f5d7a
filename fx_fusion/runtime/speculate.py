"""Two versions of one graph: one that assumes a padding mask of ones, and the exact one.

Collators pass an ``attention_mask`` with every batch, nearly always all ones; then attention is causal. The graph is
compiled under that assumption. Before each call the assumption is checked (one small reduction and one host sync,
skipped while the same tensor comes back unchanged); where it does not hold, the exact graph runs, compiled at first need.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fx_fusion.graph.view import value
from fx_fusion.report.report import Calls, Report, recording_in

Compiled = Callable[..., Any]
_numbers = itertools.count()


class Assumptions:
    """The inputs of one graph that its rewrites take to be all ones."""

    def __init__(self, gm: fx.GraphModule | None, *, allowed: bool):
        self.allowed = allowed and gm is not None
        self._places = {} if gm is None else {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
        self._used: dict[fx.Node, int] = {}

    @staticmethod
    def none() -> Assumptions:
        """For graphs whose inputs are not seen at run time (bodies of higher-order ops)."""
        return Assumptions(None, allowed=False)

    def assume(self, inputs: Iterable[fx.Node]) -> None:
        """From now on the graph is right only if these inputs are all ones."""
        for node in inputs:
            self._used[node] = self._places[node]

    def positions(self) -> tuple[int, ...]:
        return tuple(self._used.values())

    def sentences(self) -> tuple[str, ...]:
        return tuple(f"{str(n.target).strip('_').removeprefix('L_')} is all ones" for n in self._used)


class AllOnes:
    """Whether a tensor is all ones, remembered while the same tensor comes back unchanged. A tensor in CPU memory is read
    each time: that costs no synchronisation, and its memory may belong to NumPy as well. On a GPU, a write that PyTorch
    is not told of (through ``.data``) goes unnoticed."""

    def __init__(self) -> None:
        self._seen: Any = lambda: None
        self._version = -1
        self._verdict = False
        self.checks = 0  # how often the tensor was really read

    def __call__(self, tensor: Tensor) -> bool:
        version = -1 if tensor.is_inference() else tensor._version
        if self._seen() is tensor and version == self._version and version >= 0 and tensor.device.type != "cpu":
            return self._verdict
        with torch.no_grad():
            self._verdict = bool((tensor if tensor.dtype == torch.bool else tensor == 1).all())
        self.checks += 1
        self._seen, self._version = weakref.ref(tensor), version
        return self._verdict


def speculate(
    fast: Compiled, assumptions: Assumptions, compile_exact: Callable[[], Compiled], calls: Calls
) -> Compiled:  # fmt: skip
    """Call ``fast`` where the assumptions hold, else what ``compile_exact`` returns, made at first need; count both."""
    positions = assumptions.positions()
    if not positions:
        return fast
    checks = [AllOnes() for _ in positions]
    exact: list[Compiled] = []

    def run(*args: Any) -> Any:
        if any(isinstance(args[i], FakeTensor) or args[i].is_meta for i in positions):
            return fast(*args)  # who has no values asks for the types of the results: both versions have the same
        if all(check(args[i]) for check, i in zip(checks, positions, strict=True)):
            calls.assumed += 1
            return fast(*args)
        calls.otherwise += 1
        if not exact:
            exact.append(compile_exact())
        return exact[0](*args)

    run.checks = checks  # type: ignore[attr-defined]
    return run


def compiled_apart(
    graph: fx.GraphModule, backend: Callable[..., Compiled], reports: Iterable[weakref.ref[Report]]
) -> Compiled:  # fmt: skip
    """``torch.compile(graph, backend=backend)`` outside of the frame that Dynamo is running: a compilation of its own, with
    guards and dynamic shapes of its own. What it compiles is added to ``reports``, whenever that is."""
    def forward(*args: Any) -> Any:
        return graph(*args)  # Dynamo skips the code that the graph module was made with while Dynamo ran

    # Dynamo keeps versions, limits and sizes by code object and its name: each graph has its own.
    forward.__code__ = forward.__code__.replace(co_name=f"graph_without_assumptions_{next(_numbers)}")
    # Sizes that come in as numbers beside tensors: symbolic, as in the graph, or a tensor whose dims the user marked as
    # dynamic contradicts them.
    symbolic = any(isinstance(value(n), torch.SymInt) for n in graph.graph.nodes if n.op == "placeholder")
    compiled = torch.compile(forward, backend=backend, dynamic=True if symbolic else None)

    called: list[bool] = []

    def run(*args: Any) -> Any:
        # The first call compiles what the user's first call would have: no recompilation for a stance to refuse.
        stance: Any = contextlib.nullcontext() if called else torch.compiler.set_stance("default")
        called.append(True)
        with stance, recording_in([report for reference in reports if (report := reference()) is not None]):
            return compiled(*args)

    return run
