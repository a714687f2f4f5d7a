"""The field's headline figures and ours on the same work, from the results of ``bench.run --grid``.

python -m bench.headlines [bench/results/grid.jsonl]

A headline compares with eager PyTorch, mostly with the operation written out. Ours compares with eager too, and with
Inductor, which is the harder one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.grid_file import read

BOTH, FORWARD = "forward+backward", "forward"
# The claim, and the cell that is the same work: fusion, case, dtype, mode.
HEADLINES = (
    ("Swish 4096 x 4096: 2.1 x eager", "swish", "square", "bfloat16", BOTH),
    ("EvoNorm-B0, 16 x 64 x 28 x 28: 3-4 x eager", "evonorm_b0", "16x64x28x28", "bfloat16", BOTH),
    ("EvoNorm-B0, 32 x 64 x 28 x 28: 3-4 x eager", "evonorm_b0", "32x64x28x28", "bfloat16", BOTH),
    ("EvoNorm-B0, 64 x 64 x 28 x 28: 3-4 x eager", "evonorm_b0", "64x64x28x28", "bfloat16", BOTH),
    ("RMSNorm, 16384 x 4096: 6.8 x eager, > 80 % of the bandwidth", "rms_norm", "16384x4096", "bfloat16", BOTH),
    ("cross-entropy, 1024 x 128256: 4 x eager, 6 x less memory", "cross_entropy", "1024x128256", "bfloat16", BOTH),
    ("LayerNorm, 16384 x 4096: 2.1-2.6 x eager", "layer_norm", "16384x4096", "bfloat16", BOTH),
    ("embedding above 64 K classes: 1.6-1.9 x eager", "embedding", "16384x128256x4096", "bfloat16", BOTH),
    ("attention at 2048 positions: 2.4-2.8 x eager", "attention", "4x32x2048x128", "bfloat16", BOTH),
)
BATCHES = ("1x64x28x28", "16x64x28x28", "64x64x28x28", "256x64x28x28")


def main() -> None:
    file = sys.argv[1] if len(sys.argv) > 1 else "bench/results/grid.jsonl"
    rows = read(Path(file))
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        cells.setdefault((row["fusion"], row["case"], row["dtype"], row.get("mode")), {})[row.get("provider")] = row
    headers = ("headline", "ms", "x eager", "x Inductor", "% of the copy rate", "MiB eager", "MiB Inductor", "MiB ours")
    print(tabulate(list(compared(cells)), headers=headers))
    print("\nEvoNorm-B0 on N x 64 x 28 x 28, bfloat16, forward + backward")
    print(tabulate(list(batches(cells)), headers=("N", "variant", "latency, ms", "images/s", "peak MiB")))


def compared(cells: dict[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for claim, *key in HEADLINES:
        cell = cells.get(tuple(key), {})
        if not {"eager", "inductor", "fx_fusion"} <= cell.keys():
            yield claim, "not measured"
            continue
        eager, base, ours = cell["eager"], cell["inductor"], cell["fx_fusion"]
        yield (
            claim, ours["ms"], f"{eager['ms'] / ours['ms']:.1f}", f"{base['ms'] / ours['ms']:.2f}",
            f"{100 * ours['share']:.0f}", eager["peak_mib"], base["peak_mib"], ours["peak_mib"],
        )  # fmt: skip


def batches(cells: dict[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for case in BATCHES:
        for variant in ("eager", "inductor", "fx_fusion"):
            row = cells.get(("evonorm_b0", case, "bfloat16", BOTH), {}).get(variant)
            if row is not None:
                images = int(case.split("x")[0])
                yield images, variant, row["ms"], round(images / row["ms"] * 1e3), row["peak_mib"]


if __name__ == "__main__":
    main()
