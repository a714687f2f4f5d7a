"""The backend: ``torch.compile(model, backend="fx_fusion")``.

``compile_graph`` is the way of one graph: copy, rewrite, compile, wrap, report. Whatever goes wrong in our part, the graph
reaches Inductor as Dynamo wrote it, and the user is told why.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fx_fusion import pipeline
from fx_fusion.cost.estimate import gained
from fx_fusion.errors import OptionError
from fx_fusion.fallback import Rest, as_dynamo_wrote_it, tell
from fx_fusion.float8.linears import Linears
from fx_fusion.fusion.search import Search
from fx_fusion.graph.outside import views_of
from fx_fusion.graph.places import name_arguments, named
from fx_fusion.graph.snapshot import snapshot
from fx_fusion.graph.view import View
from fx_fusion.inductor.compile import DECISIONS, LINEARS, Compiled, OursFailed, inductor
from fx_fusion.memory.recompute import Decisions, describe_inputs
from fx_fusion.options import Options, inductors_own, parse
from fx_fusion.report import trace
from fx_fusion.report.diff import rows
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.recording import publish, recording_in, recordings
from fx_fusion.report.site import Site
from fx_fusion.report.version import Version, new_report
from fx_fusion.rewrite import log_probs_outside, soft_losses_outside  # noqa: F401  what takes deferred logits
from fx_fusion.rewrite.assumptions import Assumptions
from fx_fusion.rewrite.deferral import (
    DeferredOutputs,
    activation_positions,
    defer_outputs,
    read_deferred_examples,
    read_deferred_inputs,
)
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.foreach_floats import keep_tensors
from fx_fusion.rewrite.loss_behind_a_break import LOSSES, beginning_with_lm_head, only_losses_read, only_read
from fx_fusion.rewrite.loss_outside import defer_for_a_loss_outside, heads
from fx_fusion.rewrite.masks_handed_on import hand_masks_on
from fx_fusion.rewrite.results_apart import keep_results_apart
from fx_fusion.rewrite.verify_graph import verifying
from fx_fusion.rewrite.verify_step import verifying_step
from fx_fusion.rewrite.written_halves import join_written_halves
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.runtime.mask_values import read_anew
from fx_fusion.runtime.reads import follow
from fx_fusion.runtime.recipe import without_saved_tensor_hooks
from fx_fusion.runtime.speculate import Checks, Inputs, compiled_apart, first_inputs, speculate
from fx_fusion.runtime.steps import before_writes
from fx_fusion.torch_internals import bisector, loggers
from fx_fusion.torch_internals import inductor as inductor_itself
from fx_fusion.torch_internals.dynamo import CONTROL_FLOW, as_it_is, when_dynamo_is_reset

bisector.make_known()
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


@dataclass(frozen=True)
class Unmet:
    """What a graph would assume, by these options, had it held in the first call; and what those inputs were instead."""

    report: GraphReport  # of the graph as Dynamo wrote it
    options: Options
    sentences: tuple[str, ...]
    checks: Checks
    inputs: Inputs


@dataclass
class Rewritten:
    """What became of a graph: it, its example inputs, report and sites, and what goes around the compiled function."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    report: GraphReport
    sites: list[Site]
    layers: list[Callable[[Compiled], Compiled]]

    @property
    def changed(self) -> bool:
        """Whether anything of the graph was replaced."""
        report = self.report
        before = report.floats or report.joined or report.deferred
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
    unmet: Unmet | None = None,
) -> Rewritten:
    """Rewrite a graph in place; where its first inputs are not what it would assume, a copy of ``untouched`` (the graph as
    it was), for such inputs."""
    started = time.perf_counter()
    report = new_report(gm, version, options) if unmet is None else unmet.report
    gm.meta[DECISIONS], gm.meta[LINEARS] = report.memory, report.linears
    activations = activation_positions(gm)
    deferred_inputs = [i for i, example in enumerate(example_inputs) if isinstance(example, DeferredTensor)]
    given = example_inputs
    example_inputs = read_deferred_examples(gm, example_inputs)
    untaken, writes = only_read(gm, deferred_inputs)
    report.floats = keep_tensors(gm) if options.fuel is None else 0
    report.joined = join_written_halves(gm)
    assumptions = Assumptions(gm, allowed=options.speculate or options.masks is not None)
    sites_of, deferred = rewrite_graphs(gm, options, assumptions, report)
    checks = assumptions.checks()
    inputs = first_inputs(checks, example_inputs) if unmet is None and options.fuel is None else None
    if inputs is not None:
        anew = replace(report, memory=Decisions(), linears=Linears(), seconds=time.perf_counter() - started)
        unmet = Unmet(anew, options, assumptions.sentences(), checks, inputs)
        return rewrite(snapshot(untouched), untouched, given, options.for_inputs(inputs), rest, version, unmet)
    sites = [site for found in sites_of.values() for site in found]
    report.deferred, report.computed = deferred.waiting, deferred.computed
    if any(isinstance(given, torch.Tensor) and given.is_cuda for given in example_inputs):  # estimates are of GPUs
        report.memory.gained = gained(site.estimate for site in sites if site.status == "fused")
    report.assumes = (report.assumes or assumptions.sentences()) if checks else ()
    report.unassumed = tuple(s for s in unmet.sentences if s not in report.assumes) if unmet is not None else ()
    listening = [weakref.ref(recorded) for recorded in recordings()]

    def another(version: Version, options: Options, graph: fx.GraphModule = untouched) -> Compiled:
        version = replace(version, inputs=tuple(map(named, graph.graph.find_nodes(op="placeholder"))))
        backend = functools.partial(compile_graph, options=options, rest=rest, version=version)
        around = lambda: recording_in([r for reference in listening if (r := reference()) is not None])  # noqa: E731
        instead = f"graph {version.of} {version.sentence}: it runs uncompiled"
        failed = lambda error: tell(error, strict=options.strict, instead=instead)  # noqa: E731
        try:
            return compiled_apart(graph, backend, around, failed)
        except Exception as error:  # in the middle of a run
            failed(error)
            return graph

    def without_assumption(inputs: Inputs) -> Compiled:
        sentence = "without its assumption, compiled when it first did not hold"
        return another(Version(report.index, sentence), options.for_inputs(inputs))

    def speculating(fast: Compiled) -> Compiled:
        fast = speculate(fast, None, checks, without_assumption, report.calls)
        if unmet is None:
            return fast

        def for_others(inputs: Inputs) -> Compiled:
            which, assumes = "for other inputs, compiled when they first came", unmet.sentences if inputs is None else ()
            return another(Version(report.index, which, assumes=assumes), unmet.options.for_inputs(inputs))

        beyond = report.calls if checks else None  # what other inputs are is not what this version assumes either
        return speculate(fast, unmet.inputs, unmet.checks, for_others, report.unmet, beyond)

    def computing() -> Compiled:
        sentence = "while its deferred outputs are read in call after call"
        return another(Version(report.index, sentence, report.reads), replace(options, outputs_are_read=True))

    captured = untouched
    if report.joined and options.verify:
        join_written_halves(captured := snapshot(untouched))  # the sites read it so
    losses = {name for site in sites if site.fusion in LOSSES for name in site.nodes}

    def with_lm_head(graph: fx.GraphModule) -> Compiled:
        return another(Version(report.index, "with the lm_head of the graph that made its logits"), options, graph)

    layers: list[Callable[[Compiled], Compiled]] = [
        read_anew(gm, replayed=options.cuda_graphs),
        before_writes(report.memory.written, [getattr(untouched, name) for name in report.memory.attributes]),
        hand_masks_on(untouched),
        verifying(gm, captured, sites_of, options.verify, report.verified),
        lambda compiled: deferred.wrap(compiled, report.reads),
        verifying_step(untouched, options.verify, report.index, report.reads, report.verified),
        lambda deferring: follow(deferring, report.reads, computing) if deferred.can_compute else deferring,
        speculating,
        read_deferred_inputs(activations, writes=writes),
        beginning_with_lm_head(only_losses_read(untouched, untaken, losses), untouched, with_lm_head),
    ]
    report.rows_after, report.nodes_after = rows(gm), len(gm.graph.nodes)
    report.seconds += time.perf_counter() - started
    return Rewritten(gm, example_inputs, report, sites, layers)


