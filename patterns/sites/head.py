"""The linear layer that makes the logits of a loss: what the fusions of lm_head and loss share."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.graph.devices import device_type
from fx_fusion.graph.dtypes import computed_in
from fx_fusion.graph.linear import linear_of
from fx_fusion.graph.size_hints import expected, trained
from fx_fusion.graph.terms import described, example
from fx_fusion.graph.view import View
from fx_fusion.kernels.logits.logit_chunks import again_takes_longer
from fx_fusion.ops.shards import own_part, replica, replicated_beside
from fx_fusion.patterns.sites.loss import Logits, LossSite, read_logits
from fx_fusion.patterns.sites.rows import one_a_row
from fx_fusion.patterns.sites.shards import Shards, made_of, placed, shards_below
from fx_fusion.rewrite.editor import Editor, Mismatch


@dataclass
class Head:
    """The linear layer that makes the logits of a loss, and what lies between."""

    x: fx.Node
    lm_head: fx.Node
    bias: fx.Node | None
    seen: Logits
    shards: Shards | None = None

    @property
    def chain(self) -> list[fx.Node]:
        """From the linear layer to the loss."""
        below = [] if self.shards is None else list(self.shards.nodes)
        return [*below, self.seen.source, *self.seen.nodes]

    @property
    def above(self) -> list[fx.Node]:
        """From the plain tensor that the input was made of, where it is a DTensor, to the input."""
        return [] if self.shards is None else made_of(self.x)[1]

    def is_made_of_a_dtensor(self) -> bool:
        """Return True if the input is a DTensor that the graph makes of another one: no source that a graph could return,
        since nobody would hand it a gradient that is a DTensor too."""
        source = made_of(self.x)[0]
        return self.shards is not None and source.op != "placeholder" and placed(source) is not None

    @property
    def sources(self) -> list[fx.Node]:
        """Return what the logits can be made of later: as ``inputs``, with a plain tensor for x."""
        return [made_of(n)[0] if n is self.x and self.shards is not None else n for n in self.inputs.values()]

    @property
    def inputs(self) -> dict[str, fx.Node]:
        """Return what a linear layer needs, without what it has not."""
        given = {"x": self.x, "lm_head": self.lm_head, "bias": self.bias}
        return {name: node for name, node in given.items() if node is not None}


def head_of(view: View, site: LossSite, fusion: str) -> Head | NearMiss:
    """The linear layer under a loss, or how far it got."""
    seen = read_logits(view, site, to_linear=True)
    node = seen.source
    shards = shards_below(node)
    linear = linear_of(view, node if shards is None else shards.linear)
    if shards is not None and linear is not None:
        reason = shards.why_not(linear)
        if reason is not None:
            return NearMiss(fusion, site.root, shards.linear, reason)
    if linear is None:
        return NearMiss(fusion, site.root, node, seen.stopped or _instead_of_linear(view, node))
    if linear.bias is not None and seen.bias is not None:
        return NearMiss(fusion, site.root, node, "two biases follow each other")
    if seen.classes is not None and shards is not None:
        return NearMiss(fusion, site.root, node, "some of the classes are taken, and these lie on several ranks")
    if seen.bias is not None and shards is not None:
        return NearMiss(fusion, site.root, node, "a bias is added to classes of several ranks")
    return Head(linear.x, linear.weight, linear.bias if seen.bias is None else seen.bias, seen, shards)


def _instead_of_linear(view: View, node: fx.Node) -> str:
    term = view.term(node)
    found = f"expected linear, found {described(term)} ({node.name})"
    if term.op == "part" and linear_of(view, view.edge(term.operands[0]).base) is not None:
        return f"{found}: the product of the head is split before the loss"
    return found


def why_small(x: torch.Tensor, lm_head: torch.Tensor, rows: float) -> str | None:
    """Return why so many rows of logits need not be made in chunks, or None."""
    classes = expected(lm_head.shape[0])
    if classes < 4096:
        return f"{lm_head.shape[0]} classes: the logits are no larger than their input"
    if device_type(x) == "cuda" and rows * classes < 2**26:
        return f"{rows:.0f} x {classes} logits fit beside everything else; Inductor needs fewer launches"
    # Two cores, float32, of Inductor's speed: 256 x 5000 logits 0.8, 1024 x 16000 1.1; in bfloat16 0.2 to 0.4.
    if device_type(x) == "cpu" and computed_in(x).itemsize == 2:
        return "on a CPU chunks are added up in float32, which takes longer than Inductor's products in 16 bits"
    if device_type(x) == "cpu" and rows * classes < 2**24:
        return f"{rows:.0f} x {classes} logits: Inductor is faster on a CPU below 2^24"
    return None


def why_again(x: torch.Tensor, lm_head: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Return why the logits had better stay: with a gradient of its own for each row the backward has to make them again."""
    if not trained(x, lm_head, bias) or not again_takes_longer(expected(x.shape[-1]), computed_in(x), device_type(x)):
        return None
    return "a gradient for each row: its backward would make the logits again, which takes longer than keeping them"


