"""The backend: ``torch.compile(model, backend="fx_fusion")``.

``compile_graph`` is the way of one graph: copy, rewrite, compile, wrap, report. Whatever goes wrong in our part, the graph
reaches Inductor as Dynamo wrote it, and the user is told why.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fx_fusion.errors import OptionError
from fx_fusion.fallback import Rest, as_dynamo_wrote_it, tell
from fx_fusion.float8.linears import Linears
from fx_fusion.frontend import install
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.graph.places import name_arguments
from fx_fusion.graph.snapshot import snapshot
from fx_fusion.inductor.compile import Compiled, OursFailed, inductor
from fx_fusion.memory.recompute import Decisions
from fx_fusion.options import Options, inductors_own, parse
from fx_fusion.report import trace
from fx_fusion.report.diff import rows
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.recording import publish
from fx_fusion.report.site import Site
from fx_fusion.report.version import Version, new_report
from fx_fusion.rewrite.deferral import read_deferred_inputs
from fx_fusion.rewrite.loss_behind_a_break import beginning_with_lm_head, only_losses_read
from fx_fusion.rewrite.losses_outside import LossesOutside
from fx_fusion.rewrite.masks_handed_on import hand_masks_on
from fx_fusion.rewrite.verify_graph import verifying
from fx_fusion.rewrite.verify_step import verifying_step
from fx_fusion.rewriting import as_sites_read_it, rewritten
from fx_fusion.runtime.mask_values import read_anew
from fx_fusion.runtime.reads import follow
from fx_fusion.runtime.recipe import without_saved_tensor_hooks
from fx_fusion.runtime.speculate import first_inputs
from fx_fusion.runtime.steps import before_writes
from fx_fusion.torch_internals import bisector, loggers
from fx_fusion.torch_internals import inductor as inductor_itself
from fx_fusion.torch_internals.dynamo import CONTROL_FLOW, as_it_is, when_dynamo_is_reset
from fx_fusion.versions import Unmet, Versions

bisector.make_known()
install()
loggers.warn_while_compiling()


def fx_fusion(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """The backend function that torch.compile calls for every captured graph.

    Args:
        gm: Dynamo's graph.
        example_inputs: its fake inputs.
        mode: as for Inductor (``"reduce-overhead"``, ``"max-autotune"`` ...).
        options: Inductor's options, and ours (``fx_fusion.options``).

    Raises:
        OptionError: an option that nobody knows.
        FusionError: an error of ours, under ``options={"strict": True}`` only.
    """
    try:
        parsed = parse(mode, options)
    except OptionError as error:
        raise as_it_is(error, inspect.currentframe()) from None
    except Exception as error:
        tell(error, strict=bool((options or {}).get("strict")))
        mode = mode or (options or {}).get("mode")
        return inductor_itself.compile_with(mode, inductors_own(options), gm, example_inputs)
    return compile_graph(gm, example_inputs, parsed)


fx_fusion.reset = when_dynamo_is_reset  # type: ignore[attr-defined]


@dataclass
class Rewritten:
    """Hold what became of a graph: it, its example inputs, report and sites, and what goes around the compiled function."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    report: GraphReport
    sites: list[Site]
    layers: list[Callable[[Compiled], Compiled]]

    @property
    def changed(self) -> bool:
        """Return True if anything of the graph was replaced."""
        report = self.report
        before = report.floats or report.joined or report.apart or report.deferred
        return bool(before or any(site.status == "fused" for site in self.sites))


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    rest: Rest = inductor,
    *,
    version: Version | None = None,
) -> Compiled:
    """Rewrite the graph and compile it with ``rest``. Whatever of ours raises, the graph is compiled as Dynamo wrote it.
    ``version``: of which graph this is another version, if it is."""
    untouched = gm
    try:
        with without_saved_tensor_hooks():
            name_arguments(gm.graph, () if version is None else version.inputs)
            untouched = snapshot(gm)
            rewritten = rewrite(gm, untouched, example_inputs, options, rest, version)
    except Exception as error:
        return as_dynamo_wrote_it(untouched, example_inputs, options, rest, error)
    try:
        compiled = rest(rewritten.gm, rewritten.example_inputs, options)
    except CONTROL_FLOW:  # Dynamo starts again, which is no failure
        raise
    except OursFailed as failed:
        return as_dynamo_wrote_it(untouched, example_inputs, options, rest, failed.__cause__ or failed, rewritten.report)
    except Exception as error:
        if not rewritten.changed:
            raise  # it would fail without us too
        return as_dynamo_wrote_it(untouched, example_inputs, options, rest, error, rewritten.report)
    try:
        for layer in rewritten.layers:
            compiled = layer(compiled)
        publish(rewritten.report, rewritten.sites)
        trace.write(rewritten.report, rewritten.sites)
    except Exception as error:
        return as_dynamo_wrote_it(untouched, example_inputs, options, rest, error)
    return compiled


def rewrite(
    gm: fx.GraphModule,
    untouched: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    rest: Rest,
    version: Version | None,
) -> Rewritten:
    """Rewrite a graph in place. Where its first inputs are not what it would assume, rewrite a copy of ``untouched``, the
    graph as it was, for such inputs."""
    started, unmet = time.perf_counter(), None
    report = new_report(gm, version, options)
    graph = rewritten(gm, example_inputs, options, report)
    inputs = first_inputs(graph.checks, graph.example_inputs) if options.fuel is None else None
    if inputs is not None:
        unmet = Unmet(options, graph.sentences, graph.checks, inputs)
        report = replace(report, memory=Decisions(), linears=Linears())
        options = options.for_inputs(inputs)
        graph = rewritten(snapshot(untouched), example_inputs, options, report)
    gm, checks = graph.gm, graph.checks
    report.assumes = (report.assumes or graph.sentences) if checks else ()
    report.unassumed = tuple(s for s in unmet.sentences if s not in report.assumes) if unmet is not None else ()
    versions = Versions(compile_graph, untouched, options, rest, report)
    captured = as_sites_read_it(untouched, options) if options.verify else untouched
    of_logits = {fusion.name for fusion in all_fusions() if fusion.of_logits}
    losses = {name for site in graph.sites if site.fusion in of_logits for name in site.nodes}
    taken = sorted({*graph.by_rows, *only_losses_read(untouched, graph.untaken, losses)})
    layers: list[Callable[[Compiled], Compiled]] = [
        read_anew(gm, replayed=options.cuda_graphs),
        before_writes(report.memory.written, [getattr(untouched, name) for name in report.memory.attributes]),
        hand_masks_on(untouched),
        verifying(gm, captured, graph.sites_of, options.verify, report.verified),
        lambda compiled: graph.deferred.wrap(
            compiled, report.reads, LossesOutside(versions.with_loss_outside), replayed=options.cuda_graphs
        ),
        lambda deferring: deferring if graph.tail is None else graph.tail.wrap(deferring, report.reads, versions.computing),
        verifying_step(untouched, options.verify, report.index, report.reads, report.verified),
        lambda deferring: follow(deferring, report.reads, versions.computing) if graph.deferred.can_compute else deferring,
        lambda fast: versions.speculating(fast, checks, unmet),
        read_deferred_inputs(graph.activations, writes=graph.writes),
        beginning_with_lm_head(taken, untouched, versions.with_lm_head),
    ]
    report.rows_after, report.nodes_after = rows(gm), len(gm.graph.nodes)
    report.seconds += time.perf_counter() - started
    return Rewritten(gm, graph.example_inputs, report, graph.sites, layers)
