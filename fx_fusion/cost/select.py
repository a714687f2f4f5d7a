"""Decide whether a legal fusion pays here. A kept site is reported with the sentence that decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.cost import measure, table
from fx_fusion.cost.estimate import Estimate, estimate, short
from fx_fusion.cost.neighbors import beside
from fx_fusion.float8.choice import without_support
from fx_fusion.fusion.declaration import Fusion, Reason
from fx_fusion.fusion.legality import asked
from fx_fusion.fusion.match import Match
from fx_fusion.graph.devices import device_type
from fx_fusion.graph.size_hints import expected
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.graph.view import View
from fx_fusion.inductor.channels_last import images_of
from fx_fusion.ops.layouts import is_channels_last
from fx_fusion.options import Options

# resnetv2_50d_evos, 128 x 224 x 224, bfloat16, H200: under CUDA graphs 20.4 ms (Inductor 26.7). The host took 23.6 (21.3)
# when the kernels took 22.2: 1.14 of Inductor's speed on an idle host, 0.86 on a busy one.
_HOST_BOUND = (
    "between convolutions laid out channels last its kernels are faster and the host is slower: "
    'fused under CUDA graphs (mode="reduce-overhead") and with select="always"'
)
_LARGE = 2**22  # elements: below, float8 gains nothing that shows
_RESHAPES = ("view", "reshape", "flatten")
_PRODUCTS = ("linear", "addmm", "matmul", "mm", "einsum")


@dataclass(frozen=True)
class Choice:
    """The reason why Inductor keeps a site (None: the fused op replaces it), what the report says of it besides, and what it
    takes."""

    keep: Reason
    note: str = ""
    estimate: Estimate | None = None


def choose(fusion: Fusion, match: Match, view: View, options: Options, claimed: Mapping[fx.Node, int]) -> Choice:
    """Return what becomes of a legal match; ``claimed``: of how many legal matches a node is part."""
    asked_for = fusion.name in options.fusions and options.select not in ("always", "never")
    keep, note = _by_cost(fusion, match, view, options) if asked_for else (None, "")  # it measures, then all is known
    found, ops = estimate(fusion, match, options), ""
    if found is not None:
        neighbors = beside(match, view, claimed)
        found, ops = found.with_neighbors(neighbors), neighbors.ops
    if fusion.name not in options.fusions:
        return Choice("switched off by options", estimate=found)
    if not asked_for:
        return Choice('options={"select": "never"}' if options.select == "never" else None, estimate=found)
    if keep is None and found is not None and found.beside is not None and found.speed <= 1:
        keep = f"Inductor's kernel computes the {ops} beside it too, saving {short(found.beside)} us"
    return Choice(keep, note, found)


def _by_cost(fusion: Fusion, match: Match, view: View, options: Options) -> tuple[Reason, str]:
    """Return why Inductor keeps a site as far as it is looked at alone, or None; and what the report says besides."""
    note = ""
    if options.select == "measure" and (match.sharded or match.parts):
        note = "not measured: each rank would decide by its own times, and all have to do the same"
    elif options.select == "measure" and (keep := _by_the_host(fusion, match, options)) is not None:
        return keep, ""
    elif options.select == "measure":
        verdict = measure.ask(fusion, match)
        if verdict.measured:
            return verdict.keep, ""
        note = f"not measured: {verdict.trouble}"
    return _by_rules(fusion, match, view, options), note


def _by_the_host(fusion: Fusion, match: Match, options: Options) -> Reason:
    """Return why Inductor keeps a site for what its launches cost the host, which kernels that are timed don't show; or
    None."""
    if match.channels_last and not options.cuda_graphs:
        return _HOST_BOUND
    tensors = (match.example(name) for name, bound in match.inputs.items() if is_tensor(bound))
    symbolic = any(not isinstance(n, int) for t in tensors for n in (*t.shape, *t.stride()))
    return asked(fusion, "why_keep", match) if symbolic and device_type(example(match.root)) == "cuda" else None


def _by_rules(fusion: Fusion, match: Match, view: View, options: Options) -> Reason:
    """Return why Inductor keeps a site as far as rules, tables and formulas know, or None."""
    name = next((n for n, v in match.inputs.items() if is_tensor(v)), None)  # attention may group all of them anew
    tensor = example(match.outputs[0] if name is None else match.inputs[name])
    if device_type(tensor) == "cpu" and not fusion.on_cpu:
        return "on CPU Inductor compiles this as well"
    dims = () if name is None else fusion.specs[name].dims
    rows = len(dims) > 1 and dims[0].several and expected(tensor.shape[-1]) > 1
    if rows and statically_known_true(tensor.stride(-1) != 1):
        return "the last dim is strided; the kernel would first copy it"
    if match.channels_last and not options.cuda_graphs:
        return _HOST_BOUND
    if returns_contiguous(fusion, match, view):
        return "the graph returns its result contiguous; the kernel would make it channels last, and copy it"
    if fusion.float8 and options.float8 != "off" and _writes_float8(match, view):
        return None
    return match.keep or asked(fusion, "why_keep", match) or table.why_slower(fusion, match)


def _writes_float8(match: Match, view: View) -> bool:
    """Return True if a product reads a site's result, which may be in float8 then. Where it is not (``float8.choice``) the
    kernel stores bfloat16, as fast as Inductor's."""
    (result,) = match.outputs
    value = example(result)
    static = all(isinstance(size, int) for size in value.shape)
    if value.dtype != torch.bfloat16 or without_support(value.device) or not static or value.numel() < _LARGE:
        return False
    found = [result]
    for node in found:
        found += [user for user in node.users if view.transparent(user) is node or view.name(user) in _RESHAPES]
    return any(view.name(user) in _PRODUCTS for node in found for user in node.users)


def returns_contiguous(fusion: Fusion, match: Match, view: View) -> bool:
    """Return True if the graph returns contiguous an image that the kernel would make channels last."""
    last = [image for n in images_of(fusion, match.inputs) if is_channels_last(image := match.example(n))]
    return any(
        same_shape(example(output), image) and example(output).is_contiguous() and view.effects.returned(output)
        for output in match.outputs
        for image in last
    )
