"""The results of ``bench.run --grid`` as plots take them: cells with their sizes by name, in rows of one kind."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.fewest import fewest_flops

MODE = "forward+backward"
_LAYOUTS = {"b h w c": "channels last", "b ... c": "channels last", "b h s d": "heads first"}
_GRID = re.compile(r"\d+(x\d+)+")  # how the grid names a case; declared ones are called after a model
IMAGES = "images: batch x channels x height x width"
HEADS = "batch x heads x positions x size of a head"
_GROUPS = (
    ("rows x columns", ("m", "n")),
    ("rows x classes", ("m", "v")),
    ("rows x hidden size x classes", ("m", "h", "v")),
    ("tokens x vocabulary x columns", ("m", "v", "n")),
)


@dataclass(frozen=True)
class Cell:
    """One fusion at one size in one layout, measured under Inductor and under fx_fusion."""

    group: str  # what the sizes are sizes of
    row: str  # the fusion and, where there are several, which kind of its inputs
    size: tuple[int, ...]
    ours: dict[str, Any]
    inductor: dict[str, Any]

    @property
    def label(self) -> str:
        return " x ".join(map(str, self.size))

    @property
    def apart(self) -> bool:
        """Return True if it belongs on another line than others of its row, since its kernels are another matter: narrow
        heads, images of a few pixels, columns that 16 does not divide."""
        last = self.size[-1]
        return last < 128 if self.group == HEADS else last <= 16 if self.group == IMAGES else last % 16 != 0

    @property
    def speedup(self) -> float:
        return self.inductor["ms"] / self.ours["ms"]

    @property
    def bytes(self) -> float:
        """The fewest that have to move: the share of the copy rate was made of them. Of both rows, the one that was
        rounded less."""
        row = max(self.ours, self.inductor, key=lambda r: r["share"])
        return row["share"] * row["copy_gb_s"] * 1e9 * row["ms"] * 1e-3

    @property
    def flops(self) -> float | None:
        """Return those of its matrix products, where they take the time."""
        return fewest_flops(self.ours["fusion"], self.ours["sizes"])


def cells_of(rows: Iterable[dict[str, Any]], dtype: str) -> list[Cell]:
    """The cells of one dtype, forward and backward together, that were measured under both."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row.get("mode") == MODE and row["dtype"] == dtype:
            found[row["fusion"], row["case"]][row["provider"]] = row
    both = [cell for cell in found.values() if {"fx_fusion", "inductor"} <= cell.keys()]
    usual = {(c["fx_fusion"]["fusion"], _statics(c["fx_fusion"])) for c in both if _GRID.match(c["fx_fusion"]["case"])}
    made = []
    for cell in both:
        ours = cell["fx_fusion"]
        group, size = _size(ours)
        made.append(Cell(group, _row(ours, (ours["fusion"], _statics(ours)) in usual), size, ours, cell["inductor"]))
    return sorted(made, key=lambda c: (c.row, math.prod(c.size), c.size))


def by_row(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of each row, small to large; one a size."""
    found: dict[str, dict[tuple[int, ...], Cell]] = defaultdict(dict)
    for cell in cells:
        found[cell.row].setdefault(cell.size, cell)
    return {row: list(of_size.values()) for row, of_size in found.items()}


def _statics(row: dict[str, Any]) -> str:
    return str(row.get("statics") or {})


def _row(row: dict[str, Any], usual: bool) -> str:
    """The fusion and the kind of its inputs. ``usual``: the grid has its static parameters too."""
    kinds = [_LAYOUTS.get(row["layout"] or ""), "ids by Zipf" if row["case"].endswith(" zipf") else None]
    if row.get("statics") and not usual:
        kinds.append(re.sub(r"_\d+$", "", row["case"]))
    return ", ".join([row["fusion"], *(kind for kind in kinds if kind)])


def _size(row: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return what the sizes of a cell are sizes of, and the sizes in this order."""
    sizes = row["sizes"]
    for group, dims in _GROUPS:
        if set(sizes) == set(dims):
            return group, tuple(sizes[dim] for dim in dims)
    if {"b", "h", "s", "d"} <= sizes.keys():
        return HEADS, tuple(sizes[dim] for dim in ("b", "h", "s", "d"))
    named = row["case"].split()[0]  # where height and width are one dim of the fusion, the case names them
    if _GRID.match(named):
        return IMAGES, tuple(map(int, named.split("x")))
    return IMAGES, tuple(sizes[dim] for dim in ("b", "c", "h", "w", "m") if dim in sizes)
