"""Choose what the backward computes again, by bytes saved against time lost, before AOTAutograd's partitioner decides.

``speed``: nothing of ours. ``auto``: what frees most bytes a second first, up to one percent of a step in all, and no
more than half of the time that the fusions of the graph gain. ``min``: everything that is cheap. Attention, products, losses
and random numbers are never computed twice. Under a budget of the user (``activation_memory_budget``) the partitioner is
told so, as it does not know ours.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.nn import Parameter

from fx_fusion.graph.places import module_of, shortened
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.memory.candidates import Candidate, candidates
from fx_fusion.memory.cost import is_expensive, seconds_again, seconds_of_step
from fx_fusion.memory.joint_graph import JointGraph
from fx_fusion.torch_internals.partitioner import has_a_budget, is_decided, save

MEMORY = ("speed", "auto", "min")
_SHARE = 0.01  # of a step


@dataclass(frozen=True)
class Value:
    """A value that is saved although it is cheap, or that is computed again."""

    kind: str
    module: str
    bytes: float
    seconds: float
    again: bool


@dataclass
class Decisions:
    """The decisions about one joint graph. ``asked``, but not ``made``: torch's cache had the compiled graph already.
    ``written``: the inputs that the graph writes to, which the backward then finds as they were left; ``parameters``: those
    that are parameters, in memory anyway; ``rows``: how many DTensors among these have on all ranks; ``attributes``: the
    names of tensors that the graph itself holds and writes to."""

    narrowed: int = 0  # norms that are stored in 16 bits, as they are read (``memory.narrow``)
    added: int = 0  # embeddings whose gradient is added into lm_head's (``memory.tied``)
    written: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    rows: dict[int, int] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    gained: float | None = None  # seconds of a step, by the estimates of all fused sites; None where one has no estimate
    asked: bool = False
    made: bool = False
    values: list[Value] = field(default_factory=list)
    step: float = 0.0  # seconds, estimated
    trouble: str = ""  # why nothing was decided, if something raised

    @property
    def changed(self) -> bool:
        """Return True if the joint graph is another one than torch would partition."""
        return bool(self.narrowed or self.added or any(value.again for value in self.values))

    def sentences(self) -> list[str]:
        """One for norms, one for what is computed again, one for what could be; or why nothing is known."""
        if self.trouble:
            return [f"what the backward computes again is torch's choice alone: {self.trouble}"]
        if self.asked and not self.made:
            return ["from torch's compile cache: what its backward computes again was decided when it was compiled"]
        narrowed = [f"stored in 16 bits, as all that reads them casts them: {self.narrowed} x norm"] if self.narrowed else []
        sides = [[v for v in self.values if v.again is again] for again in (True, False)]
        both = {_alike(v) for v in sides[0]} & {_alike(v) for v in sides[1]}
        added = [f"added into lm_head's gradient, row by row: that of {self.added} x embedding"] if self.added else []
        return narrowed + added + [_sentence(values, both, self.step) for values in sides if values]


def _alike(value: Value) -> tuple[str, str]:
    """Its kind and the last part of the module's path without numbers: layers of one model share a line."""
    return value.kind, re.sub(r"\.\d+(?=\.|$)", "", value.module).split(".")[-1]


def _sentence(values: list[Value], both: set[tuple[str, str]], step: float) -> str:
    """``both``: what is computed again in some modules and saved in others, which are then named."""
    kinds: dict[tuple[str, str], list[Value]] = defaultdict(list)
    for value in values:
        kinds[_alike(value)].append(value)
    parts = []
    for (kind, module), of in kinds.items():
        where = shortened(v.module for v in of) if (kind, module) in both and not of[0].again else module
        parts.append(f"{len(of)} x {kind}{' in ' * bool(where)}{where} ({size_of(sum(v.bytes for v in of))})")
    took = sum(v.seconds for v in values)
    what = "computed again in the backward, not saved" if values[0].again else "saved, though cheap"
    time = f"{_ms(took)} ms" + (f" of about {_ms(step)}" if step else "")
    return f"{what}: {', '.join(parts)}; {time}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2g}"


def size_of(count: float) -> str:
    """Bytes in words: ``1.5 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"


def decide(graph: fx.Graph, memory: str, decisions: Decisions) -> None:
    """Mark in a joint graph what the backward computes again, and write it down. An inference graph stays as it is."""
    decisions.made = True
    # A program may change a parameter between forward and backward if its cast alone was saved, as under autocast.
    there = decisions.parameters if memory == "min" else ()
    joint = JointGraph(graph, written=decisions.written, parameters=there)
    if not joint.backward:
        return
    if has_a_budget(graph):
        for node in joint.forward:
            if is_expensive(node) and not is_decided(node):
                save(node)
    for node in joint.from_lost():
        save(node)  # torch 2.13 computes it again from what the input holds by then: a gradient of other numbers
    step = seconds_of_step(joint)
    decisions.step += step  # of all joint graphs: a body that is called has one of its own
    found = sorted(((c, seconds_again(c)) for c in candidates(joint)), key=lambda item: item[1] / item[0].saved)
    share = _SHARE * step
    if decisions.gained is not None:
        share = min(share, decisions.gained / 2)  # an estimate that is twice too high leaves the step as fast as Inductor's
    left = {"speed": 0.0, "auto": share, "min": float("inf")}[memory]
    moved, sources = set[fx.Node](), set[fx.Node]()
    for candidate, seconds in found:
        # What is made again of a norm's result reads that of the forward: it is saved then.
        apart = candidate.sources.isdisjoint(moved) and not (candidate.moves and candidate.node in sources)
        again = apart and seconds <= left and not (candidate.moves and _gives_way(candidate, found, left))
        left -= seconds if again else 0
        decisions.values.append(Value(candidate.kind, module_of(candidate.node), candidate.saved, seconds, again))
        if again:
            moved |= {candidate.node} if candidate.moves else set()
            sources |= candidate.sources
            candidate.apply()


def _gives_way(norm: Candidate, found: Sequence[tuple[Candidate, float]], left: float) -> bool:
    """Return True if something larger, that there is time for, can only be made again while the norm's result is saved: the
    rows of experts, several for each token."""
    return any(norm.node in c.sources and c.saved > norm.saved and seconds <= left for c, seconds in found)


def describe_inputs(gm: fx.GraphModule, views: Mapping[fx.GraphModule, View], decisions: Decisions) -> None:
    """Write down which inputs of Dynamo's graph are parameters, and what it writes to."""
    inside = any(view.effects.written_inputs() for module, view in views.items() if module is not gm)
    written = views[gm].effects.written_inputs()
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        decisions.written += (i,) if inside or node in written else ()
        if isinstance(parameter := example(node), Parameter):
            decisions.parameters += (i,)
            if hasattr(parameter, "placements") and parameter.dim() and isinstance(rows := parameter.shape[0], int):
                decisions.rows[i] = rows
    decisions.attributes = tuple(sorted({str(node.target) for node in written if node.op == "get_attr" and is_tensor(node)}))

