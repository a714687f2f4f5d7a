"""Read what was measured: the table of a GPU, and the roofline where no table speaks.

``tables/<gpu>.json`` is written by ``python -m bench.table`` from a run of the benchmark over the grid. A site asks
for the nearest measured cell of its fusion: nearest by the logarithms of its sizes, in a dtype of the same width, with
the first tensor laid out alike where such a one was measured. What was not measured on a GPU is looked up in the table
of the one whose memory is nearest in speed, and fused where it won there by a margin: bytes alone do not say what a
layout or a row of odd length costs. Where a fusion was measured nowhere, the bytes that its kernels and Inductor's
have to move are compared, as formulas over the sizes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch

from fx_fusion.cost.gpus import rate_of
from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.matcher import Match
from fx_fusion.graph.devices import device_type, gpu_name
from fx_fusion.graph.size_hints import expected, trained
from fx_fusion.graph.terms import is_tensor
from fx_fusion.kernels.lib.integers import next_power_of_2
from fx_fusion.torch_internals.inductor import bytes_per_second

_FOLDER = Path(__file__).parent / "tables"
TOLERANCE = 1.0  # how much of Inductor's time the fused kernels may take
ELSEWHERE = 0.95  # the same by the table of another GPU
_OTHER_VARIANT = math.log(2)  # a cell of another variant speaks if none of the site's own is as near as half the size


@dataclass(frozen=True)
class Cell:
    """One measurement: milliseconds of the device for forward + backward (or the forward alone)."""

    fusion: str
    itemsize: int
    forward_only: bool
    layout: str
    sizes: Mapping[str, float]
    ours: float
    inductor: float
    statics: Mapping[str, Any] = field(default_factory=dict)  # of a variant other than the first
    gpu: str = ""  # on which it was measured

    def distance(self, sizes: Mapping[str, float], row: str = "") -> float:
        """Over the dims that a site has a size for: one that may be broadcast is none of its. Rows, along the dim ``row``,
        are computed in blocks of powers of two, and those that fill one are unlike those that begin another."""
        apart = {d: abs(math.log(max(sizes[d], 1) / max(n, 1))) for d, n in self.sizes.items() if d in sizes}
        if row in apart:
            blocks = [next_power_of_2(max(int(n), 1)) for n in (sizes[row], self.sizes[row])]
            apart[row] += 2 * abs(math.log(blocks[0] / blocks[1]))
        return sum(apart.values())


def why_slower(fusion: Fusion, match: Match) -> str | None:
    """Return why Inductor should keep this site as far as tables and formulas know, or None."""
    if match.others and len(match.outputs) > 1:
        return None  # cells are of one tensor; what several in one launch are worth is measured in ``bench.composites``
    return why_slower_for(fusion, {n: match.example(n) for n, v in match.inputs.items() if is_tensor(v)}, match.statics)


def why_slower_for(fusion: Fusion, given: Mapping[str, torch.Tensor], statics: Mapping[str, Any]) -> str | None:
    """The same for the tensors of a site, by the names of the fusion's inputs."""
    tensors = list(given.values())
    floating = [t for t in tensors if t.is_floating_point()]
    sizes = sizes_of(fusion, given)
    if not tensors or device_type(tensors[0]) != "cuda" or not floating or sizes is None:
        return None
    cell = nearest(fusion, given, statics)
    if cell is None:
        return _by_roofline(fusion, sizes, floating[0].dtype.itemsize)
    here = cell.gpu == gpu_name(tensors[0])
    if cell.ours <= (TOLERANCE if here else ELSEWHERE) * cell.inductor:
        return None
    at, on = " x ".join(f"{n:.0f}" for n in cell.sizes.values()), "" if here else f", on an {cell.gpu}"
    speed = cell.ours / cell.inductor
    times = f"{speed:.2f} times as fast" if speed > 1 else f"nearly as fast ({speed:.2f})"
    return f"Inductor was {times} at {at}, the nearest sizes that were measured{on}"


