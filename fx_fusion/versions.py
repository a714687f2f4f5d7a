"""Versions of a captured graph for other calls than the first.

They are for other inputs, for outputs that are read, and for a loss that begins with lm_head. A version is compiled when the
first call comes that needs it, from the graph as Dynamo wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import fx

from fx_fusion.fallback import Rest, tell
from fx_fusion.graph.places import named
from fx_fusion.inductor.compile import Compiled
from fx_fusion.options import Options
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.recording import recording_in, recordings
from fx_fusion.report.version import Version
from fx_fusion.runtime.speculate import Checks, Inputs, compiled_apart, speculate


@dataclass(frozen=True)
class Unmet:
    """The assumptions that a graph would have made, by these options, had it held in the first call.

    Attributes:
        options: those of the first attempt.
        sentences, checks: what it would have assumed.
        inputs: what the inputs of the first call were instead.
    """

    options: Options
    sentences: tuple[str, ...]
    checks: Checks
    inputs: Inputs


def _listening() -> list[weakref.ref[Any]]:
    return [weakref.ref(recorded) for recorded in recordings()]


@dataclass(frozen=True)
class Versions:
    """Compiles the other versions of one graph.

    Attributes:
        compile_graph: compiles one (``backend.compile_graph``).
        untouched: the graph as Dynamo wrote it.
        options, rest: of the first version, as ``compile_graph`` takes them.
        report: of the first version.
        listening: who records while the first version is compiled, and records the others too.
    """

    compile_graph: Callable[..., Compiled]
    untouched: fx.GraphModule
    options: Options
    rest: Rest
    report: GraphReport
    listening: list[weakref.ref[Any]] = field(default_factory=_listening)

    def computing(self) -> Compiled:
        """Return the version that computes deferred outputs."""
        sentence = "while its deferred outputs are read in call after call"
        version = Version(self.report.index, sentence, self.report.reads)
        return self._compiled(version, replace(self.options, outputs_are_read=True))

    def with_lm_head(self, graph: fx.GraphModule) -> Compiled:
        """Return the version that begins with what makes its logits; ``graph`` is the graph with that in front."""
        version = Version(self.report.index, "with the lm_head of the graph that made its logits")
        return self._compiled(version, self.options, graph)

    def with_loss_outside(self, graph: fx.GraphModule, sizes_change: bool) -> tuple[Compiled, Callable[[], bool]]:
        """Return what runs a loss of the deferred logits op by op; ``graph`` begins with what makes them. And a function
        that says whether that is left in the graph that was compiled last."""
        left: list[bool] = []

        def op_by_op(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
            left.append(bool(gm.graph.find_nodes(op="call_function", target=F.linear)))
            return gm

        version = Version(self.report.index, "for a loss outside of it, with what makes its logits")
        options = replace(self.options, select="always", eager=True, defer_outputs=False)
        compiled = self._compiled(version, options, graph, op_by_op, sizes_change)
        return compiled, lambda: not left or left[-1]

    def speculating(self, fast: Compiled, checks: Checks, unmet: Unmet | None) -> Compiled:
        """Return ``fast`` for the inputs that it assumes, with other versions for others."""
        fast = speculate(fast, None, checks, self._without_assumption, self.report.calls)
        if unmet is None:
            return fast
        beyond = self.report.calls if checks else None  # what other inputs are is not what this version assumes either
        others = functools.partial(self._for_others, unmet)
        return speculate(fast, unmet.inputs, unmet.checks, others, self.report.unmet, beyond)

    def _without_assumption(self, inputs: Inputs) -> Compiled:
        version = Version(self.report.index, "without its assumption, compiled when it first did not hold")
        return self._compiled(version, self.options.for_inputs(inputs))

    def _for_others(self, unmet: Unmet, inputs: Inputs) -> Compiled:
        sentence, assumes = "for other inputs, compiled when they first came", unmet.sentences if inputs is None else ()
        return self._compiled(Version(self.report.index, sentence, assumes=assumes), unmet.options.for_inputs(inputs))

    def _compiled(
        self, version: Version, options: Options, graph: fx.GraphModule | None = None, rest: Rest | None = None,
        sizes_change: bool = False,
    ) -> Compiled:  # fmt: skip
        graph = self.untouched if graph is None else graph
        version = replace(version, inputs=tuple(map(named, graph.graph.find_nodes(op="placeholder"))))
        backend = functools.partial(self.compile_graph, options=options, rest=rest or self.rest, version=version)
        failed = functools.partial(self._failed, version)
        try:
            return compiled_apart(graph, backend, self._around, failed, sizes_change=sizes_change)
        except Exception as error:  # in the middle of a run
            failed(error)
            return graph

    def _around(self) -> contextlib.AbstractContextManager[Any]:
        return recording_in([recorded for reference in self.listening if (recorded := reference()) is not None])

    def _failed(self, version: Version, error: BaseException) -> None:
        instead = f"graph {version.of} {version.sentence}: it runs uncompiled"
        tell(error, strict=self.options.strict, instead=instead)
