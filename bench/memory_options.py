"""What ``options={"memory": ...}`` costs and saves: forward and backward of a model under each, in turns, in one process.

    python -m bench.memory_options llama-1b bert gpt2 --out bench/results/memory_options.jsonl

Each model in a process of its own: they compile side by side, and take turns measuring. A row an option: milliseconds
(median over rounds in which every option had its turn), peak memory, what the report says. No optimizer: its time and
its memory are the same under all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from tabulate import tabulate

from bench.families import FAMILIES
from bench.models import alone
from bench.process import MARK, Row, environment, give

OPTIONS = ("speed", "auto", "min")
ROUNDS, STEPS = 10, 3


def measure(name: str, options: list[str], lock: str) -> list[Row]:
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

    for option in options:
        compiled[option] = torch.compile(model, backend="fx_fusion", options={"memory": option})
        with fx_fusion.recording() as report:
            loss = step(option, 0)
        torch.cuda.empty_cache()  # for the others
        said = [sentence for graph in report.graphs for sentence in graph.memory.sentences()]
        rows[option] = {"model": name, "memory": option, "loss": round(float(loss), 5), "report": said}
    times: dict[str, list[float]] = {option: [] for option in options}
    with alone(lock):
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


def _said(run: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What a run printed; it ends when its time is up."""
    try:
        return run.communicate(timeout=max(timeout, 0.1))
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()
        return "", "its time was up"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=FAMILIES)
    parser.add_argument("--options", default=",".join(OPTIONS), help="the first is what the others are set beside")
    parser.add_argument("--out", default="bench/results/memory_options.jsonl")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all of them")
    parser.add_argument("--lock", help="a file: whoever holds it measures")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        for row in measure(given.models[0], given.options.split(","), given.lock):
            give(row)
        return
    with tempfile.NamedTemporaryFile() as file:
        lock = given.lock or file.name
        runs = {
            name: subprocess.Popen(
                [sys.executable, "-m", "bench.memory_options", name, "--options", given.options, "--inside", "--lock", lock],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for name in given.models
        }  # fmt: skip
        late = time.monotonic() + given.timeout
        said = {name: _said(run, late - time.monotonic()) for name, run in runs.items()}
    table: list[tuple[Any, ...]] = []
    with open(given.out, "a") as file:
        for name, (out, errors) in said.items():
            rows = [json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]
            if not rows:
                table.append((name, (errors.strip().splitlines() or ["no output"])[-1][:90]))
                continue
            base = rows[0]
            for row in rows:
                file.write(json.dumps(row) + "\n")
                ratios = f"{base['ms'] / row['ms']:.3f}", f"{row['peak_gib'] / base['peak_gib']:.3f}"
                table.append((name, row["memory"], row["ms"], row["peak_gib"], *ratios))
    print(tabulate(table, headers=("model", "memory", "ms", "peak GiB", "x speed", "of its memory")))


if __name__ == "__main__":
    main()
