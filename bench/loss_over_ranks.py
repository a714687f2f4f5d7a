"""lm_head + loss with the classes on all GPUs of a host, beside the same chunks on each GPU alone.

    torchrun --standalone --nproc-per-node=2 -m bench.loss_over_ranks
    torchrun --standalone --nproc-per-node=2 -m bench.loss_over_ranks --tiny       on CPUs with gloo; no figures

Llama's head: 8192 rows of 2048, 128256 classes over the ranks, bfloat16, forward and backward, timed in turns. "alone" is
each rank's part of the classes as if they were all, without a word between the ranks: what the reductions cost is the
difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from bench.process import environment

ROUNDS, CALLS = 10, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="on CPUs, 64 rows of 16, 1000 classes")
    parser.add_argument("--out", default="bench/results/loss_over_ranks.jsonl")
    tiny, out = (given := parser.parse_args()).tiny, given.out
    import torch
    import torch.distributed as dist

    from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy

    dist.init_process_group("gloo" if tiny else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cpu" if tiny else f"cuda:{os.environ['LOCAL_RANK']}"
    if not tiny:
        torch.cuda.set_device(device)
    rows, hidden, classes = (64, 16, 1000) if tiny else (8192, 2048, 128256)
    dtype = torch.float32 if tiny else torch.bfloat16
    own = classes // ranks
    generator = torch.Generator(device).manual_seed(0)  # x and target are the same on all ranks
    x = torch.randn(rows, hidden, generator=generator, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(own, hidden, device=device, dtype=dtype) * hidden**-0.5).requires_grad_()
    target = torch.randint(0, own * ranks, (rows,), generator=generator, device=device)

    def call(target: Any, *part: Any) -> None:
        options = ("mean", -100, 0.0, 0.0, 1.0, [True, True, False], False, False, *part)
        loss = linear_cross_entropy(x, weight, None, target, None, *options)[0]
        torch.autograd.grad(loss, [x, weight])

    group = dist.group.WORLD.group_name
    variants = {"alone": (target % own,), "over_ranks": (target, group, rank * own, own * ranks, ranks)}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(ROUNDS + 1):
        for name, arguments in variants.items():
            dist.barrier()
            started = _now(tiny)
            for _ in range(CALLS):
                call(*arguments)
            if i:  # the first compiles
                times[name].append((_now(tiny) - started) / CALLS * 1e3)
    if rank == 0:
        found = {name: round(statistics.median(values), 3) for name, values in times.items()}
        row = {"rows": rows, "hidden": hidden, "classes": own * ranks, "ranks": ranks, "ms": found}
        print(json.dumps(row | {"speed": round(found["alone"] / found["over_ranks"], 3)}))
        if not tiny:
            with open(out, "a") as file:
                file.write(json.dumps(row | {"environment": environment()}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _now(tiny: bool) -> float:
    import torch

    if not tiny:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
