"""The backend: ``torch.compile(model, backend="fx_fusion")``.

``compile_graph`` is the pipeline, one column of named calls. Whatever goes wrong in our part, the graph reaches
Inductor as Dynamo wrote it, and the user is told why.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._inductor.compile_fx import compile_fx

from fx_fusion.errors import FusionError, OptionError
from fx_fusion.graph.bodies import link_bodies
from fx_fusion.graph.snapshot import snapshot
from fx_fusion.graph.view import View
from fx_fusion.inductor.cache_key import config_patches
from fx_fusion.ops.fused_op import tell_inductor
from fx_fusion.ops.layouts import without_donated_buffers
from fx_fusion.options import Options, inductors_own, parse
from fx_fusion.pipeline import Fuel, Placement, find_matches, near_sites
from fx_fusion.report import trace as debug
from fx_fusion.report.diff import text
from fx_fusion.report.report import GraphReport, Site, publish, recordings
from fx_fusion.rewrite.deferral import (
    DeferredOutputs,
    activation_positions,
    defer_outputs,
    read_deferred_examples,
    read_deferred_inputs,
)
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.foreach_floats import keep_tensors, without_caches
from fx_fusion.rewrite.results_apart import keep_results_apart
from fx_fusion.runtime.deferred_tensor import without_saved_tensor_hooks
from fx_fusion.runtime.speculate import Assumptions, compiled_apart, speculate
from fx_fusion.torch_internals.graph_breaks import why_it_ends
from fx_fusion.torch_internals.kernel_accesses import remember_accesses

Compiled = Callable[..., Any]
Rest = Callable[[fx.GraphModule, Sequence[Any], Options], Compiled]
_graph_numbers = itertools.count()


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
    except OptionError:
        raise
    except Exception as error:
        _tell(error, strict=bool((options or {}).get("strict")))
        return torch._TorchCompileInductorWrapper(mode, inductors_own(options), None)(gm, example_inputs)
    return compile_graph(gm, example_inputs, parsed)


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Inductor, with the user's options and our part of the cache key. Raises OursFailed where it is not Inductor that
    fails."""
    with contextlib.ExitStack() as patched:
        try:
            tell_inductor()
            remember_accesses()
            patches = config_patches(options)
            patched.enter_context(without_donated_buffers(gm))
            patched.enter_context(without_caches(gm))
        except Exception as error:
            raise OursFailed from error
        return compile_fx(gm, list(example_inputs), config_patches=patches)


def plain_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Inductor with the user's options, and nothing of ours."""
    return compile_fx(gm, list(example_inputs), config_patches=dict(options.inductor))


class OursFailed(Exception):
    """Something of ours raised (the cause) on the way to Inductor."""


@dataclass
class Rewritten:
    """What became of a graph: its example inputs, report and sites, and what goes around the compiled function."""

    example_inputs: Sequence[Any]
    report: GraphReport
    sites: list[Site]
    layers: list[Callable[[Compiled], Compiled]]

    @property
    def changed(self) -> bool:
        return bool(self.report.floats or any(site.status == "fused" for site in self.sites))


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    rest: Rest = inductor,
    *,
    instead_of: int | None = None,
) -> Compiled:
    """Rewrite the graph and compile it with ``rest``. Whatever of ours raises, the graph is compiled as Dynamo wrote it.

    Args:
        instead_of: the index of the graph whose version without assumptions this is.
    """
    untouched = gm
    try:
        with without_saved_tensor_hooks():
            untouched = snapshot(gm)
            made = rewritten(gm, untouched, example_inputs, options, rest, instead_of)
    except Exception as error:
        return _as_dynamo_wrote_it(untouched, example_inputs, options, rest, error)
    try:
        compiled = rest(gm, made.example_inputs, options)
    except (RestartAnalysis, SkipFrame):  # Dynamo's control flow, not a failure
        raise
    except OursFailed as failed:
        return _as_dynamo_wrote_it(untouched, example_inputs, options, rest, failed.__cause__ or failed, made)
    except Exception as error:
        if not made.changed:
            raise  # it would fail without us too
        return _as_dynamo_wrote_it(untouched, example_inputs, options, rest, error, made)
    try:
        for layer in made.layers:
            compiled = layer(compiled)
        _announce(made)
    except Exception as error:
        return _as_dynamo_wrote_it(untouched, example_inputs, options, rest, error)
    return compiled


