"""The way back: a graph that something of ours failed at reaches Inductor as Dynamo wrote it, and the user is told why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fx_fusion.errors import FusionError, where_raised
from fx_fusion.inductor.compile import Compiled, inductor, plain_inductor
from fx_fusion.options import Options
from fx_fusion.report import trace
from fx_fusion.report.diff import rows
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.recording import publish
from fx_fusion.report.version import graph_numbers
from fx_fusion.rewrite.deferral import activation_positions, read_deferred_examples, read_deferred_inputs
from fx_fusion.rewrite.loss_behind_a_break import only_read
from fx_fusion.runtime.deferred_tensor import DeferredTensor

Rest = Callable[[fx.GraphModule, Sequence[Any], Options], Compiled]


def as_dynamo_wrote_it(
    untouched: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    rest: Rest,
    error: BaseException,
    report: GraphReport | None = None,
) -> Compiled:
    """Say what of ours raised, and compile the untouched graph with nothing of ours around it but what makes deferred
    tensors of other graphs plain ones. Raises FusionError under ``strict``."""
    tell(error, strict=options.strict)
    layer: Callable[[Compiled], Compiled] = lambda compiled: compiled  # noqa: E731
    try:
        positions = activation_positions(untouched)
        layer = read_deferred_inputs(positions)
        deferred = [i for i, given in enumerate(example_inputs) if isinstance(given, DeferredTensor)]
        example_inputs = read_deferred_examples(untouched, example_inputs)
        report = report or GraphReport(next(graph_numbers), rows(untouched))
        report.options = options.given()
        report.fallback, report.rows_after, report.nodes_after = where_raised(error), report.rows_before, report.nodes_before
        report.floats = report.joined = report.apart = report.experts = 0
        report.deferred, report.computed, report.assumes, report.unassumed = ((),) * 4
        publish(report, [])
        layer = read_deferred_inputs(positions, writes=only_read(untouched, deferred)[1])
    except Exception as another:
        tell(another, strict=False)
    return layer((plain_inductor if rest is inductor else rest)(untouched, example_inputs, options))


def tell(error: BaseException, *, strict: bool, instead: str = "the graph goes to Inductor unchanged") -> None:
    """Raise under ``strict``, else warn, and log where it was raised."""
    if strict:
        raise FusionError(where_raised(error)) from error
    trace.log_fallback(error, instead)
    warnings.warn(f"fx_fusion: {where_raised(error).rstrip('.')}; {instead}.", stacklevel=4)
