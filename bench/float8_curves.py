"""Loss curves in float8 beside bfloat16: a byte-level Llama of 85 M parameters on the sources of Python's standard library.

    python -m bench.float8_curves

Runs from one initialization: bfloat16, bfloat16 with the batches in another order (the noise that a recipe has to stay
within), each recipe. Weights in float32 under autocast, AdamW (betas 0.9, 0.95; decay 0.1), a peak rate of 6e-4 after 100
steps that falls to a tenth by a cosine, gradients clipped to a norm of 1. A row a run: loss and gradient norm of every step,
the loss of held-out text at the end. Nothing is timed, so several runs may share a GPU. ``--plot`` draws the rows of
``--out`` beside it, for light and for dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from bench.process import Row, environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bench.drawing import Scheme

RUNS = {  # name: options, seed of the order of batches
    "bfloat16": ({}, 0),
    "bfloat16, other order": ({}, 1),
    **{recipe: ({"float8": recipe, "select": "always"}, 0) for recipe in ("rowwise_gw_hp", "rowwise")},
}
BATCH, LENGTH, WARMUP, RATE = 32, 512, 100, 6e-4
SIZES = {
    "vocab_size": 256, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "max_position_embeddings": LENGTH, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip
LAST = 100  # steps whose mean is the final loss


def text() -> Any:
    """The sources, as (rows, LENGTH) bytes; the last 64 rows of a fixed shuffle are held out."""
    import torch

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    data = b"\n".join(file.read_bytes() for file in files if "site-packages" not in file.parts)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = rows[: len(rows) // LENGTH * LENGTH].view(-1, LENGTH).long()
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def train(name: str, steps: int) -> Row:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fx_fusion

    options, seed = RUNS[name]
    rows = text().cuda()
    rows, held_out = rows[:-64], rows[-64:].split(BATCH)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def rate(step: int) -> float:
        after = max(0.0, (step - WARMUP) / max(1, steps - WARMUP))
        return min(1.0, (step + 1) / WARMUP) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * after)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    compiled = torch.compile(model, backend="fx_fusion", options=options or None)
    losses, norms = [], []
    batches = torch.cat([torch.randperm(len(rows), generator=order) for _ in range(1 + steps * BATCH // len(rows))])
    with fx_fusion.recording() as report:
        for step in range(steps):
            ids = rows[batches[step * BATCH : (step + 1) * BATCH]]
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(input_ids=ids, labels=ids).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).detach())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        held = statistics.mean(float(model(input_ids=ids, labels=ids).loss) for ids in held_out)
    return {
        "run": name, "steps": steps, "tokens": steps * BATCH * LENGTH, "losses": [round(float(x), 4) for x in losses],
        "norms": [round(float(x), 4) for x in norms], "final": round(statistics.mean(map(float, losses[-LAST:])), 4),
        "norm": round(statistics.mean(map(float, norms[-LAST:])), 4), "held_out": round(held, 4),
        "environment": environment(),
        "said": [line for graph in report.graphs for line in graph.notes() if "float8" in line],
    }  # fmt: skip


def plot(rows: list[Row], scheme: Scheme) -> Figure:
    """Losses over steps, means of 20, and what each run differs from the first by."""
    import matplotlib.pyplot as plt

    from bench.drawing import bare

    def means(values: list[float]) -> list[float]:
        return [statistics.mean(values[i : i + 20]) for i in range(0, len(values) - 19, 20)]

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(2, 1), layout="constrained")
    colors = scheme.text, scheme.liger, scheme.ours, scheme.inductor
    first = means(rows[0]["losses"])
    at = [20 * i + 10 for i in range(len(first))]
    for row, color in zip(rows, colors, strict=False):
        losses = means(row["losses"])
        above.plot(at, losses, label=row["run"], linewidth=1.2, color=color)
        below.plot(at, [a - b for a, b in zip(losses, first, strict=True)], linewidth=1.2, color=color)
    above.set(ylabel="loss (nats a byte)", yscale="log")
    above.set_yticks([0.4, 0.5, 0.7, 1, 2, 4], ["0.4", "0.5", "0.7", "1", "2", "4"], minor=False)
    above.set_yticks([], minor=True)
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel=f"less {rows[0]['run']}'s", ylim=(-0.1, 0.1))
    for axes in (above, below):
        bare(axes)
        axes.grid(color=scheme.grid, linewidth=0.5)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", default=";".join(RUNS), help="names, between semicolons")
    parser.add_argument("--out", default="bench/results/float8_curves.jsonl")
    parser.add_argument("--plot", action="store_true", help="draw the rows of --out, and train nothing")
    given = parser.parse_args()
    if given.plot:
        from bench.drawing import save

        out = Path(given.out)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        save(lambda scheme: plot(rows, scheme), out.parent, out.stem)
        return
    rows = []
    for name in given.runs.split(";"):
        rows.append(train(name, given.steps))
        with Path(given.out).open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    shown = [[row[key] for key in ("run", "final", "held_out", "norm")] for row in rows]
    print(tabulate(shown, headers=["run", f"loss, last {LAST}", "held out", "gradient norm"]))


if __name__ == "__main__":
    main()
