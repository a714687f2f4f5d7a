"""The backend: ``torch.compile(model, backend="fx_fusion")``.

``compile_graph`` is the pipeline, one column of named calls. Whatever goes wrong in our part, the graph reaches
Inductor as Dynamo wrote it, and the user is told why.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._inductor.compile_fx import compile_fx

from fx_fusion import debug
from fx_fusion.bodies import link_bodies
from fx_fusion.cache_key import config_patches
from fx_fusion.canonicalize import View
from fx_fusion.changing_floats import keep_tensors, without_caches
from fx_fusion.deferred import DeferredOutputs, activation_positions, defer_outputs, read_deferred_inputs
from fx_fusion.diff import text
from fx_fusion.errors import FusionError
from fx_fusion.graph_breaks import why_it_ends
from fx_fusion.kernel_accesses import remember_accesses
from fx_fusion.layouts import without_donated_buffers
from fx_fusion.op import tell_inductor
from fx_fusion.options import Options, parse
from fx_fusion.report import GraphReport, Site, publish
from fx_fusion.rewrite import Editor
from fx_fusion.sites import Fuel, choose, find_matches, near_sites, replace
from fx_fusion.snapshot import snapshot
from fx_fusion.speculate import Assumptions, speculate

Compiled = Callable[..., Any]
_graphs_seen = 0


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
    return compile_graph(gm, example_inputs, parse(mode, options))


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Inductor, with the user's options and our part of the cache key."""
    tell_inductor()
    remember_accesses()
    with without_donated_buffers(gm), without_caches(gm):
        return compile_fx(gm, list(example_inputs), config_patches=config_patches(options))


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    rest: Callable[[fx.GraphModule, Sequence[Any], Options], Compiled] = inductor,
) -> Compiled:
    """canonicalize -> match -> legality -> select -> rewrite -> defer -> compile the rest -> speculate."""
    started = time.perf_counter()
    graph_report = _new_report(gm)
    untouched = snapshot(gm)
    activations = activation_positions(gm)
    sites: list[Site] = []
    layers: list[Callable[[Compiled], Compiled]] = []
    try:
        graph_report.floats = keep_tensors(gm) if options.fuel is None else 0
        assumptions = Assumptions(gm, allowed=options.speculate)
        sites, deferred = fuse(gm, options, assumptions)
        graph_report.deferred, graph_report.assumes = deferred.names, assumptions.sentences()
        layers = [deferred.wrap, lambda fast: speculate(fast, assumptions, untouched, options, rest)]
    except Exception as error:
        _fall_back(error, options, graph_report)
        gm = untouched
    graph_report.after, graph_report.nodes_after = text(gm), len(gm.graph.nodes)
    graph_report.seconds = time.perf_counter() - started
    try:
        compiled = rest(gm, example_inputs, options)
    except (RestartAnalysis, SkipFrame):  # Dynamo's control flow, not a failure
        raise
    except Exception as error:
        changed = graph_report.floats or any(site.status == "fused" for site in sites)
        if gm is untouched or not changed:
            raise  # it would fail without us too
        _fall_back(error, options, graph_report)
        sites, layers = [], []
        compiled = rest(untouched, example_inputs, options)
    _announce(graph_report, sites)
    for layer in (*layers, read_deferred_inputs(activations)):
        compiled = layer(compiled)
    return compiled


def _fall_back(error: Exception, options: Options, graph_report: GraphReport) -> None:
    """Raise under ``strict``; else say what happened: the caller goes on with the graph as Dynamo wrote it."""
    if options.strict:
        raise FusionError(_where(error)) from error
    warnings.warn(f"fx_fusion: {_where(error)}; the graph goes to Inductor unchanged.", stacklevel=3)
    graph_report.fallback = _where(error)
    graph_report.floats, graph_report.deferred, graph_report.assumes = 0, (), ()


def fuse(gm: fx.GraphModule, options: Options, assumptions: Assumptions) -> tuple[list[Site], DeferredOutputs]:
    """Rewrite every graph of the module in place, bodies of higher-order ops included. The sites of all of them, and
    the outputs that are computed only when they are read."""
    sites: list[Site] = []
    deferred = None
    fuel = Fuel(options.fuel)
    views = {module: View(module.graph) for module in gm.modules() if isinstance(module, fx.GraphModule)}
    link_bodies(views)
    for module, view in views.items():
        view.assumptions = assumptions if module is gm or view.outside is not None else Assumptions.none()
        view.may_defer = options.defer_outputs and module is gm
    for module, view in reversed(views.items()):  # bodies first: they look at the graph around them as it was
        matches, near = find_matches(view)
        chosen, refused, taken = choose(matches, view, options)
        editor = Editor(view)
        made = [replace(fusion, match, editor, fuel) for fusion, match in chosen]
        sites += [*made, *refused, *near_sites(near, taken)]
        if module is gm:
            deferred = defer_outputs(gm, editor.deferrals, editor.now)
        module.graph.lint()
        module.recompile()
    assert deferred is not None
    return sites, deferred


def reset() -> None:
    """What ``torch.compile``'s reset does for Inductor."""
    torch._TorchCompileInductorWrapper(None, None, None).reset()


fx_fusion.reset = reset  # type: ignore[attr-defined]


def _new_report(gm: fx.GraphModule) -> GraphReport:
    global _graphs_seen
    _graphs_seen += 1
    compile_id = torch._guards.CompileContext.current_compile_id()
    return GraphReport(
        index=_graphs_seen - 1,
        before=text(gm),
        nodes_before=len(gm.graph.nodes),
        compile_id=str(compile_id) if compile_id else "",
        broke=why_it_ends(gm),
    )


def _announce(graph_report: GraphReport, sites: list[Site]) -> None:
    sites = [Site(**{**vars(site), "graph": graph_report.index}) for site in sites]
    publish(graph_report, sites)
    debug.write(graph_report, sites, to_terminal=os.environ.get("FX_FUSION_DEBUG") == "1")


def _where(error: BaseException) -> str:
    """The pass that raised, and what it said."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.startswith("fx_fusion.") and module != "fx_fusion.backend":
            frames.append(module.removeprefix("fx_fusion."))
        traceback = traceback.tb_next
    return f"{frames[-1] if frames else 'backend'} failed: {type(error).__name__}: {error}"
