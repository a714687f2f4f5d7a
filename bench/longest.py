"""The longest row and the largest batch of Llama 1B that train on one GPU, each variant in a process of its own.

    python -m bench.longest
    python -m bench.longest --variants inductor,min --measures row,checkpointed
    python -m bench.longest --variants inductor,min --measures batch --sizes 36,62     # do these train? compiled for each

``row`` is a batch of one, ``batch`` rows of 2048 tokens, ``checkpointed`` a batch of one under gradient checkpointing. A
step is forward, backward and fused AdamW in bfloat16, compiled once with dynamic sizes. Two sizes give the line of peak
memory over size; from three percent under where it meets the GPU's memory the size goes down by three percent until a
step trains. Sizes begin where the logits have more than 2**31 elements: below, other code is compiled.
What would take a step longer than ``--patience`` seconds (attention grows by the square) is not run, nor what ``--timeout``
cuts off: then the row is ``capped``, and says what the longest run was and what the line says.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tabulate import tabulate

from bench.families import FAMILIES
from bench.process import Row, environment, give, measured

VARIANTS = ("inductor", "liger", "auto", "min")
MEASURES = {"row": 1024, "batch": 1, "checkpointed": 1024}  # and in what portions the size changes
SIZES = {"row": (17 * 1024, 32 * 1024), "batch": (9, 16), "checkpointed": (17 * 1024, 32 * 1024)}  # that give the line
LENGTH = 2048


def build(variant: str, checkpointed: bool, dynamic: bool) -> tuple[Any, Any]:
    """The model as it is called, and its optimizer."""
    import torch

    if variant == "liger":
        import liger_kernel.transformers

        liger_kernel.transformers.apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, _, _ = FAMILIES["llama-1b"].build(1, LENGTH)
    torch.set_default_dtype(torch.float32)
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if variant == "inductor":
        return torch.compile(model, dynamic=dynamic), optimizer
    if variant in ("auto", "min"):
        return torch.compile(model, backend="fx_fusion", dynamic=dynamic, options={"memory": variant}), optimizer
    return model, optimizer


def trainer(variant: str, measure: str, dynamic: bool = True) -> Callable[[int], tuple[float, float] | None]:
    """Bytes of peak and seconds of a step at a size, or None if the memory does not suffice."""
    import torch

    model, optimizer = build(variant, measure == "checkpointed", dynamic)

    def train(size: int) -> tuple[float, float] | None:
        batch, length = (size, LENGTH) if measure == "batch" else (1, size)
        torch.cuda.reset_peak_memory_stats()
        try:
            for _ in range(1 if optimizer.state else 2):  # AdamW's sums are there from the second step on
                started = time.monotonic()
                ids = torch.randint(0, 128256, (batch, length), device="cuda")
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return None
        finally:
            optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
        return torch.cuda.max_memory_allocated(), time.monotonic() - started

    return train


def attempt(variant: str, measure: str, size: int) -> Row:
    """Return True if one size trains, compiled for it, in this process."""
    trained = trainer(variant, measure, dynamic=False)(size)
    peak, seconds = trained if trained is not None else (None, None)
    return {
        "model": "llama-1b", "variant": variant, "measure": measure, "size": size, "trained": trained is not None,
        "peak_gib": peak and round(peak / 2**30, 2), "seconds": seconds and round(seconds, 2), "environment": environment(),
    }  # fmt: skip


def search(variant: str, measure: str, patience: float, compile_only: bool) -> Row:
    """The largest size that trains, in this process; with ``compile_only`` the first of ``SIZES`` fills the caches."""
    import torch

    train, portion = trainer(variant, measure), MEASURES[measure]
    small, more = SIZES[measure]
    if compile_only:
        return {"variant": variant, "measure": measure, "trained": train(small) is not None}
    first, _, second = train(small), train(more), train(more)  # the one between may compile
    if first is None or second is None:
        raise MemoryError(f"{more} do not fit")
    (peak, _), (peak_of_more, step) = first, second
    growth = 1 if measure == "batch" else 2  # of the time, at most
    slope = (peak_of_more - peak) / (more - small)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    line = int(more + (free - peak_of_more) / slope) // portion * portion
    runs = {small: round(peak / 2**30, 2), more: round(peak_of_more / 2**30, 2)}
    row = {
        "model": "llama-1b", "variant": variant, "measure": measure, "largest": more, "by_the_line": line,
        "bytes_each": round(slope), "peak_gib_by_size": runs, "capped": True, "environment": environment(),
    }  # fmt: skip
    give(row)  # what stands if the time is up before a step of the largest size is through
    size = int(line * 0.97) // portion * portion
    capped = step * (size / more) ** growth > patience
    while step * (size / more) ** growth > patience:
        size = int(size * 0.9) // portion * portion
    while size > more:
        runs[size] = (trained := train(size)) and round(trained[0] / 2**30, 2)
        if trained:
            return {**row, "largest": size, "capped": capped}
        size -= max(int(size * 0.03) // portion, 1) * portion
    return {**row, "capped": capped}


def compile_all(variants: list[str], measures: list[str], timeout: int) -> None:
    """Run every variant at its first size, all at once: they must fit on the GPU together."""
    jobs = [
        ["bench.longest", "--inside", "--compile-only", "--variants", variant, "--measures", measure]
        for measure in measures
        for variant in variants
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for row in pool.map(lambda job: measured(job, timeout), jobs):
            print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--patience", type=float, default=30, help="seconds for one step")
    parser.add_argument("--out", default="bench/results/longest.jsonl")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one variant and measure")
    parser.add_argument("--sizes", help="try these alone, one for each variant")
    parser.add_argument("--compile-only", action="store_true", help="fill the compilers' caches, all variants at once")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside and given.sizes:
        give(attempt(given.variants, given.measures, int(given.sizes)))
        return
    if given.inside:
        give(search(given.variants, given.measures, given.patience, given.compile_only))
        return
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if given.compile_only:
        compile_all(given.variants.split(","), given.measures.split(","), given.timeout)
        return
    table: list[tuple[Any, ...]] = []
    if given.sizes:
        for variant, size in zip(given.variants.split(","), given.sizes.split(","), strict=True):
            inside = ["bench.longest", "--inside", "--variants", variant, "--measures", given.measures, "--sizes", size]
            row = measured(inside, given.timeout)
            if "error" not in row:
                with open(given.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
            table.append((given.measures, variant, size, *(row.get(n) for n in ("trained", "peak_gib", "seconds", "error"))))
        print(tabulate(table, headers=("measure", "variant", "size", "trains", "peak GiB", "seconds of a step", "")))
        return
    for measure in given.measures.split(","):
        base = None
        for variant in given.variants.split(","):
            inside = ["bench.longest", "--inside", "--variants", variant, "--measures", measure]
            row = measured([*inside, "--patience", str(given.patience)], given.timeout)
            if "error" in row:
                table.append((measure, variant, row["error"]))
                continue
            with open(given.out, "a") as file:
                file.write(json.dumps(row) + "\n")
            base = base or row["largest"]
            ratio = f"{row['largest'] / base:.2f}" if base else ""
            table.append((measure, variant, row["largest"], row["by_the_line"], row["bytes_each"], ratio, row["capped"]))
    headers = ("measure", "variant", "largest", "by the line", "bytes each", "x the first", "capped")
    print(tabulate(table, headers=headers))


if __name__ == "__main__":
    main()