def leave_to_linear_rows(editor: Editor, match: Match) -> None:
    """Raise Mismatch where a graph that runs op by op had better keep the logits for a backward of rows, or where it had
    better make none of rows that a mask hides."""
    if editor.eager and all(_is_hidden(editor.view, node) for node in match.outputs):
        raise Mismatch("a mask hides rows of the result, whose logits linear_rows does not make")
    x, lm_head, bias = (example(match.inputs[name]) if name in match.inputs else None for name in ("x", "lm_head", "bias"))
    reason = why_again(x, lm_head, bias) if editor.eager and x is not None and lm_head is not None else None
    if reason is not None and not editor.saves_memory:
        raise Mismatch(reason)


_VIEWS = {"view", "reshape", "unflatten", "squeeze", "unsqueeze", "neg"}


def _is_hidden(view: View, node: fx.Node) -> bool:
    """Return True if a mask chooses between a result and something else, or between views of it."""
    names = {user: view.name(user) for user in node.users}
    through = [user for user, name in names.items() if name in _VIEWS]
    return any(name in ("where", "masked_fill") for name in names.values()) or any(_is_hidden(view, n) for n in through)


def operands(editor: Editor, head: Head, site: LossSite) -> tuple[Any, Any, Any, Any]:
    """x (m, h), lm_head (v, h), bias (v) and target (m) of an op that makes the logits, inserted at the loss."""
    return (*linear_operands(editor, head), one_a_row(editor, site))


def linear_operands(editor: Editor, head: Head) -> tuple[Any, Any, Any]:
    """x (m, h), lm_head (v, h) and bias (v) of an op that makes the logits, inserted at the loss."""
    linear = head.seen.source
    dtype = example(linear).dtype  # under autocast not the dtype of its inputs
    x, weight, bias = head.x, head.lm_head, head.bias
    if head.shards is not None:
        x = editor.call(replica, (x,), like=linear)
        weight = editor.call(own_part, (weight,), like=linear)
        bias = None if bias is None else editor.call(own_part, (bias,), like=linear)
    for choice in reversed(head.seen.row_slices):
        if editor.view.name(choice) in ("view", "reshape", "flatten"):  # of all rows
            x = editor.method("reshape", (x, -1, example(head.lm_head).shape[1]), like=linear)
        elif choice.op == "call_method":
            x = editor.method(str(choice.target), (x, *choice.args[1:]), like=linear)
        else:
            x = editor.call(choice.target, (x, *choice.args[1:]), dict(choice.kwargs), like=linear)
    x = editor.method("reshape", (x, -1, example(head.lm_head).shape[1]), like=linear)
    if head.seen.classes is not None:
        weight = editor.call(operator.getitem, (weight, slice(0, head.seen.classes)), like=linear)
    x, lm_head = (editor.cast(n, dtype, like=linear) for n in (x, weight))
    if bias is not None:
        if example(bias).dim() != 1:
            bias = editor.method("reshape", (bias, -1), like=linear)
        if head.seen.classes is not None:
            bias = editor.call(operator.getitem, (bias, slice(0, head.seen.classes)), like=linear)
        bias = editor.cast(bias, dtype, like=linear)
    return x, lm_head, bias


def sources_of_logits(editor: Editor, head: Head, match: Match) -> list[fx.Node]:
    """Return what the deferred logits can be made of later, with a plain tensor for x. Where x is a DTensor that the
    graph makes of another one, the linear layer, which makes nothing else now, reads a DTensor that is made of the plain
    tensor."""
    if not match.deferred or head.shards is None or not head.is_made_of_a_dtensor():
        return head.sources
    linear, x, weight = head.shards.linear, editor.now(head.x), editor.now(head.lm_head)
    with editor.graph.inserting_before(linear):
        own = editor.call(replica, (x,), like=linear)
        again = editor.call(replicated_beside, (own, weight), like=linear)
    linear.replace_input_with(x, again)
    return [own if node is head.x else node for node in head.inputs.values()]
