"""Estimate how long a step takes on 2 to 1024 GPUs, by bytes, link speeds and what overlaps: a model on paper.

    python -m bench.step_time

It starts from the step of one H200 (``results/setups.jsonl``, "no-mask": Llama of the 1B shape with 8 layers, 4 x 2048
tokens a GPU, bfloat16, fused AdamW) and adds what communication adds; beside it what two H200 took
(``results/distributed.jsonl``; another machine, timed on another day).

    DDP      t1 + division of gradients + exposed + contention
             exposed: the all-reduce of the last bucket, the embedding's gradient, and of the rest what the backward is too
             short for
    FSDP2    t1 − (1 − 1/n) · optimizer + copies + exposed + contention
             exposed: gather of the root's parameters (embedding, head) and of the first layer, in the forward; a layer's
             gather less a layer's forward; a layer's gather and reduction less a layer's backward; the reduction of the
             root's gradients
    contention = overlapped communication · the share of the multiprocessors that NCCL's kernels hold

A collective of s bytes over n GPUs puts s · (n − 1) / n on the wire of each (an all-reduce twice that) and waits for n − 1
steps of a ring (an all-reduce: a tree, 2 · log2 n). Bandwidth: 330 GB/s for large messages, as measured on two H200 and as
eight links of 400 Gbit/s a node carry; half of it at ``HALF`` bytes, by the 33.5 MB all-reduces of the tensor-parallel step.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

RESULTS = Path(__file__).parent / "results"
BANDWIDTH, HALF = 330e9, 27e6  # bytes/s on the wire of a GPU, bytes
RING_STEP, TREE_STEP = 3e-6, 20e-6  # seconds: assumed, most steps stay inside a node
COPY, ADAM = 4.2e12, 2.4e12  # bytes/s of a copy and of fused AdamW, measured
SM_SHARE = 0.15  # of the multiprocessors, held by NCCL's kernels: assumed, 20 of 132
COUNTS = (2, 8, 64, 256, 1024)


@dataclass(frozen=True)
class Model:
    """Bytes of parameters in 16 bits, and how many layers."""

    layers: int = 8
    layer: float = 2 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    embedding: float = 2 * 128256 * 2048

    @property
    def root(self) -> float:
        """Embedding and head."""
        return 2 * self.embedding

    @property
    def total(self) -> float:
        return self.root + self.layers * self.layer


@dataclass(frozen=True)
class Step:
    """Seconds of one GPU's step, and of head and loss in it (both directions)."""

    whole: float
    head: float
    model: Model

    @property
    def optimizer(self) -> float:
        return 7 * self.model.total / ADAM  # reads 4 tensors of that size, writes 3

    @property
    def layer(self) -> float:
        """Return the time of one layer, both directions: a third of it forward."""
        return (self.whole - self.optimizer - self.head) / self.model.layers


def _wire(size: float, n: int) -> float:
    """Seconds of a gather or a reduction of ``size`` bytes over n GPUs."""
    on_wire = size * (n - 1) / n
    return on_wire / (BANDWIDTH / (1 + HALF / on_wire)) + (n - 1) * RING_STEP


def _all_reduce(size: float, n: int) -> float:
    on_wire = 2 * size * (n - 1) / n
    return on_wire / (BANDWIDTH / (1 + HALF / on_wire)) + 2 * math.log2(n) * TREE_STEP


def ddp(step: Step, n: int) -> float:
    """Seconds of a step under DDP, a bucket a linear layer."""
    model = step.model
    last, rest = _all_reduce(model.embedding, n), _all_reduce(model.total - model.embedding, n)
    backward = 2 / 3 * (step.layer * model.layers + step.head)
    return step.whole + 2 * model.total / COPY + last + max(0.0, rest - backward) + SM_SHARE * min(rest, backward)


def fsdp2(step: Step, n: int) -> float:
    """Seconds of a step under FSDP2, a unit a layer, gathered again for the backward."""
    model = step.model
    gather, root = _wire(model.layer, n), _wire(model.root, n)
    forward, backward = step.layer / 3, step.layer * 2 / 3
    exposed = 2 * root + gather + (model.layers - 1) * max(0.0, gather - forward)
    exposed += model.layers * max(0.0, 2 * gather - backward)
    overlapped = model.layers * (min(gather, forward) + min(2 * gather, backward))
    gathered = model.total + model.layers * model.layer
    copies = (2 * gathered + 2 * gathered / n + 2 * model.total) / COPY  # out of and into the collectives' buffers
    return step.whole - (1 - 1 / n) * step.optimizer + copies + exposed + SM_SHARE * overlapped


WRAPPERS = {"ddp": ddp, "fsdp2": fsdp2}


def steps() -> dict[str, Step]:
    """One GPU's step under each variant. Head and loss: three products of 5.4 ms and, for Inductor, its loss kernels and the
    logits' passes in front of them (profile of the same step)."""
    rows = [json.loads(line) for line in (RESULTS / "setups.jsonl").read_text().splitlines()]
    measured = next(row for row in rows if row["setup"] == "no-mask")
    heads = {"inductor": 0.022, "fx_fusion": 0.018}
    return {name: Step(measured[name]["ms"] / 1e3, head, Model()) for name, head in heads.items()}


def measured() -> dict[tuple[str, str], float]:
    """Milliseconds on two GPUs, timed in turns, by wrapper and variant: the median of all runs."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in (RESULTS / "distributed.jsonl").read_text().splitlines():
        row = json.loads(line)
        as_predicted = row["mode"] in WRAPPERS and row["ranks"] == 2 and not row.keys() & {"batch", "loss read"}
        for name in ("inductor", "fx_fusion") if as_predicted else ():
            found.setdefault((row["mode"], name), []).append(row[name]["ms"])
    return {key: statistics.median(values) for key, values in found.items()}


def main() -> None:
    given, seen = steps(), measured()
    compared = []
    for (wrapper, name), ms in seen.items():
        predicted = WRAPPERS[wrapper](given[name], 2) * 1e3
        compared.append((wrapper, name, f"{ms:.1f}", f"{predicted:.1f}", f"{predicted / ms - 1:+.1%}"))
    print(tabulate(compared, headers=("two H200", "", "measured ms", "predicted", "off by")), end="\n\n")
    rows = []
    for n in COUNTS:
        times = {(w, name): f(step, n) * 1e3 for w, f in WRAPPERS.items() for name, step in given.items()}
        rows.append((n, *(x for w in WRAPPERS for x in _row(times[w, "inductor"], times[w, "fx_fusion"]))))
    headers = ("GPUs", *(f"{w} {x}" for w in WRAPPERS for x in ("Inductor", "fx_fusion", "x")))
    print(tabulate(rows, headers=headers, disable_numparse=True))


def _row(base: float, ours: float) -> tuple[str, str, str]:
    return f"{base:.1f}", f"{ours:.1f}", f"{base / ours:.2f}"


if __name__ == "__main__":
    main()
