"""Logits that a graph returns and does not read itself: they are deferred for a loss outside (``rewrite.losses_outside``).

What else reads them gets them as the model would have computed them: by one product, as before. Where no loss takes them in
call after call, they are made at once (``runtime.reads``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, fx

from fx_fusion.fusion.legality import why_not_plain
from fx_fusion.fusion.search import Search
from fx_fusion.graph.linear import linear_of
from fx_fusion.graph.size_hints import elements, expected
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.rewrite.deferral import deferrable_outputs
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.torch_internals.nodes import is_erased

_FEWEST_CLASSES = 30000  # of a vocabulary; the widest layers that are none are narrower
_FEWEST_LOGITS = {"cuda": 2**26, "cpu": 2**24}  # below, they fit beside everything else, and launches cost more


@dataclass(frozen=True)
class Head:
    """A linear layer whose large result a graph returns, as ``output``, and does not read."""

    linear: fx.Node
    operands: list[fx.Node]
    output: fx.Node


def heads(search: Search) -> list[Head]:
    """Every such layer of a graph that is not rewritten yet."""
    view = search.view
    found = []
    for node in view.graph.nodes:
        linear = linear_of(view, node)
        if linear is None:
            continue
        operands = [n for n in (linear.x, linear.weight, linear.bias) if n is not None]
        plain = all(is_tensor(n) and why_not_plain(example(n)) is None for n in (node, *operands))
        with_gradients = view.effects.region[node][0]
        if not plain or not is_large(example(node)) or example(node).requires_grad != with_gradients:
            continue  # frozen logits in a graph with gradients: a teacher's, which a student's loss reads
        outputs, _ = deferrable_outputs(search, [node], set(), operands)
        if len(outputs) == 1 and view.source(outputs[0]).base is node:  # it, or a cast of it that keeps its values
            found.append(Head(node, operands, outputs[0]))
    return found


def defer_for_a_loss_outside(found: Iterable[Head], editor: Editor) -> None:
    """Defer the results of those that no rewrite has touched."""
    for head in found:
        if is_erased(head.linear) or editor.now(head.output) is not head.output:
            continue
        linear = head.linear
        if linear.target is not F.linear:  # a product with a transposed weight: what takes its place reads a linear layer
            try:
                with editor.graph.inserting_before(linear):
                    linear = editor.call(F.linear, tuple(head.operands), like=linear)
                editor.replace(head.linear, linear)
            except Mismatch:
                editor.erase([linear])
                continue
            editor.erase([head.linear])
        editor.defer([editor.now(head.output)], head.operands, like=head.linear, of_linear=example(linear).dtype)


def is_large(logits: Tensor) -> bool:
    """Return True if logits are those of a vocabulary, and too many to be made at once without need."""
    fewest = _FEWEST_LOGITS.get(logits.device.type)
    if fewest is None or logits.dim() == 0:
        return False
    return expected(logits.shape[-1]) >= _FEWEST_CLASSES and elements(logits) >= fewest
