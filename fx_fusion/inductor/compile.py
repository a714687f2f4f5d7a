"""Compile a graph with Inductor: with what our ops need around it, or with nothing of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fx_fusion.inductor.cache_key import config_patches
from fx_fusion.ops.layouts import without_donated_buffers
from fx_fusion.ops.library import register_lowerings
from fx_fusion.options import Options
from fx_fusion.rewrite.foreach_floats import without_caches
from fx_fusion.torch_internals.inductor import compile_graph
from fx_fusion.torch_internals.kernel_accesses import remember_accesses

Compiled = Callable[..., Any]


class OursFailed(Exception):
    """Something of ours raised (the cause) on the way to Inductor."""


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a rewritten graph, with the user's options and our part of the cache key. Raises OursFailed where it is not
    Inductor that fails."""
    with contextlib.ExitStack() as patched:
        try:
            register_lowerings()
            remember_accesses()
            patches = config_patches(options)
            patched.enter_context(without_donated_buffers(gm))
            patched.enter_context(without_caches(gm))
        except Exception as error:
            raise OursFailed from error
        return compile_graph(gm, example_inputs, patches)


def plain_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a graph with the user's options, and nothing of ours."""
    return compile_graph(gm, example_inputs, options.inductor)
