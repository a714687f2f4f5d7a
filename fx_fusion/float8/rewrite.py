"""Write the products of linears in a joint graph anew, in float8, where they may be and gain by it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch import fx

from fx_fusion.float8.choice import gained, pays_together, slower, slower_gradients, why_not, without_support
from fx_fusion.float8.gates import quantize_in_gates
from fx_fusion.float8.inserter import Inserter
from fx_fusion.float8.linears import FORWARD, OF_INPUT, OF_WEIGHT, Linears
from fx_fusion.float8.products import (
    Product,
    WeightGradient,
    batches_of_one_to_products,
    products,
    unpaired,
    vocabularies,
    weight_gradients,
)
from fx_fusion.float8.sums import sums
from fx_fusion.float8.writer import Writer
from fx_fusion.graph.places import module_of
from fx_fusion.graph.size_hints import expected
from fx_fusion.memory.joint_graph import JointGraph
from fx_fusion.memory.recompute import Decisions

_HALF = "its forward, or the gradient of its input, is in bfloat16"


def to_float8(graph: fx.Graph, keep: Sequence[str], select: str, inputs: Decisions, linears: Linears) -> None:
    """Write the products of a joint graph anew that may be and that gain by it, and write down what became of each.

    Args:
        keep: patterns (``fnmatch``) of the paths of modules that stay in bfloat16.
        select: ``"always"``: without asking whether they gain; ``"never"``: none.
        inputs: which of them are parameters, and which the graph writes to.
    """
    linears.made = True
    parameters = frozenset(inputs.parameters)
    batches_of_one_to_products(graph, parameters)
    joint = JointGraph(graph, written=inputs.written)
    found = list(products(joint, parameters))
    if not found:
        return
    device = found[0].a.meta["val"].device
    emulate = select == "always" and device.type == "cpu"
    linears.trouble = "" if emulate else without_support(device)
    if linears.trouble:
        warnings.warn(f"fx_fusion: float8 was asked for, and all is in bfloat16: {linears.trouble}", stacklevel=2)
        return
    modules: dict[fx.Node, list[str]] = {}  # several may share a weight
    for forward in (p for p in found if not p.backward):
        modules.setdefault(forward.weight, []).append(module_of(forward.node))
    of = {p: modules.get(p.weight, []) if p.backward else [module_of(p.node)] for p in found}
    places = {p: next(filter(None, reversed(of[p])), "") or module_of(p.node) for p in found}
    classes = set(vocabularies(joint, found, inputs.rows))
    kept = {p: reason for p in found if (reason := why_not(p, of[p] or [places[p]], keep, of_classes=p.weight in classes))}
    if not emulate:
        kept.update({p: "how many rows it has is known when it runs" for p in found if math.isinf(expected(p.sizes[0]))})
    kept.update({p: "the graph writes to its weight" for p in found if joint.is_lost(p.weight)})
    gradients = list(weight_gradients(joint, found)) if linears.recipe == "rowwise" else []
    owning = {g.of_input for g in gradients}
    if select == "never":
        kept.update(dict.fromkeys(found, "select='never'"))
    elif select != "always":
        slow = slower(p for p in found if p not in kept)
        for group in sums((p for p in found if p not in kept and (p.backward or p not in slow)), owning):
            if pays_together(group, slow):
                slow = {p: reason for p, reason in slow.items() if p not in group}
        kept.update(slow)
    left = {g: _HALF for g in gradients if g.forward in kept or g.of_input in kept}
    if select != "always":
        left.update(slower_gradients(g for g in gradients if g not in left))
    inserter = Inserter(graph)
    written = [p for p in found if p not in kept]
    groups = sums(written, {g.of_input for g in gradients if g not in left})
    writer = Writer(inserter, emulate, power_of_two=len(left) < len(gradients), groups=groups)
    both: list[Product | WeightGradient] = [*found, *gradients]
    seconds = gained(written, [g for g in gradients if g not in left])
    for product in sorted(both, key=lambda product: product.node):
        if isinstance(product, WeightGradient):
            place, kind, reason = places[product.forward], OF_WEIGHT, left.get(product, "")
        else:
            place, kind, reason = places[product], OF_INPUT if product.backward else FORWARD, kept.get(product, "")
        if not reason:
            writer.write(product)
        linears.products.append((place, kind, reason, seconds.get(product, 0.0)))
    if linears.recipe == "rowwise":
        alone = "its input has no gradient, which would be made of the same rows"
        linears.products += [(places[p], OF_WEIGHT, alone, 0.0) for p in unpaired(joint, found, gradients)]
    quantize_in_gates(inserter, writer)
