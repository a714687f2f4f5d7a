"""Define how every plot looks: colors for a light and for a dark page, text that stays text, the same bytes for the same
data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Scheme:
    """The colors of one page: ``suffix`` of the file, page, text, what is less important, and what is measured. Blue and
    orange, which nobody takes for each other."""

    suffix: str
    page: str
    text: str
    muted: str
    grid: str
    ours: str
    inductor: str
    liger: str
    slower: str
    equal: str
    faster: str

    @property
    def diverging(self) -> LinearSegmentedColormap:
        """From slower to faster."""
        return LinearSegmentedColormap.from_list("ratio", [self.slower, self.equal, self.faster])


_FAMILY = "'DejaVu Sans', Arial, sans-serif"
LIGHT = Scheme(
    "", page="#ffffff", text="#1f2328", muted="#59636e", grid="#d1d9e0", ours="#0969da", inductor="#bc4c00",
    liger="#818b98", slower="#f28e4c", equal="#f6f8fa", faster="#54aeff",
)  # fmt: skip
DARK = Scheme(
    "_dark", page="#0d1117", text="#f0f6fc", muted="#9198a1", grid="#3d444d", ours="#58a6ff", inductor="#f0883e",
    liger="#7d8590", slower="#a4470b", equal="#21262d", faster="#1158b8",
)  # fmt: skip


def save(draw: Callable[[Scheme], Figure], out: Path, name: str, *schemes: Scheme) -> None:
    """Write a plot as ``name.svg`` and ``name_dark.svg``, or in the given schemes only."""
    for scheme in schemes or (LIGHT, DARK):
        with plt.rc_context(_settings(scheme)):
            figure, file = draw(scheme), out / f"{name}{scheme.suffix}.svg"
            figure.savefig(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), bbox_inches="tight")
            plt.close(figure)
            file.write_text(_slim(file.read_text("utf-8")), "utf-8")


def _slim(svg: str) -> str:
    """The same picture: two decimals, the font named once, a path on one line, no names for scripts."""
    svg = re.sub(r"<!--.*?-->|<\?xml.*?\?>|<!DOCTYPE.*?>", "", svg, flags=re.S)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg).replace("*{", f"text{{font-family: {_FAMILY}}} *{{", 1)
    svg = re.sub(r' id="(?:line2d|patch|text|xtick|ytick|matplotlib\.axis|axes|figure|QuadMesh|legend)_[\w.]+"', "", svg)
    svg = re.sub(r"\s*\n\s*", "\n", re.sub(r" \n([LMCQz])", r"\1", svg)).strip() + "\n"
    for _ in range(3):  # groups around one thing, and around those
        svg = re.sub(r"<g>\n((?:(?!</?g[ >]).)*?)</g>\n", r"\1", svg, flags=re.S)
    return svg


def _settings(scheme: Scheme) -> dict[str, object]:
    named = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor")
    return {
        **dict.fromkeys(named, scheme.text),
        "figure.facecolor": scheme.page, "axes.facecolor": scheme.page, "savefig.facecolor": scheme.page,
        "legend.facecolor": scheme.page, "legend.edgecolor": scheme.grid,
        "axes.edgecolor": scheme.grid, "grid.color": scheme.grid,
        "font.size": 9, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial"],
        "svg.fonttype": "none",  # text that can be searched, a tenth of the size of its outlines
        "svg.hashsalt": "fx_fusion",  # the same names inside the file in every run
    }  # fmt: skip


def bare(axes: Axes) -> None:
    """Take away the frame of a chart and the marks at its ticks."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