def nearest(fusion: Fusion, given: Mapping[str, torch.Tensor], statics: Mapping[str, Any]) -> Cell | None:
    """The cell that is nearest to the tensors of a site, all sizes known, of this GPU's table or of the next that has such
    cells (``tables_for``); None without one."""
    floating = [t for t in given.values() if t.is_floating_point()]
    sizes, first = sizes_of(fusion, given), fusion.tensors[0]
    if sizes is None or first not in given:
        return None
    layout = fusion.specs[first].layout([expected(n) for n in given[first].stride()])
    kind = floating[0].dtype.itemsize, not trained(*floating), layout, sizes, statics, row_of(fusion)
    gpus = tables_for(gpu_name(given[first]), given[first].device)
    found = (nearest_of(cells_of(gpu, fusion.name), *kind) for gpu in gpus)
    return next((cell for cell in found if cell is not None), None)


def nearest_of(
    cells: Iterable[Cell],
    itemsize: int,
    forward_only: bool,
    layout: str,
    sizes: Mapping[str, float],
    statics: Mapping[str, Any],
    row: str = "",
) -> Cell | None:
    """The cell of the same kind whose sizes are nearest, the last one where several are: of the same layout, if there is
    one, and rather of the same variant."""
    alike = [c for c in cells if (c.itemsize, c.forward_only) == (itemsize, forward_only)]
    alike = [c for c in alike if c.layout == layout] or alike

    def distance(cell: Cell) -> float:
        own = all(statics.get(name) == wanted for name, wanted in cell.statics.items())
        return cell.distance(sizes, row) + (0.0 if own else _OTHER_VARIANT)

    return min(reversed(alike), key=distance, default=None)


def row_of(fusion: Fusion) -> str:
    """The dim of its rows: the last one of its first tensor."""
    last = fusion.specs[fusion.tensors[0]].dims[-1]
    return "" if last.several else last.name


def sizes_of(fusion: Fusion, given: Mapping[str, torch.Tensor]) -> dict[str, float] | None:
    """The declared dims of a site; ``m`` is the product of what ``...`` stands for. None where a dim has no value."""
    sizes: dict[str, float] = {}
    for name, spec in fusion.specs.items():
        if name not in given:
            continue
        found = spec.sizes([expected(n) for n in given[name].shape])
        if found is None:
            return None
        sizes = {**found, **sizes}
    return None if any(math.isinf(n) for n in sizes.values()) else sizes


@functools.cache
def tables_for(gpu: str, device: torch.device) -> tuple[str, ...]:
    """The GPUs whose tables speak for a ``gpu``, which ``device`` is: it itself where it was measured, then the others, the
    one whose memory is nearest in speed first. None without a GPU."""
    rates = rates_of_tables()
    rate = (rates.get(gpu) or rate_of(gpu) or bytes_per_second(device)) if gpu else 0.0
    return tuple(sorted(rates, key=lambda known: (known != gpu, abs(math.log(rates[known] / rate))))) if gpu else ()


@functools.cache
def rates_of_tables() -> dict[str, float]:
    """The GPUs that have a table, and the bytes that each copied in a second when it was measured."""
    found = [json.loads(file.read_text())["environment"] for file in sorted(_FOLDER.glob("*.json"))]
    return {environment["gpu"]: 1e9 * environment["copy_gb_s"] for environment in found}


@functools.cache
def cells_of(gpu: str, fusion: str) -> tuple[Cell, ...]:
    return tuple(c for c in _table(gpu) if c.fusion == fusion)


@functools.cache
def _table(gpu: str) -> tuple[Cell, ...]:
    file = _FOLDER / f"{slug(gpu)}.json"
    if not gpu or not file.exists():
        return ()
    return tuple(Cell(**cell, gpu=gpu) for cell in json.loads(file.read_text())["cells"])


def slug(gpu: str) -> str:
    return gpu.lower().replace(" ", "_")


def _by_roofline(fusion: Fusion, sizes: Mapping[str, float], itemsize: int) -> str | None:
    """Compare the bytes that both have to move; on equal terms Inductor keeps the site."""
    if fusion.traffic is None:
        return None
    ours, theirs = (evaluate(formula, {**sizes, "bytes": itemsize}) for formula in fusion.traffic)
    if ours < theirs:
        return None
    return f"Inductor moves as few bytes ({theirs / 1e6:.0f} MB against {ours / 1e6:.0f}); not measured on this GPU"


def evaluate(formula: str, sizes: Mapping[str, Any]) -> float:
    """A formula over sizes (numbers or sympy symbols) and ``bytes``, those of an element."""
    symbols = {name: sympy.Symbol(name, positive=True) for name in sizes}
    return float(sympy.sympify(formula, locals=symbols).subs({symbols[n]: v for n, v in sizes.items()}))
