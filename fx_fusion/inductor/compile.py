"""Compile a graph with Inductor: with what our ops need around it, or with nothing of ours."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fx_fusion.float8.linears import Linears
from fx_fusion.float8.norms import quantize_in_norms
from fx_fusion.float8.rewrite import to_float8
from fx_fusion.inductor.cache_key import config_patches, key_of
from fx_fusion.inductor.layers_once import Layers, compile_layers_once
from fx_fusion.memory.narrow import narrow_norms
from fx_fusion.memory.recompute import Decisions, decide
from fx_fusion.memory.tied import add_embeddings_to_others
from fx_fusion.ops.layouts import without_donated_buffers
from fx_fusion.ops.library import register_lowerings
from fx_fusion.options import Options
from fx_fusion.rewrite.foreach_floats import without_caches
from fx_fusion.torch_internals.dynamo import CONTROL_FLOW
from fx_fusion.torch_internals.inductor import compile_graph, fuses_epilogues, may_call_bodies, with_joint_pass
from fx_fusion.torch_internals.kernel_accesses import remember_accesses
from fx_fusion.torch_internals.subgraphs import keep_bodies_apart

Compiled = Callable[..., Any]


class OursFailed(Exception):
    """Something of ours raised (the cause) on the way to Inductor."""


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a rewritten graph, with the user's options and our part of the cache key. Raises OursFailed where it is not
    Inductor that fails."""
    decisions: Decisions = gm.meta.get(DECISIONS, Decisions())
    linears: Linears = gm.meta.get(LINEARS, Linears())
    layers: Layers = gm.meta.get(LAYERS, Layers())
    with contextlib.ExitStack() as patched:
        try:
            register_lowerings()
            remember_accesses()
            keep_bodies_apart()
            patches = config_patches(options)
            with_ours = with_joint_pass(patches, joint_pass(decisions, linears, options), key_of(options))
            patched.enter_context(without_donated_buffers(gm))
            patched.enter_context(without_caches(gm))
        except Exception as error:
            raise OursFailed from error
        try:
            return compile_graph(gm, example_inputs, with_ours, lowered_pass(layers, options))
        except CONTROL_FLOW:
            raise
        except Exception as error:
            if options.strict or not (linears.any or decisions.changed or layers.bodies):
                raise
            trouble = f"with ours Inductor raised {type(error).__name__}: {error}"
            _tell(decisions, trouble, "what the backward computes again is torch's choice alone")
            if layers.bodies:
                layers.bodies.clear()
                _tell(layers, trouble, "each layer is compiled by itself")
            if linears.any:
                linears.products.clear()
                _tell(linears, trouble, "every linear is in bfloat16")
            return compile_graph(gm, example_inputs, patches)


DECISIONS = "fx_fusion_decisions"  # in the meta of a graph: where to write down what its backward computes again
LINEARS = "fx_fusion_linears"  # and what became of its linears
LAYERS = "fx_fusion_layers"  # and which of its layers are compiled once
_SEEN = "fx_fusion_seen"  # in the meta of a joint graph's nodes, and so of those of its parts


def joint_pass(decisions: Decisions, linears: Linears, options: Options) -> Callable[[fx.Graph], None]:
    """Return the pass over a joint graph before it is partitioned.

    It changes linears, then norms that are read in 16 bits, what the backward computes again, tied embeddings, and norms
    that are read in float8. Where one step raises, the others are done all the same."""
    decisions.asked = True
    linears.recipe, linears.asked = options.float8, options.float8 != "off"

    def attempt(step: Callable[[], Any], so: str, of: Decisions | Linears | None = None) -> Any:
        """Return what a step returns, or None: what follows from its failure is said, and written down where it is known."""
        try:
            return step()
        except Exception as error:
            if options.strict:
                raise
            _tell(of, f"{type(error).__name__}: {error}", so)

    def run(graph: fx.Graph) -> None:
        if any(_SEEN in node.meta for node in graph.nodes):
            return  # a part of a graph that was one: Inductor shows the parts of a body's joint graph once more
        for node in graph.nodes:
            node.meta[_SEEN] = True
        if linears.asked:
            given = (graph, options.float8_keep, options.select, decisions, linears)
            attempt(lambda: to_float8(*given), "not every linear is in float8", linears)
        decisions.narrowed += attempt(lambda: narrow_norms(graph), "norms are stored as they are computed") or 0
        torchs_choice = "what the backward computes again is torch's choice alone"
        attempt(lambda: decide(graph, options.memory, decisions), torchs_choice, decisions)
        by_inductor = "gradients of tied embeddings are added by Inductor"
        decisions.added += attempt(lambda: add_embeddings_to_others(graph), by_inductor) or 0
        if linears.any:
            attempt(lambda: quantize_in_norms(graph), "kernels of their own quantize the results of norms")

    return run


def lowered_pass(layers: Layers, options: Options) -> Callable[[fx.GraphModule, bool], None] | None:
    """Return what is done to a graph before Inductor lowers it: equal layers become calls of one body. None for nothing."""
    if options.layers != "once":
        return None

    def run(gm: fx.GraphModule, backward: bool) -> None:
        if not may_call_bodies():
            layers.trouble = "Inductor's C++ and FX wrappers, AOTInductor and freezing call no bodies"
            return
        try:
            layers.bodies += compile_layers_once(gm, backward=backward, epilogues=fuses_epilogues())
        except Exception as error:
            if options.strict:
                raise
            _tell(layers, f"{type(error).__name__}: {error}", "each layer is compiled by itself")

    return run


def _tell(of: Decisions | Linears | Layers | None, trouble: str, so: str) -> None:
    if of is not None:
        of.trouble = trouble
    warnings.warn(f"fx_fusion: {so}: {trouble}", stacklevel=2)


def plain_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a graph with the user's options, and nothing of ours but PyTorch's mended calls of graphs."""
    try:
        keep_bodies_apart()
    except Exception as error:
        _tell(None, f"{type(error).__name__}: {error}", "calls of graphs are compiled as PyTorch does")
    return compile_graph(gm, example_inputs, options.inductor)
