"""Estimate what a site takes under fx_fusion and under Inductor, for the report: measured here, by the GPU's table, or by
formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fx_fusion.cost import measure, table
from fx_fusion.cost.gpus import rate_of
from fx_fusion.cost.neighbors import Beside
from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.match import Match
from fx_fusion.graph.devices import device_type, gpu_name, planned_gpu
from fx_fusion.graph.size_hints import elements, trained
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.options import Options
from fx_fusion.torch_internals.inductor import bytes_per_second

_NEAR = math.log(1.05)  # sizes so near to a measured cell's take its time


@dataclass(frozen=True)
class Estimate:
    """The times of one site, forward and backward where it is trained.

    Attributes:
        source: ``measured``, ``table``, ``table of an NVIDIA H200`` (on a GPU that was not measured) or ``formula``.
        speed: Inductor's time over ours.
        ours: our microseconds, where they are known, and those of ``beside``.
        inductor: Inductor's, where they are known.
        bytes: what our kernels move, and pointwise neighbors between them, where the fusion has a formula for it.
        inductor_bytes: what Inductor's move.
        beside: the microseconds that reading and writing pointwise neighbors takes, which are none of Inductor's.
    """

    source: str
    speed: float
    ours: float | None = None
    inductor: float | None = None
    bytes: float | None = None
    inductor_bytes: float | None = None
    beside: float | None = None

    def with_neighbors(self, neighbors: Beside) -> Estimate:
        """The same with what pointwise neighbors cost, where times are known."""
        if not neighbors.bytes or self.ours is None or self.inductor is None:
            return self
        more = neighbors.bytes / _bytes_a_microsecond(neighbors.device)
        moved = None if self.bytes is None else self.bytes + neighbors.bytes
        return replace(self, speed=self.inductor / (self.ours + more), ours=self.ours + more, bytes=moved, beside=more)

    def facts(self) -> dict[str, Any]:
        """Return what is known, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def estimate(fusion: Fusion, match: Match, options: Options) -> Estimate | None:
    """Return what is known of a site; None where neither a measurement nor a formula speaks of it, and on CPUs."""
    given = {name: match.example(name) for name, bound in match.inputs.items() if is_tensor(bound)}
    sizes = table.sizes_of(fusion, given)
    floating = [t for t in given.values() if t.is_floating_point()]
    if sizes is None or not floating or device_type(floating[0]) != "cuda":
        return None
    itemsize = floating[0].dtype.itemsize
    moved = _moved(fusion, match, sizes, itemsize)
    ours, theirs = moved if trained(*floating) else (None, None)  # the formulas are of forward and backward
    if options.select == "measure" and (times := measure.known(fusion, match)) is not None:
        speed = times["inductor"] / times["ours"]
        return Estimate("measured", speed, 1e3 * times["ours"], 1e3 * times["inductor"], ours, theirs)
    cell = None if match.others and len(match.outputs) > 1 else table.nearest(fusion, given, match.statics)
    if cell is not None:
        scale = _scale(fusion, cell, sizes, itemsize)
        source, slower = _source(cell, floating[0])
        mine, its = (None if scale is None else 1e3 * scale * slower * ms for ms in (cell.ours, cell.inductor))
        return Estimate(source, cell.inductor / cell.ours, mine, its, ours, theirs)
    if not moved[0] or moved[1] is None:  # nothing is moved where there is nothing
        return None
    if ours is None or theirs is None:
        return Estimate("formula", moved[1] / moved[0])
    a_microsecond = _bytes_a_microsecond(floating[0].device)
    return Estimate("formula", theirs / ours, ours / a_microsecond, theirs / a_microsecond, ours, theirs)


def _source(cell: table.Cell, tensor: torch.Tensor) -> tuple[str, float]:
    """Return what the table of a cell is called, and how many times as long the tensor's GPU takes for the same bytes as the
    one that was measured."""
    if cell.gpu == gpu_name(tensor):
        return "table", 1.0
    return f"table of an {cell.gpu}", table.rates_of_tables()[cell.gpu] / (1e6 * _bytes_a_microsecond(tensor.device))


