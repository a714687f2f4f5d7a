"""A pattern function, traced once and read through the canonical view.

The structure of a pattern doesn't depend on dtypes. Its dtype policy does: where it computes in float32, where a cast
rounds. So the policy is computed for the dtypes of each match, by running the traced function on fake tensors of those
dtypes, and compared with what the graph does. A kernel implements its pattern's policy and no other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.tracing import results_of, trace
from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.graph.effects import entered
from fx_fusion.graph.terms import example
from fx_fusion.graph.view import View
from fx_fusion.torch_internals.fakes import FakeTensorMode, fake_mode_of, set_example, without_guards


@dataclass(frozen=True)
class DtypePolicy:
    """Result dtypes of the pattern's nodes, and the roundings on the way to each operand of each term."""

    results: Mapping[fx.Node, torch.dtype]
    operands: Mapping[tuple[fx.Node, int], tuple[torch.dtype, ...]]
    outputs: tuple[tuple[torch.dtype, tuple[torch.dtype, ...]], ...]


class Pattern:
    """One function of one fusion with its static parameters fixed.

    Args:
        graph: the traced function (``trace``).
    """

    def __init__(self, fusion: Fusion, function: Callable[..., Any], statics: Mapping[str, Any], graph: fx.Graph):
        self.fusion, self.function, self.statics, self.graph = fusion, function, statics, graph
        self.label = function.__name__ + "".join(f", {k}={v}" for k, v in statics.items())
        self.parameters = [name for name in fusion.inputs if name not in statics]
        self.tensors = [name for name in self.parameters if name in fusion.specs]  # those that a variant leaves
        self._run(dict.fromkeys(self.tensors, torch.float32), "cpu", ())
        self.view = View(self.graph)
        self.outputs = tuple(map(self.view.edge, results_of(graph)))
        self.terms = {node: self.view.term(node) for node in self._reachable()}
        self.root = self.outputs[0].base
        self.reads_shapes = any("shape" in term.attrs for term in self.terms.values())
        self._policies: dict[Any, DtypePolicy | str] = {}

    def _reachable(self) -> list[fx.Node]:
        seen: dict[fx.Node, None] = {}
        stack = [edge.base for edge in self.outputs]
        while stack:
            node = stack.pop()
            if isinstance(node, fx.Node) and node.op != "placeholder" and node not in seen:
                seen[node] = None
                stack.extend(self.view.edge(operand).base for operand in self.view.term(node).operands)
        return list(seen)

    def policy(self, dtypes: Mapping[str, torch.dtype], device: str, region: tuple[Any, ...]) -> DtypePolicy | str:
        """The dtype policy for tensor inputs of these dtypes on this device, in this autocast region; why the pattern can't
        be computed so, if it can't (float16 under a CPU's autocast to bfloat16)."""
        key = (tuple(sorted(dtypes.items())), device, region, autocast_dtype(device))
        if key not in self._policies:
            try:
                self._run(dtypes, device, region)
            except RuntimeError as error:
                self._policies[key] = f"the pattern can't be computed so: {str(error).splitlines()[0]}"
                return self._policies[key]
            view = View(self.graph)  # the same structure, read with these dtypes
            self._policies[key] = DtypePolicy(
                {node: example(node).dtype for node in self.terms},
                {
                    (node, i): view.edge(operand).roundings
                    for node, term in self.terms.items()
                    for i, operand in enumerate(term.operands)
                },
                tuple((example(o).dtype, view.edge(o).roundings) for o in results_of(self.graph)),
            )
        return self._policies[key]

    def values(self, examples: Mapping[str, Any]) -> dict[fx.Node, torch.Tensor]:
        """The pattern's tensors, fake, for the inputs of a match."""
        fake_mode = next(mode for t in examples.values() if (mode := fake_mode_of(t)) is not None)
        with fake_mode, torch.no_grad(), without_guards(fake_mode):
            return _Recorder(self.graph).values_with(examples)

    def _run(self, dtypes: Mapping[str, torch.dtype], device: str, region: tuple[Any, ...]) -> None:
        """Give each node an example value: run the graph on small fake tensors."""
        # Distinct even sizes, so that a square is never mistaken for a view and every dim can be halved.
        sizes = {name: 4 * (i + 2) for i, name in enumerate(self.fusion.dims)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(entered(region))
            stack.enter_context(torch.no_grad())
            arguments: dict[str, Any] = {}
            for name in self.parameters:
                spec = self.fusion.specs.get(name)
                if spec is None:
                    arguments[name] = self.fusion.inputs[name]
                    continue
                shape: list[int] = []
                for dim in spec.dims:
                    several = [2, 3] if dim.name == "..." else [1] if dim.broadcast or dim.name == "1" else [sizes[dim.name]]
                    shape += several
                arguments[name] = torch.empty(shape, dtype=dtypes[name], device=device)
            _Recorder(self.graph).run_with(arguments)


class _Recorder(fx.Interpreter):
    def __init__(self, graph: fx.Graph):
        super().__init__(torch.nn.Module(), graph=graph)
        self.values: dict[fx.Node, torch.Tensor] | None = None

    def run_with(self, arguments: Mapping[str, Any]) -> None:
        names = [n.target for n in self.graph.nodes if n.op == "placeholder"]
        self.run(*(arguments[str(name)] for name in names))

    def values_with(self, arguments: Mapping[str, Any]) -> dict[fx.Node, torch.Tensor]:
        """Run without changing the examples of the pattern's own sizes."""
        self.values = {}
        self.run_with(arguments)
        return self.values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self.values is None:
            set_example(n, result)
        elif isinstance(result, torch.Tensor):
            self.values[n] = result
        return result


def reference_of(fusion: Fusion, statics: Mapping[str, Any]) -> Callable[..., Any]:
    """The reference function of a variant, its statics bound: the first spelling that has it."""
    spelling = fusion.pattern
    if fusion.find is None:
        spelling = next(p.function for p in patterns_of(fusion) if p.statics.items() <= statics.items())
    return functools.partial(spelling, **statics)


@functools.cache
def patterns_of(fusion: Fusion) -> tuple[Pattern, ...]:
    """Every function and variant of a fusion, traced. Lazy: a process that never compiles never traces."""
    patterns = []
    for function in (fusion.pattern, *fusion.spellings):
        for statics in fusion.variants:
            graph = trace(function, [name for name in fusion.inputs if name not in statics], statics)
            if graph is not None:
                patterns.append(Pattern(fusion, function, statics, graph))
    return tuple(patterns)
