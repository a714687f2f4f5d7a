"""Measure what ``options={"memory": ...}`` costs and saves: forward and backward of a model under each, in turns, in one
process.

    python -m bench.memory_options llama-1b bert gpt2 --out bench/results/memory_options.jsonl

Each model in a process of its own: they compile side by side, and measure one at a time when all have compiled. A row an
option: milliseconds (median over rounds in which every option had its turn), peak memory, what the report says. No
optimizer: its time and its memory are the same under all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from tabulate import tabulate

from bench.families import FAMILIES
from bench.process import Row, environment, give, in_turns, wait_for_turn

OPTIONS = ("speed", "auto", "min")
ROUNDS, STEPS = 10, 3


def measure(name: str, options: list[str]) -> list[Row]:
    """The rows of one model, measured in this process."""
    import torch

    import fx_fusion

    family = FAMILIES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, inputs, _ = family.build(family.batch, family.length)
    torch.set_default_dtype(torch.float32)
    model.train()
    compiled: dict[str, Any] = {}
    rows: dict[str, Row] = {}

    def step(option: str, i: int) -> float:
        batch = inputs(i)
        loss = family.loss_of(compiled[option](**batch), batch)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    def first_step(option: str) -> float:
        for _ in range(20):
            try:
                return step(option, 0)
            except torch.OutOfMemoryError:  # of another process that takes its first step
                model.zero_grad()
                torch.cuda.empty_cache()
                time.sleep(3)
        return step(option, 0)

    for option in options:
        compiled[option] = torch.compile(model, backend="fx_fusion", options={"memory": option})
        with fx_fusion.recording() as report:
            loss = first_step(option)
        torch.cuda.empty_cache()  # for the others
        said = [sentence for graph in report.graphs for sentence in graph.memory.sentences()]
        rows[option] = {"model": name, "memory": option, "loss": round(float(loss), 5), "report": said}
    times: dict[str, list[float]] = {option: [] for option in options}
    wait_for_turn()
    for turn in range(-1, ROUNDS):  # the first one warms up
        for option in options:
            step(option, 0)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for i in range(STEPS):
                step(option, i)
            end.record()
            torch.cuda.synchronize()
            if turn >= 0:
                times[option].append(start.elapsed_time(end) / STEPS)
                rows[option]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    for option in options:
        rows[option] |= {"ms": round(statistics.median(times[option]), 3), "environment": environment()}
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=FAMILIES)
    parser.add_argument("--options", default=",".join(OPTIONS), help="the first is what the others are set beside")
    parser.add_argument("--out", default="bench/results/memory_options.jsonl")
    parser.add_argument("--compile-seconds", type=float, default=400, help="who has not compiled by then is stopped")
    parser.add_argument("--seconds", type=float, default=60, help="for the measurement of one model")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        for row in measure(given.models[0], given.options.split(",")):
            give(row)
        return
    inner = {name: ["bench.memory_options", name, "--options", given.options, "--inside"] for name in given.models}
    results = in_turns(inner, given.compile_seconds, given.seconds)
    table: list[tuple[Any, ...]] = []
    with open(given.out, "a") as file:
        for name, rows in results.items():
            if isinstance(rows, str):
                table.append((name, rows))
                continue
            base = rows[0]
            for row in rows:
                file.write(json.dumps(row) + "\n")
                ratios = f"{base['ms'] / row['ms']:.3f}", f"{row['peak_gib'] / base['peak_gib']:.3f}"
                table.append((name, row["memory"], row["ms"], row["peak_gib"], *ratios))
    print(tabulate(table, headers=("model", "memory", "ms", "peak GiB", "x speed", "of its memory")))


if __name__ == "__main__":
    main()
