"""The chart of the README, which ``bench.plots`` draws: throughput and peak memory of models and set-ups over Inductor's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.drawing import Scheme, bare

Row = dict[str, Any]
# The rows of the README's table, and the model whose figures stand below it. Of several runs the last one counts.
MODELS: tuple[tuple[str, Row], ...] = (
    ("Llama 3.1 8B, mask of ones", {"model": "llama-8b", "mask": "ones"}),
    ('Llama 3.2 1B, memory="min"', {"model": "llama-1b", "options": {"memory": "min"}}),
    ("Gemma 3 1B", {"model": "gemma3"}),
    ("gpt-oss, 4 layers", {"model": "gpt-oss", "mask": "ones"}),
)
SETUPS = (
    ("Llama, 8 layers, packed", "packed", "1 x 8192"),
    ("Llama, 8 layers, padded", "padded", "4 x 2048"),
    ("Llama, 8 layers, loss in one's own loop", "own-loss", "4 x 2048"),
    ("Llama, 8 layers, LoRA", "lora", "4 x 2048"),
    ("BERT base, padded", "bert-padded", "64 x 512"),
)
_OURS = ("memory",)  # options that Inductor and Liger have not


@dataclass(frozen=True)
class Bar:
    """One model or set-up: its name, how many times as fast as under Inductor, and GiB at the peak, by backend."""

    name: str
    detail: str
    speed: dict[str, float]
    gib: dict[str, float]


def bars(models: Sequence[Row], setups: Sequence[Row]) -> list[Bar]:
    """Return what was measured of the things to show, from the rows of ``models.jsonl`` and ``setups.jsonl``."""
    found = [_model(name, wanted, models) for name, wanted in MODELS]
    found += [_setup(name, wanted, size, setups) for name, wanted, size in SETUPS]
    return [bar for bar in found if bar is not None]


def _model(name: str, wanted: Row, rows: Iterable[Row]) -> Bar | None:
    """The last run of ours that has Inductor's beside it, of the same commit. Liger's is of another one where need be."""
    wanted = {"mask": "none", "options": {}, **wanted}
    alike = [row for row in rows if row["model"] == wanted["model"] and row["mask"] == wanted["mask"]]
    plain = _theirs(wanted)
    base = {row["environment"]["commit"]: row for row in alike if row["variant"] == "inductor" and _theirs(row) == plain}
    ours = [row for row in alike if row["variant"] == "fx_fusion" and row["options"] == wanted["options"]]
    ours = [row for row in ours if row["environment"]["commit"] in base]
    if not ours:
        return None
    commit = ours[-1]["environment"]["commit"]
    chosen = {"inductor": base[commit], "fx_fusion": ours[-1]}
    ligers = [row for row in alike if row["variant"] == "liger" and _theirs(row) == plain]
    if ligers:
        chosen["liger"] = next((row for row in reversed(ligers) if row["environment"]["commit"] == commit), ligers[-1])
    batch, length, unit = (ours[-1][field] for field in ("batch", "length", "unit"))
    size = f"{batch} x {length} x {length}" if unit == "images" else f"{batch} x {length}"
    rate = chosen["inductor"]["items_per_s"]
    speed = {variant: row["items_per_s"] / rate for variant, row in chosen.items()}
    return Bar(name, size, speed, {variant: row["peak_gib"] for variant, row in chosen.items()})


def _theirs(row: Row) -> Row:
    """Its options without ours."""
    return {option: value for option, value in row["options"].items() if option not in _OURS}


def _setup(name: str, wanted: str, size: str, rows: Iterable[Row]) -> Bar | None:
    alike = [row for row in rows if row["setup"] == wanted]
    if not alike:
        return None
    both = {variant: alike[-1][variant] for variant in ("inductor", "fx_fusion")}
    speed = {variant: both["inductor"]["ms"] / row["ms"] for variant, row in both.items()}
    return Bar(name, size, speed, {variant: row["gib"] for variant, row in both.items()})


def chart(found: Sequence[Bar], title: str, scheme: Scheme) -> Figure:
    """Two columns of bars: throughput and peak memory over Inductor's."""
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(8.2, 0.4 * len(found) + 1.2), sharey=True, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    _bars(speed, [bar.speed for bar in found], scheme)
    _bars(memory, [{variant: gib / bar.gib["inductor"] for variant, gib in bar.gib.items()} for bar in found], scheme)
    for at, bar in enumerate(found):
        for variant, style in (("fx_fusion", {"weight": "bold"}), ("liger", {"fontsize": 7, "color": scheme.muted})):
            if variant in bar.speed:
                where = max(bar.speed[variant], 1.0) + 0.03, at + _place(variant, bar.speed)[0]
                speed.text(*where, f"{bar.speed[variant]:.2f} x", va="center", **style)
        memory.text(1.03, at, f"{bar.gib['inductor']:.1f} → {bar.gib['fx_fusion']:.1f} GiB", va="center", fontsize=8)
    speed.set_title("training throughput, Inductor = 1", fontsize=9, loc="left")
    memory.set_title("peak memory: Inductor → fx_fusion", fontsize=9, loc="left")
    speed.set_xlim(0, 1.2 * max(bar.speed["fx_fusion"] for bar in found))
    memory.set_xlim(0, 1.45)
    memory.set_xticks((0, 0.5, 1.0))
    speed.set_yticks(range(len(found)), [f"{bar.name}, {bar.detail}" for bar in found])
    speed.invert_yaxis()
    named = (("fx_fusion", scheme.ours), ("Liger-Kernel, where measured", scheme.liger), ("Inductor", scheme.inductor))
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=label) for label, color in named]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _place(variant: str, beside: dict[str, float]) -> tuple[float, float]:
    """Return where a bar lies in its line, and how high it is."""
    if "liger" not in beside:
        return 0.0, 0.44
    return (-0.14, 0.44) if variant == "fx_fusion" else (0.24, 0.2)


def _bars(axes: Axes, lengths: Sequence[dict[str, float]], scheme: Scheme) -> None:
    for variant, color in (("fx_fusion", scheme.ours), ("liger", scheme.liger)):
        for at, length in enumerate(lengths):
            if variant in length:
                shift, height = _place(variant, length)
                axes.barh(at + shift, length[variant], height, color=color)
    axes.axvline(1, color=scheme.inductor, linewidth=1.5)
    axes.tick_params(labelsize=8)
    bare(axes)
