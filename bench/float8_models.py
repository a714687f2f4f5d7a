"""A step of a model in float8, by ``options={"float8": ...}`` and by torchao's recipes, beside bfloat16.

    python -m bench.float8_models llama-1b llama-8b

Every variant compiles in a process of its own (``--together`` at a time) and measures alone: forward, backward and fused
AdamW. ``lm_head`` stays bfloat16, as in every published configuration.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from tabulate import tabulate

from bench.families import FAMILIES
from bench.process import Row, environment, give, in_turns, wait_for_turn

VARIANTS = (
    "inductor:bfloat16", "fx_fusion:bfloat16", "ours:rowwise_gw_hp", "ours:rowwise", "inductor:rowwise_with_gw_hp",
    "fx_fusion:rowwise_with_gw_hp", "inductor:rowwise", "inductor:tensorwise",
)  # fmt: skip
STEPS, ROUNDS = 5, 3


def measure(name: str, backend: str, recipe: str) -> Row:
    import torch
    from torch.profiler import ProfilerActivity, profile

    import fx_fusion

    family = FAMILIES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, step_of, items = family.build(family.batch, family.length)
    torch.set_default_dtype(torch.float32)
    model.train()
    if recipe != "bfloat16" and backend != "ours":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: "lm_head" not in path)
        if recipe != "tensorwise":  # as torchtitan: or checkpointed values are computed again in another precision
            torch._inductor.config.emulate_precision_casts = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ours = {"backend": "fx_fusion", "options": {"float8": recipe}}
    call = torch.compile(model, **(ours if backend == "ours" else {"backend": backend}))

    def step(i: int) -> Any:
        loss = family.loss_of(call(**step_of(i)), step_of(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    with fx_fusion.recording() as report:
        losses = [float(step(i)) for i in range(3)]
    torch.cuda.empty_cache()
    wait_for_turn()
    times = []
    for turn in range(ROUNDS + 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(STEPS):
            step(i)
        end.record()
        torch.cuda.synchronize()
        if turn:
            times.append(start.elapsed_time(end) / STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step(0)
        torch.cuda.synchronize()
    longest = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)[:25]
    kernels = {event.key[:80]: (event.count, round(event.device_time_total / 1e3, 3)) for event in longest}
    return {
        "model": name, "backend": backend, "recipe": recipe, "ms": round(statistics.median(times), 2), "items": items,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "losses": [round(x, 4) for x in losses],
        "fused": sum(site.status == "fused" for site in report.sites), "environment": environment(),
        "said": [line for graph in report.graphs for line in graph.notes() if "float8" in line], "kernels": kernels,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=FAMILIES)
    parser.add_argument("--variants", help="backend:recipe,...; all of them unless given")
    parser.add_argument("--together", type=int, default=2, help="how many compile side by side")
    parser.add_argument("--compile-seconds", type=float, default=150)
    parser.add_argument("--out", default="bench/results/float8_models.jsonl")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    variants = (given.variants or ",".join(VARIANTS)).split(",")
    if given.inside:
        give(measure(given.models[0], *variants[0].split(":")))
        return
    table: list[tuple[Any, ...]] = []
    for name in given.models:
        base = None
        for start in range(0, len(variants), given.together):
            inner = {
                variant: ["bench.float8_models", name, "--variants", variant, "--inside"]
                for variant in variants[start : start + given.together]
            }
            for variant, rows in in_turns(inner, given.compile_seconds, 60).items():
                if isinstance(rows, str):
                    table.append((name, variant, rows))
                    continue
                row = rows[0]
                with open(given.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
                base = base or row["ms"]
                table.append((name, variant, row["ms"], row["peak_gib"], row["losses"][-1], f"{base / row['ms']:.3f}"))
    print(tabulate(table, headers=("model", "variant", "ms", "peak GiB", "third loss", "x the first")))


if __name__ == "__main__":
    main()