def rewrite_graphs(
    gm: fx.GraphModule, options: Options, assumptions: Assumptions, report: GraphReport
) -> tuple[dict[fx.GraphModule, list[Site]], DeferredOutputs]:
    """Rewrite every graph of the module in place, bodies of higher-order ops included. The sites of each, and the outputs
    that are computed only when they are read."""
    sites: dict[fx.GraphModule, list[Site]] = {}
    deferred = None
    fuel = pipeline.Fuel(options.fuel)
    searches: dict[View, Search] = {}
    views = views_of(gm)
    if DECISIONS in gm.meta:
        describe_inputs(gm, views, gm.meta[DECISIONS])
    for module, view in views.items():
        searches[view] = Search(
            view,
            may_assume=options.speculate and (module is gm or view.outside is not None),
            masks=options.masks if module is gm else None,
            may_defer=options.defer_outputs and module is gm,
            outer=None if view.outside is None else searches[view.outside.view],
        )
    for module, view in reversed(views.items()):  # bodies first: they look at the graph around them as it was
        asked = {"outputs_are_read": options.outputs_are_read, "saves_memory": options.memory == "min"}
        editor = Editor(view, assumptions, **asked)
        found = heads(searches[view]) if module is gm else []
        sites[module] = list(pipeline.rewrite(searches[view], options, editor, fuel, report.index))
        if module is gm:
            defer_for_a_loss_outside(found, editor)
            deferred = defer_outputs(gm, editor.deferrals, editor.now)
        keep_results_apart(module.graph)
        module.graph.lint()
        module.recompile()
    assert deferred is not None
    return sites, deferred
