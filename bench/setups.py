"""Measure how people train: padded and packed batches, evaluation, LoRA, accumulation ..., Inductor beside fx_fusion in one
process.

    python -m bench.setups                      all of them
    python -m bench.setups padded bert-padded   some of them
    python -m bench.setups --tiny               whether all of them run, on a CPU too; no figures

One JSON line a set-up: milliseconds a step (the mean over whole rounds of its batches, the median of three rounds of 1.5
seconds and more), peak memory, seconds to the first step and until every batch was seen twice, losses until then, what was
fused. Then the rules: no set-up below 0.97 of Inductor's speed or above 1.03 of its memory, every Llama that trains at 1.13
or more, losses alike.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from tabulate import tabulate
from torch import Tensor

import fx_fusion
from bench import ways_to_train
from bench.process import environment
from bench.trained_models import SIZES, TINY, use
from bench.ways_to_train import SETUPS, Batch, Setup

VARIANTS = ("inductor", "fx_fusion")
SECONDS = 1.5  # of a round, at least: a GPU that compilers kept waiting takes some tenths until it is at its clock
SLOWEST, MOST_MEMORY, LLAMA_TRAINS = 0.97, 1.03, 1.13


def measure(setup: Setup, variant: str, layers: int, options: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    ways_to_train.VARIABLES.clear()
    gc.collect()
    device = SIZES.device
    on_gpu = device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if setup.autocast else torch.bfloat16)
    with torch.device(device):
        model = setup.model(layers)
    torch.set_default_dtype(torch.float32)
    model.train(setup.trains)
    if setup.change is not None:
        setup.change(model)
    ours = variant == "fx_fusion"
    compiled = torch.compile(model, backend=variant, options=options or None if ours else None)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    batches = setup.batches()

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16) if setup.autocast else contextlib.nullcontext():
            loss = setup.step(compiled, dict(batch))
        if setup.trains:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    started = time.perf_counter()
    losses = [step(batches[0])]
    synchronize()
    first = time.perf_counter() - started
    losses += [step(batch) for batch in (*batches[1:], *batches)]  # everything is compiled then
    synchronize()
    warm, last = time.perf_counter() - started, len(losses) - 1
    graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def seconds(times: int) -> float:
        """A step's, in the mean over all batches so many times."""
        started = time.perf_counter()
        losses.extend(step(batch) for batch in itertools.chain.from_iterable([batches] * times))
        synchronize()
        return (time.perf_counter() - started) / (times * len(batches))

    times = math.ceil(SECONDS / (len(batches) * seconds(max(1, 8 // len(batches))))) if on_gpu else 1
    rounds = [seconds(times) for _ in range(3)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else 2**30
    return {
        "ms": round(1e3 * statistics.median(rounds), 2), "gib": round(peak / 2**30, 2),
        "first_s": round(first, 1), "warm_s": round(warm, 1), "losses": [round(float(losses[i]), 4) for i in (0, 1, last)],
        "graphs": graphs, "more_graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) - graphs,
    }  # fmt: skip


def compare(name: str, layers: int, options: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"setup": name, "layers": layers}
    for variant in VARIANTS:
        try:
            with fx_fusion.recording() as report:
                row[variant] = measure(SETUPS[name], variant, layers, {**SETUPS[name].options, **options})
        except Exception as error:  # the other set-ups go on; the row says what happened
            traceback.print_exc()
            return {**row, "error": f"{variant}: {type(error).__name__}: {str(error)[:300]}"}
    row["fused"] = dict(Counter(site.fusion for site in report.sites if site.status == "fused"))
    asked = [g.unmet if g.unassumed else g.calls for g in report.graphs if g.assumes or g.unassumed]
    row["calls"] = [[calls.assumed, calls.otherwise] for calls in asked]
    row["fallbacks"] = [graph.fallback for graph in report.graphs if graph.fallback]
    theirs, ours = row["inductor"], row["fx_fusion"]
    row["speed"], row["memory"] = round(theirs["ms"] / ours["ms"], 3), round(ours["gib"] / theirs["gib"], 3)
    return {**row, "environment": environment()}


def broken_rules(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["error"]]
    setup, found = SETUPS[row["setup"]], []
    if row["speed"] < SLOWEST:
        found.append(f"below {SLOWEST} of Inductor's speed")
    if row["memory"] > MOST_MEMORY:
        found.append(f"above {MOST_MEMORY} of its memory")
    if setup.trains and setup.is_llama and row["speed"] < LLAMA_TRAINS:
        found.append(f"a Llama that trains below {LLAMA_TRAINS}")
    pairs = zip(row["inductor"]["losses"], row["fx_fusion"]["losses"], strict=True)
    if any(abs(a - b) > 2e-2 * abs(a) for a, b in pairs):
        found.append("other losses")
    found += [f"fell back: {reason}" for reason in row["fallbacks"]]
    if row["fx_fusion"]["more_graphs"]:
        found.append("compiled again after every batch was seen twice")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setups", nargs="*", metavar="SETUP", help=", ".join(SETUPS))
    parser.add_argument("--layers", type=int, default=8, help="of the Llama")
    parser.add_argument("--options", default="{}", help="of fx_fusion, as JSON")
    parser.add_argument("--out", default="bench/results/setups.jsonl")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU: whether everything runs")
    given = parser.parse_args()
    if given.tiny:
        use(TINY)
        given.layers, given.out = 1, "/dev/null"
    if unknown := set(given.setups) - SETUPS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SETUPS)}")
    warnings.filterwarnings("ignore")
    rows = []
    for name in given.setups or SETUPS:
        rows.append(compare(name, given.layers, json.loads(given.options)))
        with Path(given.out).open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "environment"}), flush=True)
    table = [
        (
            r["setup"], *(f"{r[v]['ms']} / {r[v]['gib']}" for v in VARIANTS), r["speed"], r["memory"],
            "; ".join(broken_rules(r)),
        )
        for r in rows if "error" not in r
    ]  # fmt: skip
    print(tabulate(table, headers=("set-up", "Inductor ms / GiB", "fx_fusion", "speed", "memory", "rules broken")))
    sys.exit(any(broken_rules(row) for row in rows))


if __name__ == "__main__":
    main()
