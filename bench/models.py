"""Training throughput of whole models, each variant in a process of its own, in one run.

    python -m bench.models llama-1b --variants eager,inductor,liger,fx_fusion --mask none,ones
    python -m bench.models albert deberta marian --together 6

One row a variant: items a second (median step), peak memory, seconds to the first step, loss curve. Random weights, fused
AdamW, bfloat16 parameters. Rows are appended as JSON lines with the environment. ``--together`` of them compile side by
side (which makes their first steps slower; they must fit on the GPU together) and measure one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.families import FAMILIES
from bench.process import Row, environment, give, in_turns, wait_for_turn
from fx_fusion.options import inductors_own

VARIANTS = ("eager", "inductor", "liger", "fx_fusion")
SECONDS = 2.0  # the least that is measured: a step of some milliseconds is bound by the host, and varies


def measure(given: argparse.Namespace, variant: str) -> Row:
    """Train for some steps in this process; the row."""
    import torch

    family = FAMILIES[given.families[0]]
    batch, length, steps = given.batch or family.batch, given.length or family.length, given.steps
    options = json.loads(given.options)
    if variant == "liger":
        import liger_kernel.transformers

        if family.liger is None:
            raise SystemExit("Liger has no patch for this model")
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{family.liger}")()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, inputs, items = family.build(batch, length)
    torch.set_default_dtype(torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step_model = model
    if variant == "inductor":
        step_model = torch.compile(model, options=inductors_own(options) or None)
    elif variant == "fx_fusion":
        step_model = torch.compile(model, backend="fx_fusion", options=options or None)

    def step(i: int) -> torch.Tensor:
        call = inputs(i)
        if given.mask == "ones":  # a new tensor with every batch, as a collator makes it
            call["attention_mask"] = torch.ones(batch, length, dtype=torch.long, device="cuda")
        loss = family.loss_of(step_model(**call), call)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()  # under CUDA graphs the loss itself is overwritten by the next step

    started = time.time()
    losses = [step(0)]
    torch.cuda.synchronize()
    first = time.time() - started
    losses += [step(i) for i in range(1, 3)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    wait_for_turn()
    losses += [step(i) for i in range(3, 6)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.time()
    events = [_recorded()]
    while len(events) < steps - 5 or time.time() - started < SECONDS:
        losses.append(step(len(losses)))
        events.append(_recorded())
        events[max(len(events) - 4, 0)].synchronize()  # the host is a few steps ahead, not seconds
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return {
        "model": given.families[0], "variant": variant, "batch": batch, "length": length, "mask": given.mask,
        "unit": family.unit, "items_per_s": round(items / ms * 1e3, 1), "ms": round(ms, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "first_s": round(first, 1),
        "losses": [round(x.item(), 5) for x in losses[:steps]], "options": options,
        "environment": environment(),
    }  # fmt: skip


def _recorded() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="+", choices=FAMILIES, metavar="family")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--variants", default="inductor,fx_fusion")
    parser.add_argument("--mask", default="none", help="none, ones or none,ones")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--options", default="{}", help="options of the fx_fusion variant, as JSON")
    parser.add_argument("--out", default="bench/results/models.jsonl")
    parser.add_argument("--together", type=int, default=1, help="how many compile side by side")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one variant to compile, and to be measured")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        give(measure(given, given.variants))
        return
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    keys = itertools.product(given.families, given.mask.split(","), given.variants.split(","))
    jobs = {" ".join(key): _command(given, *key) for key in keys}
    found: dict[str, Row | str] = {}
    for start in range(0, len(jobs), given.together):
        inner = dict(itertools.islice(jobs.items(), start, start + given.together))
        for key, rows in in_turns(inner, given.timeout, given.timeout).items():
            found[key] = rows if isinstance(rows, str) else rows[0]
            if not isinstance(rows, str):
                with open(given.out, "a") as file:
                    file.write(json.dumps(rows[0]) + "\n")
    for family in given.families:
        print(f"{family}\n{_table(family, found)}")


def _command(given: argparse.Namespace, family: str, mask: str, variant: str) -> list[str]:
    """The arguments of the inner process."""
    command = [
        "bench.models", family, "--inside", "--variants", variant, "--mask", mask, "--steps", str(given.steps),
        "--options", given.options,
    ]  # fmt: skip
    for name in ("batch", "length"):
        if (value := getattr(given, name)) is not None:
            command += [f"--{name}", str(value)]
    return command


def _table(family: str, found: dict[str, Row | str]) -> str:
    """The rows of one family beside Inductor's, or why there are none; ``found`` is by family, mask and variant."""
    table: list[tuple[Any, ...]] = []
    for key, row in found.items():
        of, mask, variant = key.split(" ")
        if of != family:
            continue
        if isinstance(row, str):
            table.append((variant, mask, row))
            continue
        base = found.get(f"{family} {mask} inductor")
        base = base if isinstance(base, dict) else row
        beside = [f"{row[name] / base[name]:.3f}" for name in ("items_per_s", "peak_gib")]
        table.append((
            variant, mask, row["items_per_s"], row["ms"], row["peak_gib"], row["first_s"], *beside, row["losses"][-1],
        ))  # fmt: skip
    unit = FAMILIES[family].unit
    headers = ("variant", "mask", f"{unit}/s", "ms", "peak GiB", "first s", "x Inductor", "of its memory", "loss")
    return str(tabulate(table, headers=headers))


if __name__ == "__main__":
    main()