def _bytes_a_microsecond(device: torch.device) -> float:
    """Return how much a GPU reads and writes, the one that is planned for if there is one."""
    if gpu := planned_gpu():
        return (table.rates_of_tables().get(gpu) or rate_of(gpu) or bytes_per_second(torch.device("meta"))) / 1e6
    return bytes_per_second(device) / 1e6


def _moved(
    fusion: Fusion, match: Match, sizes: dict[str, float], itemsize: int
) -> tuple[float | None, float | None]:  # fmt: skip
    """The bytes that a site moves, with those of what it computes alike in the same launch (RoPE of k, that of q's)."""
    ours, theirs = _traffic(fusion, sizes, itemsize)
    several = match.others and len(match.outputs) > 1
    if ours is None or theirs is None or not several:
        return ours, theirs
    of_each = [elements(example(output)) for output in match.outputs]
    return tuple(n * sum(of_each) / of_each[0] for n in (ours, theirs))  # type: ignore[return-value]


def _traffic(fusion: Fusion, sizes: dict[str, float], itemsize: int) -> tuple[float | None, float | None]:
    if fusion.traffic is None:
        return None, None
    given = tuple({**sizes, "bytes": itemsize}.items())
    ours, theirs = (_evaluated(formula, given) for formula in fusion.traffic)
    return ours, theirs


@functools.cache
def _evaluated(formula: str, sizes: tuple[tuple[str, float], ...]) -> float:
    """The same for each of many layers alike: sympy takes a millisecond."""
    return table.evaluate(formula, dict(sizes))


def _scale(fusion: Fusion, cell: table.Cell, sizes: dict[str, float], itemsize: int) -> float | None:
    """The site's time over that of a measured cell: by the bytes that both move. None where nothing says it."""
    if fusion.traffic is not None and set(cell.sizes) >= set(sizes):
        here, there = (_traffic(fusion, dict(of), itemsize)[0] for of in (sizes, cell.sizes))
        return here / there if here and there else None
    return 1.0 if cell.distance(sizes) <= _NEAR else None


def saved(sites: Iterable[dict[str, Any]]) -> float | None:
    """Return the ms a step that sites save, or would, from the facts of each; None where the time of one is not known."""
    facts = list(sites)
    return None if any("ours" not in f for f in facts) else sum(f["inductor"] - f["ours"] for f in facts) / 1e3


def total(sites: Iterable[dict[str, Any]], step: float = 0.0) -> str:
    """Return what many sites save together, from the facts of each; empty where no time is known.

    ``step``: about how many ms a step takes with them; 0 where nobody knows."""
    facts = list(sites)
    timed = [f for f in facts if "ours" in f]
    if not timed:
        return ""
    gain = saved(timed) or 0.0
    sources = ", ".join(sorted({f["source"] for f in timed}))
    before, after = short(step + gain), short(step)
    whole = f"a step of about {before} -> {after} ms ({(step + gain) / step:.2f}x), " if step else ""
    less = f"about {short(gain, 2)} ms a step less than Inductor's kernels"
    return f"{whole}{less}, by {sources} for {len(timed)} of {len(facts)} sites"


def gained(sites: Iterable[dict[str, Any]]) -> float | None:
    """Return the seconds that fused sites gain together, from the facts of each; None where the time of one is unknown."""
    facts = list(sites)
    if any("ours" not in f for f in facts):
        return None
    return max(0.0, 1e-6 * sum(f["inductor"] - f["ours"] for f in facts))


def sentence(facts: dict[str, Any]) -> str:
    """``1.9 times Inductor's speed (table): 31 us instead of 59``; empty where nothing is known."""
    if not facts:
        return ""
    said = f"{short(facts['speed'], 2)} times Inductor's speed ({facts['source']})"
    if "ours" in facts:
        said += f": {short(facts['ours'])} us instead of {short(facts['inductor'])}"
    if "bytes" in facts:
        said += f", {short(facts['bytes'] / 1e6)} MB moved instead of {short(facts['inductor_bytes'] / 1e6)}"
    return said


def short(number: float, digits: int = 3) -> str:
    """A number with so many digits that count, and all in front of its point: ``0.56``, ``284``."""
    return f"{number:.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"
