"""One compiled graph, as the report has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fx_fusion.cost.table import tables_for
from fx_fusion.float8.linears import Linears
from fx_fusion.inductor.layers_once import Layers
from fx_fusion.memory.recompute import Decisions
from fx_fusion.report.diff import Row, text
from fx_fusion.rewrite.verify_graph import Verified
from fx_fusion.runtime.reads import Reads
from fx_fusion.runtime.speculate import Calls


@dataclass
class GraphReport:
    """One compiled graph: its rows before and after, how many nodes, what was left to Inductor."""

    index: int
    rows_before: tuple[Row, ...] = ()
    rows_after: tuple[Row, ...] = ()
    nodes_before: int = 0
    nodes_after: int = 0
    planned_for: str = ""  # the GPU by whose table it was planned, where that is not here
    fallback: str = ""  # why the graph went to Inductor unchanged, if it did
    broke: str = ""  # the graph break that it ends at, if it does
    front_ends: tuple[str, ...] = ()  # libraries whose calls are part of it by a front end
    written_out: tuple[str, ...] = ()  # sentences: what it computes in plain PyTorch because a library is missing
    floats: int = 0  # foreach calls that take a float that changes as the tensor it came in
    joined: int = 0  # new tensors that were written in two halves
    experts: int = 0  # grouped products that are cast as autocast casts linear layers
    apart: int = 0  # linear layers of which each part of the rows has one of its own
    outside: tuple[str, ...] = ()  # nodes of losses of rows that are computed with the loss outside
    deferred: tuple[str, ...] = ()  # outputs that are computed when they are read
    computed: tuple[str, ...] = ()  # outputs that could wait, and are read
    assumes: tuple[str, ...] = ()
    unassumed: tuple[str, ...] = ()  # what it would assume, had it held in the first call
    unmet: Calls = field(default_factory=Calls)  # of that
    calls: Calls = field(default_factory=Calls)
    reads: Reads = field(default_factory=Reads)
    memory: Decisions = field(default_factory=Decisions)  # what the backward computes again
    linears: Linears = field(default_factory=Linears)  # which of them multiply in float8
    layers: Layers = field(default_factory=Layers)  # which of them are compiled once
    verified: Verified = field(default_factory=Verified)  # what options={"verify": ...} found
    instead_of: int | None = None  # the graph that this one is another version of, if that is in the report
    version: str = ""  # which, and when it is compiled
    options: dict[str, Any] = field(default_factory=dict)  # that it was compiled with
    compile_id: str = ""
    attempt: int = 0  # of Dynamo, at the code with this id
    seconds: float = 0.0

    @property
    def checked(self) -> Calls:
        """Return how often what it assumes of its inputs held; where it assumes nothing, what it would assume."""
        return self.calls if self.assumes else self.unmet

    @property
    def before(self) -> str:
        """The graph that Dynamo captured, a line a node."""
        return text(self.rows_before)

    @property
    def after(self) -> str:
        """The rewritten graph, a line a node."""
        return text(self.rows_after)

    def notes(self) -> Iterator[str]:
        """Yield what there is to say of a graph besides its sites."""
        if self.version:
            yield f"{'a graph of before' if self.instead_of is None else f'graph {self.instead_of}'} {self.version}"
        if self.planned_for:
            nearest = tables_for(self.planned_for, torch.device("meta"))[0]
            whose = "its table" if nearest == self.planned_for else f"the table of an {nearest}, the nearest one in speed"
            yield f"planned for {self.planned_for}, by {whose}"
        if self.fallback:
            yield f"unchanged to Inductor: {self.fallback}"
        if self.broke:
            yield f"ends at a {self.broke}"
        if self.front_ends:
            yield f"calls of {', '.join(self.front_ends)} are part of it: front_ends=False leaves them to eager"
        yield from self.written_out
        if self.floats:
            yield f"{self.floats} foreach call(s) take a changing float as a tensor"
        if self.experts:
            yield f"{self.experts} grouped product(s) of float32 weights are in autocast's dtype, as options ask for"
        if self.joined:
            yield f"{self.joined} tensor(s) that are written in two halves are one value"
        if self.apart:
            yield f"{self.apart} linear layer(s) run once for each part of the rows that is taken from the result"
        if self.outside:
            yield "losses of rows that it returns are computed outside of it, with the loss that they go into"
        if self.deferred:
            yield _deferred(self)
        if self.computed:
            yield f"computed beside the loss: {', '.join(self.computed)}"
        if self.assumes:
            yield f"assumes, and checks at run time: {', '.join(self.assumes)}{_held(self.calls)}"
        if self.unassumed:
            yield f"not assumed, as it did not hold in the first call: {', '.join(self.unassumed)}{_held(self.unmet)}"
        yield from self.linears.sentences()
        yield from self.memory.sentences()
        yield from self.layers.sentences()
        yield from self.verified.sentences()


def _deferred(graph: GraphReport) -> str:
    reads = graph.reads
    read = f"; read in {reads.calls_read} of {reads.calls} calls" if reads.calls else ""
    taken = f"; a loss outside took what they are made of in {reads.calls_taken}" if reads.calls_taken else ""
    at_once = f"; made at once in {reads.calls_at_once}, as no loss alone took them" if reads.calls_at_once else ""
    return f"deferred until read: {', '.join(graph.deferred)}{read}{taken}{at_once}"


def _held(calls: Calls) -> str:
    return f"; held in {calls.assumed} of {calls.assumed + calls.otherwise} calls" if calls != Calls() else ""
