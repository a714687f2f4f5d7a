"""Training on several GPUs of one host, Inductor beside fx_fusion in one process group.

    python -m bench.distributed                       every mode, on all GPUs
    python -m bench.distributed ddp fsdp2 --gpus 2
    python -m bench.distributed fsdp2 --profile DIR   and where the time of three steps goes, by kernel and by operator
    python -m bench.distributed fsdp2 --batch 8       more sequences a GPU: other rows, of a step that the host holds up less
    python -m bench.distributed fsdp2 --unread        a loop that seldom reads its loss: the host may be ahead
    python -m bench.distributed --tiny                whether all of them run, on CPUs with gloo; no figures

Llama of the 1B shape with 8 layers (experts: a Qwen3-MoE with 4), bfloat16, fused AdamW, 4 x 2048 tokens a GPU (tensor
parallel: 4 x 2048 in all).
torchrun is started for each mode. One JSON line a mode: milliseconds a step, timed in turns, and peak memory, of the
slowest and largest rank, losses of all steps, what was fused.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from tabulate import tabulate

from bench.parallel_models import FULL, MODES, SAME_BATCH, TINY, Sizes
from bench.process import MARK, Row, environment, give

VARIANTS = ("inductor", "fx_fusion")
TURN = 6  # steps


# -- one rank ---------------------------------------------------------------------------------------------------------
class Training:
    """A model in training under one variant: ``step(i)`` makes a step and returns its loss."""

    def __init__(self, mode: str, variant: str, sizes: Sizes) -> None:
        import torch
        import torch.distributed as dist

        cuda = sizes.device == "cuda"
        torch.manual_seed(0)
        model, self.call = MODES[mode]({} if variant == "inductor" else {"backend": "fx_fusion"}, sizes)
        # A fused step takes DTensors or plain tensors, not both.
        parts = [p for p in model.parameters() if hasattr(p, "placements")]
        groups = [parts, [p for p in model.parameters() if not hasattr(p, "placements")]]
        given = [{"params": group} for group in groups if group]
        self.optimizer = torch.optim.AdamW(given, lr=1e-5, fused=cuda, foreach=False)
        seed = 1 if mode in SAME_BATCH else 1 + dist.get_rank() // (2 if mode == "fsdp2-tensor-parallel" else 1)
        generator = torch.Generator().manual_seed(seed)
        shape = (4, sizes.batch, sizes.length)
        self.ids = torch.randint(0, sizes.vocabulary, shape, generator=generator).to(sizes.device)

    def step(self, i: int, reads: bool = True) -> float:
        ids = self.ids[i % 4]
        loss = self.call(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item() if reads else math.nan  # and so waits for the GPU


def measure(mode: str, sizes: Sizes, profiles: str | None = None, unread: bool = False) -> Row | None:
    """Returns the row of a mode on rank 0, None elsewhere; ``profiles`` is a folder for tables of where the time goes;
    ``unread``: the loss is read once a turn.

    Each variant makes ``sizes.steps`` steps for its losses and its peak; then they are timed in turns, ``TURN`` steps
    each, since a GPU that has worked for a while is slower (3 % on an H200) and would punish who comes last.
    """
    import torch
    import torch.distributed as dist

    cuda = sizes.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    row: Row = {"mode": mode, "ranks": dist.get_world_size(), "environment": environment()}
    if cuda and sizes.batch != FULL.batch:
        row["batch"] = sizes.batch
    if unread:
        row["loss read"] = "once a turn"
    trainings: dict[str, Training] = {}
    for variant in VARIANTS:
        gc.collect()
        try:
            trainings[variant], row[variant] = _train(mode, variant, sizes)
        except Exception as error:
            row[variant] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            break  # the ranks may have parted
    else:
        _time(trainings, row, sizes, unread)
        if profiles:
            for variant, training in trainings.items():
                _profile(training.step, os.path.join(profiles, f"{mode}_{variant}.txt"))
    first = dist.get_rank() == 0
    dist.barrier()
    return row if first else None


def _train(mode: str, variant: str, sizes: Sizes) -> tuple[Training, Row]:
    """Returns a training after ``sizes.steps`` steps, and its losses, its peak of memory and what was fused."""
    import torch

    import fx_fusion

    cuda = sizes.device == "cuda"
    other = torch.cuda.memory_allocated() if cuda else 0  # what the variant before holds is not this one's
    with fx_fusion.recording() as report:
        training = Training(mode, variant, sizes)
        started = time.perf_counter()
        losses = [training.step(0)]
        first = time.perf_counter() - started
        losses += [training.step(i) for i in range(1, 4)]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        losses += [training.step(i) for i in range(4, sizes.steps)]
    peak = (torch.cuda.max_memory_allocated() - other) / 2**30 if cuda else 0.0
    fused = Counter(s.fusion for s in report.sites if s.status == "fused")
    return training, {
        "peak_gib": round(_largest(peak, sizes), 2), "first_s": round(first, 1), "losses": [round(x, 4) for x in losses],
        "graphs": len(report.graphs), "fused": dict(sorted(fused.items())),
        "fallbacks": [g.fallback for g in report.graphs if g.fallback],
    }  # fmt: skip


def _time(trainings: dict[str, Training], row: Row, sizes: Sizes, unread: bool) -> None:
    """Adds the median milliseconds of a step to each variant's part of ``row``: those of the slowest rank."""
    times: dict[str, list[float]] = {variant: [] for variant in trainings}
    for _ in range(max(sizes.steps // TURN, 1)):
        for variant, training in trainings.items():
            training.step(0)  # the first of a turn finds the other's data in the caches
            started = time.perf_counter()
            for i in range(1, TURN):
                reads = not unread or i == TURN - 1
                training.step(i, reads)
                if reads:
                    now = time.perf_counter()
                    times[variant].append((now - started) / (TURN - 1 if unread else 1))
                    started = now
    for variant, found in times.items():
        row[variant]["ms"] = round(_largest(statistics.median(found) * 1e3, sizes), 2)


def _largest(value: float, sizes: Sizes) -> float:
    """Returns the largest of the ranks' values."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([value], dtype=torch.float64, device=sizes.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _profile(step: Any, path: str) -> None:
    """Writes where the time of three steps goes on rank 0: by kernel, then by what the CPU calls."""
    import torch.distributed as dist
    from torch.profiler import profile

    with profile() as record:
        for i in range(3):
            step(i)
    if dist.get_rank() == 0:
        averages = record.key_averages()
        keys = ("self_device_time_total", "self_cpu_time_total")
        tables = [averages.table(sort_by=key, row_limit=45, max_name_column_width=70) for key in keys]
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("\n".join(tables))


# -- all modes --------------------------------------------------------------------------------------------------------
def _torchrun(mode: str, ranks: int, given: argparse.Namespace) -> Row:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "bench.distributed", mode, "--inside", *(["--tiny"] if given.tiny else [])]
    command += ["--profile", given.profile] if given.profile else []
    command += ["--batch", str(given.batch)] if given.batch else []
    command += ["--unread"] if given.unread else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=given.timeout)
    except subprocess.TimeoutExpired:
        return {"mode": mode, "error": f"no result after {given.timeout:.0f} s"}
    row = next((line[len(MARK) :] for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if row is None:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"mode": mode, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:90]}
    return json.loads(row)


def _line(row: Row) -> tuple[Any, ...]:
    base, ours = (row.get(variant, {}) for variant in VARIANTS)
    trouble = row.get("error") or base.get("error") or ours.get("error")
    if trouble:
        return row["mode"], trouble.splitlines()[0][:100]
    apart = max(abs(a - b) for a, b in zip(base["losses"], ours["losses"], strict=True))
    memory = f"{ours['peak_gib'] / base['peak_gib']:.2f}" if base["peak_gib"] else ""
    return (
        row["mode"], row["ranks"], base["ms"], ours["ms"], f"{base['ms'] / ours['ms']:.3f}", base["peak_gib"],
        ours["peak_gib"], memory, f"{apart:.4f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(MODES)}; all of them unless named")
    parser.add_argument("--gpus", type=int, help="how many; all of the host")
    parser.add_argument("--tiny", action="store_true", help="two CPU processes, a tiny model")
    parser.add_argument("--out", default="bench/results/distributed.jsonl")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one mode")
    parser.add_argument("--profile", metavar="DIR", help="a folder for tables of where the time of three steps goes")
    parser.add_argument("--batch", type=int, help=f"sequences of {FULL.length} tokens a GPU; {FULL.batch} unless given")
    parser.add_argument("--unread", action="store_true", help="read the loss once a turn only: the host may be ahead")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.modes) - set(MODES):
        parser.error(f"no mode is called {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    if given.inside:
        sizes = TINY if given.tiny else FULL
        sizes = dataclasses.replace(sizes, batch=given.batch or sizes.batch)
        row = measure(given.modes[0], sizes, given.profile, given.unread)
        if row is not None:
            give(row)
        return
    import torch

    ranks = given.gpus or (2 if given.tiny else torch.cuda.device_count())
    if ranks < 2:
        parser.error(f"this takes two GPUs at least; there are {ranks} (--tiny: two CPU processes)")
    table = []
    for mode in given.modes or [m for m in MODES if ranks >= 4 or m != "fsdp2-tensor-parallel"]:
        row = _torchrun(mode, ranks, given)
        if not given.tiny and "error" not in row:
            with open(given.out, "a") as file:
                file.write(json.dumps(row) + "\n")
        table.append(_line(row))
    headers = ("mode", "ranks", "Inductor ms", "ours ms", "x", "GiB", "ours", "of it", "losses apart")
    print(tabulate(table, headers=headers))


if __name__ == "__main__":
    main()
