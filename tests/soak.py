"""``python -m tests.soak --steps 10000``: a long training run of a tiny Llama, on a CPU, and whether anything grows.

Lengths change, padded and full batches take turns, every so often an evaluation reads the logits, and the optimizer's step is
compiled too, under a schedule. Behind the first steps nothing may be compiled any more, and the memory of the process and the
number of Python objects must stay as they are.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import time
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import fx_fusion

LENGTHS = (8, 12, 16, 24, 32)
VOCABULARY = 128
Sample = dict[str, int]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip


def batch(choose: random.Random, padded: bool) -> dict[str, torch.Tensor]:
    """Four rows that count on by one from anywhere; padded ones end early."""
    length = choose.choice(LENGTHS)
    starts = torch.tensor([choose.randrange(VOCABULARY) for _ in range(4)])
    ids = (starts[:, None] + torch.arange(length)) % VOCABULARY
    ends = torch.tensor([choose.randrange(length // 2, length) if padded else length for _ in range(4)])
    mask = (torch.arange(length) < ends[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def resident() -> int:
    """The memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sample(report: fx_fusion.Report) -> Sample:
    gc.collect()
    compiled = counters["stats"]["unique_graphs"] + len(report.graphs)
    return {"compiled": compiled, "resident": resident(), "objects": len(gc.get_objects())}


def soak(steps: int) -> None:
    """Train for so many steps; raise AssertionError where something grew."""
    settled, warm, every = min(300, steps // 2), min(1000, steps // 2), min(100, max(steps // 8, 1))
    trained, choose = model(), random.Random(0)
    run = torch.compile(trained, backend="fx_fusion", options={"select": "always"})  # every op runs, and logits are deferred
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20) * 0.5 * (1 + math.cos(math.pi * n / steps)))
    step_taken = torch.compile(optimizer.step, backend="fx_fusion")
    losses, right, samples = {"first": 0.0, "last": 0.0}, 0.0, {}
    started = time.perf_counter()
    with fx_fusion.recording() as report:
        for step in range(1, steps + 1):
            loss = run(**batch(choose, padded=choose.random() < 0.5)).loss
            loss.backward()
            step_taken()
            schedule.step()
            optimizer.zero_grad()
            assert math.isfinite(loss.item()), f"step {step}: a loss of {loss.item()}"
            losses["first"] += loss.item() * (step <= every) / every
            losses["last"] += loss.item() * (step > steps - every) / every
            if step % every == 0:
                right = evaluated(run, trained, random.Random(1))
            if step in (settled, warm, steps):
                samples[step] = sample(report)
                took = time.perf_counter() - started
                print(f"step {step}: {samples[step]}, {1e3 * took / step:.1f} ms a step with compilation", flush=True)
    print(f"loss {losses['first']:.3f} -> {losses['last']:.3f}; {right:.0%} of the next tokens are right")
    print(report)
    assert losses["last"] < losses["first"], losses
    all_was_run(report)
    flat(samples[settled], samples[warm], samples[steps])


def evaluated(run: torch.nn.Module, trained: torch.nn.Module, choose: random.Random) -> float:
    """The part of next tokens that are right, in four batches whose logits are read."""
    trained.eval()
    hits = seen = 0
    with torch.no_grad():
        for n in range(4):
            given = batch(choose, padded=n % 2 == 0)
            guess, target = run(**given).logits[:, :-1].argmax(-1), given["labels"][:, 1:]
            hits += int(((guess == target) & (target != -100)).sum())
            seen += int((target != -100).sum())
    trained.train()
    return hits / seen


def all_was_run(report: fx_fusion.Report) -> None:
    """Raise AssertionError unless the fusions fired, and the other versions of a graph were compiled."""
    assert all(report.count(fusion) for fusion in ("linear_cross_entropy", "rms_norm", "add_rms_norm", "rope", "causal_mask"))
    assert any("without its assumption" in g.version or "for other inputs" in g.version for g in report.graphs), "no version for padding"
    assert any("deferred outputs are read" in graph.version for graph in report.graphs), "no version that computes the logits"


def flat(settled: Sample, warm: Sample, end: Sample) -> None:
    """Raise AssertionError if anything was compiled after ``settled``, or anything grew after ``warm``."""
    growth, more = end["resident"] / warm["resident"] - 1, end["objects"] - warm["objects"]
    print(f"memory {growth:+.2%} ({warm['resident'] >> 20} -> {end['resident'] >> 20} MiB), {more:+d} Python objects of {warm['objects']}")
    assert end["compiled"] == settled["compiled"], f"compiled again: {settled['compiled']} -> {end['compiled']}"
    assert growth < 0.03, f"memory grew by {growth:.1%}"
    assert more < 500, f"{more} more Python objects"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    torch.set_num_threads(1)
    soak(parser.parse_args().steps)
