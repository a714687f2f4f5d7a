"""Hold what matching says: where a fusion fits, and where it nearly does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fx_fusion.graph.terms import Term, example
from fx_fusion.ops.layouts import to_channels_last


@dataclass(frozen=True)
class Match:
    """One place where a fusion fits.

    Attributes:
        fusion: its name.
        outputs: the nodes whose values the fused op makes, the root first.
        nodes: everything that the op stands for, outputs included: dead once the outputs are replaced.
        inputs: bound nodes and numbers by declared parameter.
        statics: the static parameters of the variant that matched.
        others: nodes by name that the replacement reads and that are no declared inputs (labels of a mask, a second tensor).
        crossed: nodes between an input and its first use that change no value (they may have other users).
        rounded: the casts among ``nodes`` that the kernel makes too; any other that rounds is a reason to decline.
        differs: where the graph computes or rounds in another dtype than the kernel, or has another shape; None if nowhere.
        terms: the graph's terms for those of the pattern; empty for matches made by a finder.
        deferred: matched nodes that the graph returns and that are computed only when read.
        reading: what a finder read, for the ``emit`` of its fusion.
        keep: why Inductor is as good here, where that follows from what the finder read; ``why_keep`` is about the inputs.
        note: what the report says of the site, whatever becomes of it.
        unmade: what the model's code makes and the replacement never has in memory, by its name in the report (logits).
        sharded: inputs that are DTensors, whose placements the finder knows: the replacement reads this rank's parts.
        parts: inputs that are DTensors, of which the kernel takes this rank's part: how the gradient of each lies.
        channels_last: inputs that go to the kernel channels last, since Inductor lays out this graph so.
    """

    fusion: str
    outputs: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]
    inputs: Mapping[str, Any]
    statics: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, fx.Node] = field(default_factory=dict)
    crossed: frozenset[fx.Node] = frozenset()
    rounded: frozenset[fx.Node] = frozenset()
    differs: str | None = None
    terms: tuple[Term, ...] = ()
    deferred: tuple[fx.Node, ...] = ()
    reading: Any = None
    keep: str | None = None
    note: str = ""
    unmade: Mapping[str, fx.Node] = field(default_factory=dict)
    sharded: frozenset[str] = frozenset()
    parts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    channels_last: frozenset[str] = frozenset()

    @property
    def root(self) -> fx.Node:
        """The first output: the site stands at its line and module."""
        return self.outputs[0]

    @property
    def operands(self) -> dict[str, Any]:
        """Everything that the replacement reads, by name."""
        return {**self.inputs, **self.others}

    def example(self, parameter: str) -> Any:
        """The example value of an input, laid out as the kernel will get it."""
        known = example(self.inputs[parameter])
        if parameter in self.parts:
            known = known.to_local()
        if parameter not in self.channels_last:
            return known
        with known.fake_mode:
            return to_channels_last(known).requires_grad_(known.requires_grad)


@dataclass(frozen=True)
class NearMiss:
    """A failed attempt at ``root``: ``reason`` at ``node``. ``matched`` of ``total`` ops of the pattern fit before that;
    both are 0 where a finder read the graph."""

    fusion: str
    root: fx.Node
    node: fx.Node
    reason: str
    matched: int = 0
    total: int = 0
