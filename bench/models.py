"""Training throughput of whole models, each variant in a process of its own, in one run.

    python -m bench.models llama-1b --variants eager,inductor,liger,fx_fusion --mask none,ones

One row a variant: items a second (median step), peak memory, seconds to the first step, loss curve. Random weights, fused
AdamW, bfloat16 parameters. Rows are appended as JSON lines with the environment. With ``--lock FILE`` several of these
can run at once: they compile side by side (which makes their first steps slower) and take turns measuring.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from bench.families import FAMILIES
from bench.process import environment, give, measured

VARIANTS = ("eager", "inductor", "liger", "fx_fusion")


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """Nobody else who names this file is in here."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(given: argparse.Namespace, variant: str) -> dict:
    """Train for some steps in this process; the row."""
    import torch

    family = FAMILIES[given.family]
    batch, length, steps = given.batch or family.batch, given.length or family.length, given.steps
    options = json.loads(given.options)
    if variant == "liger":
        import liger_kernel.transformers

        if family.liger is None:
            return {"error": "Liger has no patch for this model"}
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{family.liger}")()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, inputs, items = family.build(batch, length)
    torch.set_default_dtype(torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step_model = model
    if variant == "inductor":
        step_model = torch.compile(model, options={k: v for k, v in options.items() if "." in k} or None)
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
    with alone(given.lock):
        losses += [step(i) for i in range(1, 4)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps - 3)]
        events[0].record()
        for i in range(4, steps):
            losses.append(step(i))
            events[i - 3].record()
        torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return {
        "model": given.family, "variant": variant, "batch": batch, "length": length, "mask": given.mask,
        "unit": family.unit, "items_per_s": round(items / ms * 1e3, 1), "ms": round(ms, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "first_s": round(first, 1),
        "losses": [round(x.item(), 5) for x in losses], "options": options,
        "environment": environment(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--variants", default="inductor,fx_fusion")
    parser.add_argument("--mask", default="none", help="none, ones or none,ones")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--options", default="{}", help="options of the fx_fusion variant, as JSON")
    parser.add_argument("--out", default="bench/results/models.jsonl")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one variant")
    parser.add_argument("--lock", help="a file: whoever holds it measures")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        give(measure(given, given.variants))
        return
    rows = []
    for mask in given.mask.split(","):
        for variant in given.variants.split(","):
            row = _in_a_process(given, variant, mask)
            rows.append(row)
            if "error" not in row:
                Path(given.out).parent.mkdir(parents=True, exist_ok=True)
                with open(given.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
    base = {r["mask"]: r for r in rows if r["variant"] == "inductor" and "error" not in r}
    table = []
    for r in rows:
        if "error" in r:
            table.append((r["variant"], r["mask"], r["error"]))
            continue
        b = base.get(r["mask"], r)
        table.append((
            r["variant"], r["mask"], r["items_per_s"], r["ms"], r["peak_gib"], r["first_s"],
            f"{r['items_per_s'] / b['items_per_s']:.3f}", f"{r['peak_gib'] / b['peak_gib']:.3f}", r["losses"][-1],
        ))  # fmt: skip
    unit = FAMILIES[given.family].unit
    headers = ("variant", "mask", f"{unit}/s", "ms", "peak GiB", "first s", "x Inductor", "of its memory", "loss")
    print(given.family)
    print(tabulate(table, headers=headers))


def _in_a_process(given: argparse.Namespace, variant: str, mask: str) -> dict:
    command = [
        "bench.models", given.family, "--inside", "--variants", variant, "--mask", mask,
        "--steps", str(given.steps), "--options", given.options,
    ]  # fmt: skip
    for name in ("batch", "length", "lock"):
        if (value := getattr(given, name)) is not None:
            command += [f"--{name}", str(value)]
    return {"variant": variant, "mask": mask, **measured(command, given.timeout)}


if __name__ == "__main__":
    main()
