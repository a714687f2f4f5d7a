"""Two versions of one graph: one that assumes a padding mask of ones, and the exact one.

Collators pass an ``attention_mask`` with every batch, nearly always all ones; then attention is causal. The graph is
compiled under that assumption. Before each call the assumption is checked (one small reduction and one host sync,
skipped while the same tensor comes back unchanged); where it does not hold, the exact graph runs, compiled at first need.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from fx_fusion.options import Options

Compiled = Callable[..., Any]


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
    fast: Compiled, assumptions: Assumptions, exact_graph: fx.GraphModule, options: Options, rest: Compiled
) -> Compiled:
    """Call ``fast`` where the assumptions hold, else the exact graph, whose ``rest`` is compiled like the fast one's."""
    positions = assumptions.positions()
    if not positions:
        return fast
    checks = [AllOnes() for _ in positions]
    exact: list[Compiled] = []

    def run(*args: Any) -> Any:
        if all(check(args[i]) for check, i in zip(checks, positions, strict=True)):
            return fast(*args)
        if not exact:
            exact.append(_compile_exact(exact_graph, options, rest))
        return exact[0](*args)

    run.checks = checks  # type: ignore[attr-defined]
    return run


def _compile_exact(graph: fx.GraphModule, options: Options, rest: Compiled) -> Compiled:
    """Compile outside of the frame that Dynamo is running: a compilation of its own, guards and dynamic shapes too."""
    from fx_fusion.backend import compile_graph

    without = replace(options, speculate=False)
    return torch.compile(graph, backend=lambda gm, inputs: compile_graph(gm, inputs, without, rest))