def rewritten(
    gm: fx.GraphModule,
    untouched: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    rest: Rest,
    instead_of: int | None,
) -> Rewritten:
    """canonicalize -> match -> legality -> select -> rewrite -> defer, in place; ``untouched`` is a copy of the graph."""
    started = time.perf_counter()
    report = _new_report(gm, instead_of)
    activations = activation_positions(gm)
    example_inputs = read_deferred_examples(gm, example_inputs)
    report.floats = keep_tensors(gm) if options.fuel is None else 0
    assumptions = Assumptions(gm, allowed=options.speculate)
    sites, deferred = fuse(gm, options, assumptions)
    report.deferred, report.assumes = deferred.names, assumptions.sentences()
    listening = [weakref.ref(recorded) for recorded in recordings()]

    def exact() -> Compiled:
        known = replace(options, speculate=False)
        backend = functools.partial(compile_graph, options=known, rest=rest, instead_of=report.index)
        return compiled_apart(untouched, backend, listening)

    layers: list[Callable[[Compiled], Compiled]] = [
        deferred.wrap,
        lambda fast: speculate(fast, assumptions, exact, report.calls),
        read_deferred_inputs(activations),
    ]
    report.after, report.nodes_after = text(gm), len(gm.graph.nodes)
    report.seconds = time.perf_counter() - started
    return Rewritten(example_inputs, report, sites, layers)


def _as_dynamo_wrote_it(
    untouched: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    rest: Rest,
    error: BaseException,
    made: Rewritten | None = None,
) -> Compiled:
    """Say what of ours raised, and compile the untouched graph with nothing of ours around it but what makes deferred
    tensors of other graphs plain ones. Raises FusionError under ``strict``."""
    _tell(error, strict=options.strict)
    layer: Callable[[Compiled], Compiled] = lambda compiled: compiled  # noqa: E731
    try:
        layer = read_deferred_inputs(activation_positions(untouched))
        example_inputs = read_deferred_examples(untouched, example_inputs)
        report = made.report if made is not None else GraphReport(next(_graph_numbers), text(untouched))
        report.fallback, report.after, report.nodes_after = _where(error), report.before, report.nodes_before
        report.floats, report.deferred, report.assumes = 0, (), ()
        publish(report, [])
    except Exception as another:
        _tell(another, strict=False)
    return layer((plain_inductor if rest is inductor else rest)(untouched, example_inputs, options))


def _tell(error: BaseException, *, strict: bool) -> None:
    """Raise under ``strict``, else warn."""
    if strict:
        raise FusionError(_where(error)) from error
    warnings.warn(f"fx_fusion: {_where(error)}; the graph goes to Inductor unchanged.", stacklevel=4)


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
        candidates, near = find_matches(view)
        editor = Editor(view)
        placement = Placement(view, options, editor, fuel)
        placement.place(candidates)
        sites += [*placement.sites, *near_sites(near, placement.taken)]
        if module is gm:
            deferred = defer_outputs(gm, editor.deferrals, editor.now)
        keep_results_apart(module.graph)
        module.graph.lint()
        module.recompile()
    assert deferred is not None
    return sites, deferred


def reset() -> None:
    """What ``torch.compile``'s reset does for Inductor."""
    torch._TorchCompileInductorWrapper(None, None, None).reset()


fx_fusion.reset = reset  # type: ignore[attr-defined]


def _new_report(gm: fx.GraphModule, instead_of: int | None) -> GraphReport:
    trace_id = torch._guards.CompileContext.current_trace_id()
    return GraphReport(
        index=next(_graph_numbers),
        before=text(gm),
        nodes_before=len(gm.graph.nodes),
        compile_id=str(trace_id.compile_id) if trace_id else "",
        attempt=trace_id.attempt if trace_id else 0,
        broke=why_it_ends(gm),
        instead_of=instead_of,
    )


def _announce(made: Rewritten) -> None:
    sites = [replace(site, graph=made.report.index) for site in made.sites]
    publish(made.report, sites)
    debug.write(made.report, sites, to_terminal=os.environ.get("FX_FUSION_DEBUG") == "1")


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
