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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.graph.dtypes import autocast_dtype
from fx_fusion.graph.effects import entered
from fx_fusion.graph.view import View


@dataclass(frozen=True)
class DtypePolicy:
    """Result dtypes of the pattern's nodes, and the roundings on the way to each operand of each term."""

    results: Mapping[fx.Node, torch.dtype]
    operands: Mapping[tuple[fx.Node, int], tuple[torch.dtype, ...]]
    outputs: tuple[tuple[torch.dtype, tuple[torch.dtype, ...]], ...]


class Pattern:
    """One function of one fusion with its static parameters fixed."""

    def __init__(self, fusion: Fusion, function: Callable[..., Any], statics: Mapping[str, Any]):
        self.fusion, self.function, self.statics = fusion, function, statics
        self.label = function.__name__ + "".join(f", {k}={v}" for k, v in statics.items())
        self.parameters = [name for name in fusion.inputs if name not in statics]
        self.graph = fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        proxies = {name: fx.Proxy(self.graph.placeholder(name), tracer) for name in self.parameters}
        result = function(**proxies, **statics)
        self.exists = result is not None  # a spelling returns None for a variant that it does not have
        if not self.exists:
            return
        self.graph.output(torch.utils._pytree.tree_map_only(fx.Proxy, lambda p: p.node, result))
        self._run(dict.fromkeys(self.tensors(), torch.float32), "cpu", ())
        self.view = View(self.graph)
        out = next(n for n in self.graph.nodes if n.op == "output").args[0]
        self.outputs = tuple(self.view.edge(o) for o in (out if isinstance(out, tuple) else (out,)))
        self.terms = {node: self.view.term(node) for node in self._reachable()}
        self.root = self.outputs[0].base
        self.reads_shapes = any("shape" in term.attrs for term in self.terms.values())
        self._policies: dict[Any, DtypePolicy] = {}

    def tensors(self) -> list[str]:
        return [name for name in self.parameters if isinstance(self.fusion.inputs[name], str)]

    def _reachable(self) -> list[fx.Node]:
        seen: dict[fx.Node, None] = {}
        stack = [edge.base for edge in self.outputs]
        while stack:
            node = stack.pop()
            if isinstance(node, fx.Node) and node.op != "placeholder" and node not in seen:
                seen[node] = None
                stack.extend(self.view.edge(operand).base for operand in self.view.term(node).operands)
        return list(seen)

    def policy(self, dtypes: Mapping[str, torch.dtype], device: str, region: tuple[Any, ...]) -> DtypePolicy:
        """The dtype policy for tensor inputs of these dtypes on this device, in this autocast region."""
        key = (tuple(sorted(dtypes.items())), device, region, autocast_dtype(device))
        if key not in self._policies:
            self._run(dtypes, device, region)
            view = View(self.graph)  # the same structure, read with these dtypes
            self._policies[key] = DtypePolicy(
                {node: node.meta["example_value"].dtype for node in self.terms},
                {
                    (node, i): view.edge(operand).roundings
                    for node, term in self.terms.items()
                    for i, operand in enumerate(term.operands)
                },
                tuple((o.meta["example_value"].dtype, view.edge(o).roundings) for o in self._output_nodes()),
            )
        return self._policies[key]

    def values(self, examples: Mapping[str, Any]) -> dict[fx.Node, torch.Tensor]:
        """The pattern's tensors, fake, for the inputs of a match."""
        fake_mode = next(t.fake_mode for t in examples.values() if isinstance(t, FakeTensor))
        env = fake_mode.shape_env
        with fake_mode, torch.no_grad(), contextlib.nullcontext() if env is None else env.suppress_guards():
            return _Recorder(self.graph).values_with(examples)

    def _output_nodes(self) -> tuple[fx.Node, ...]:
        out = next(n for n in self.graph.nodes if n.op == "output").args[0]
        return out if isinstance(out, tuple) else (out,)

    def _run(self, dtypes: Mapping[str, torch.dtype], device: str, region: tuple[Any, ...]) -> None:
        """Fill in ``example_value``: run the graph on small fake tensors."""
        # Distinct even sizes, so that a square is never mistaken for a view and every dim can be halved.
        sizes = {name: 4 * (i + 2) for i, name in enumerate(self.fusion.dims())}
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(entered(region))
            stack.enter_context(torch.no_grad())
            arguments: dict[str, Any] = {}
            for name in self.parameters:
                spec = self.fusion.inputs[name]
                if isinstance(spec, str):
                    of = {t: (2, 3) if t == "..." else (1,) if t.endswith("|1") else (sizes[t],) for t in spec.split()}
                    shape = [size for token in spec.split() for size in of[token]]
                    arguments[name] = torch.empty(shape, dtype=dtypes[name], device=device)
                else:
                    arguments[name] = spec
            interpreter = _Recorder(self.graph)
            interpreter.run_with(arguments)


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
            n.meta["example_value"] = result
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
    functions = (fusion.pattern, *fusion.spellings)
    traced = (Pattern(fusion, f, statics) for f in functions for statics in fusion.variants)
    return tuple(pattern for pattern in traced if pattern.exists)
