"""Compile a graph with Inductor: with what our ops need around it, or with nothing of ours."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fx_fusion.inductor.cache_key import config_patches, key_of
from fx_fusion.memory.recompute import Decisions, decide
from fx_fusion.ops.layouts import without_donated_buffers
from fx_fusion.ops.library import register_lowerings
from fx_fusion.options import Options
from fx_fusion.rewrite.foreach_floats import without_caches
from fx_fusion.torch_internals.dynamo import CONTROL_FLOW
from fx_fusion.torch_internals.inductor import compile_graph, with_joint_pass
from fx_fusion.torch_internals.kernel_accesses import remember_accesses

Compiled = Callable[..., Any]


class OursFailed(Exception):
    """Something of ours raised (the cause) on the way to Inductor."""


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a rewritten graph, with the user's options and our part of the cache key. Raises OursFailed where it is not
    Inductor that fails."""
    decisions: Decisions = gm.meta.get(DECISIONS, Decisions())
    decisions.asked = True
    with contextlib.ExitStack() as patched:
        try:
            register_lowerings()
            remember_accesses()
            patches = config_patches(options)
            with_memory = with_joint_pass(patches, _memory_pass(decisions, options), key_of(options))
            patched.enter_context(without_donated_buffers(gm))
            patched.enter_context(without_caches(gm))
        except Exception as error:
            raise OursFailed from error
        try:
            return compile_graph(gm, example_inputs, with_memory)
        except CONTROL_FLOW:
            raise
        except Exception as error:
            if options.strict or not any(value.again for value in decisions.values):
                raise
            _tell(decisions, f"with ours Inductor raised {type(error).__name__}: {error}")
            return compile_graph(gm, example_inputs, patches)


DECISIONS = "fx_fusion_decisions"  # in the meta of a graph: where to write down what its backward computes again


def _memory_pass(decisions: Decisions, options: Options) -> Callable[[fx.Graph], None]:
    def run(graph: fx.Graph) -> None:
        try:
            decide(graph, options.memory, decisions)
        except Exception as error:
            if options.strict:
                raise
            _tell(decisions, f"{type(error).__name__}: {error}")

    return run


def _tell(decisions: Decisions, trouble: str) -> None:
    decisions.trouble = trouble
    warnings.warn(f"fx_fusion: what the backward computes again is torch's choice alone: {trouble}", stacklevel=2)


def plain_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a graph with the user's options, and nothing of ours."""
    return compile_graph(gm, example_inputs, options.inductor)
