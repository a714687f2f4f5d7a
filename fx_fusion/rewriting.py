"""Rewrite a captured graph in place, and the bodies of its higher-order ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_fusion import pipeline
from fx_fusion.cost.estimate import gained
from fx_fusion.fusion.search import Search
from fx_fusion.graph.outside import views_of
from fx_fusion.graph.snapshot import snapshot
from fx_fusion.graph.view import View
from fx_fusion.inductor.compile import DECISIONS, LAYERS, LINEARS
from fx_fusion.memory.recompute import describe_inputs
from fx_fusion.options import Options
from fx_fusion.report.graph import GraphReport
from fx_fusion.report.site import Site
from fx_fusion.rewrite.assumptions import Assumptions
from fx_fusion.rewrite.deferral import DeferredOutputs, activation_positions, defer_outputs, read_deferred_examples
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.experts_in_autocast import multiply_experts_in_autocast
from fx_fusion.rewrite.foreach_floats import keep_tensors
from fx_fusion.rewrite.loss_behind_a_break import only_read, read_by_rows
from fx_fusion.rewrite.results_apart import keep_results_apart
from fx_fusion.rewrite.returned_logits import defer_for_a_loss_outside, heads
from fx_fusion.rewrite.returned_rows import Tail, take_rows_outside
from fx_fusion.rewrite.rows_apart import Parts, settle, take_rows_first
from fx_fusion.rewrite.written_halves import join_written_halves
from fx_fusion.rewrite.written_values import read_what_was_written
from fx_fusion.runtime.deferred_tensor import DeferredTensor
from fx_fusion.runtime.speculate import Checks


@dataclass
class RewrittenGraph:
    """A graph after its rewrite.

    Attributes:
        gm: the graph, rewritten.
        example_inputs: its fake inputs, with the tensors that it will be called with in place of deferred ones.
        sites_of: the sites of each graph, bodies included.
        deferred: the outputs that are computed only when they are read.
        checks, sentences: what it assumes of its inputs, and how the report says so.
        activations: the positions of inputs that another graph may have made.
        untaken, writes: of ``loss_behind_a_break.only_read``.
        by_rows: those of ``untaken`` whose rows each are read by themselves.
        tail: what it did with its logits, which is called outside.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    sites_of: dict[fx.GraphModule, list[Site]]
    deferred: DeferredOutputs
    checks: Checks
    sentences: tuple[str, ...]
    activations: tuple[int, ...]
    untaken: tuple[int, ...]
    writes: bool
    by_rows: tuple[int, ...]
    tail: Tail | None

    @property
    def sites(self) -> list[Site]:
        """The sites of all graphs."""
        return [site for found in self.sites_of.values() for site in found]


def rewritten(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: GraphReport) -> RewrittenGraph:
    """Rewrite ``gm`` in place, and note in ``report`` what was done."""
    gm.meta[DECISIONS], gm.meta[LINEARS], gm.meta[LAYERS] = report.memory, report.linears, report.layers
    activations = activation_positions(gm)
    deferred_inputs = [i for i, example in enumerate(example_inputs) if isinstance(example, DeferredTensor)]
    example_inputs = read_deferred_examples(gm, example_inputs)
    untaken, writes = only_read(gm, deferred_inputs)
    by_rows = read_by_rows(gm, untaken)
    report.floats = keep_tensors(gm) if options.fuel is None else 0
    report.experts, report.joined = _prepare(gm, options)
    waits = options.defer_outputs and not options.outputs_are_read and options.fuel is None
    tail = take_rows_outside(gm) if waits else None
    report.outside = () if tail is None else tuple(call.name for call in tail.calls)
    apart = take_rows_first(gm.graph)
    assumptions = Assumptions(gm, allowed=options.speculate or options.masks is not None)
    sites_of, deferred = rewrite_graphs(gm, options, assumptions, report, apart)
    graph = RewrittenGraph(
        gm, example_inputs, sites_of, deferred, assumptions.checks(), assumptions.sentences(), activations, untaken, writes,
        by_rows, tail,
    )  # fmt: skip
    report.deferred, report.computed = deferred.waiting, deferred.computed
    if any(isinstance(given, torch.Tensor) and given.is_cuda for given in example_inputs):  # estimates are of GPUs
        report.memory.gained = gained(site.estimate for site in graph.sites if site.status == "fused")
    return graph


def _prepare(gm: fx.GraphModule, options: Options) -> tuple[int, int]:
    """Write a graph in the words that finders read. Returns how many products of experts were cast, and halves joined."""
    read_what_was_written(gm)
    return multiply_experts_in_autocast(gm) if options.experts == "autocast" else 0, join_written_halves(gm)


def as_sites_read_it(untouched: fx.GraphModule, options: Options) -> fx.GraphModule:
    """Return a copy of a captured graph in the words in which its sites were found, for ``verify``."""
    gm = snapshot(untouched)
    _prepare(gm, options)
    take_rows_first(gm.graph)
    gm.recompile()
    return gm


def rewrite_graphs(
    gm: fx.GraphModule, options: Options, assumptions: Assumptions, report: GraphReport, apart: Sequence[Parts] = ()
) -> tuple[dict[fx.GraphModule, list[Site]], DeferredOutputs]:  # fmt: skip
    """Rewrite every graph of the module in place. Returns the sites of each, and the outputs that are computed when they are
    read. ``apart``: what ``take_rows_first`` did."""
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
        editor = Editor(view, assumptions, **asked, eager=options.eager)
        found = heads(searches[view]) if module is gm else []
        sites[module] = list(pipeline.rewrite(searches[view], options, editor, fuel, report.index))
        if module is gm:
            report.apart = settle(apart)
            defer_for_a_loss_outside(found, editor)
            deferred = defer_outputs(gm, editor.deferrals, editor.now)
        keep_results_apart(module.graph)
        module.graph.lint()
        module.recompile()
    assert deferred is not None
    return sites, deferred
