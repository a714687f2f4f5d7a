"""Training throughput of whole models, each variant in a process of its own, in one run.

    python -m bench.models llama-1b --batch 8 --length 2048 --variants inductor,fx_fusion --mask none,ones

One row a variant: tokens/s (median step), peak memory, seconds to the first step, loss curve. Random weights, fused
AdamW, bfloat16 parameters, labels equal to the inputs. Rows are appended as JSON lines with the environment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

SHAPES = {
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "vocab_size": 128256,
    },
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "llama-tiny": {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 32000,
    },
}  # fmt: skip
VARIANTS = ("eager", "inductor", "liger", "fx_fusion")


def measure(shape: str, variant: str, batch: int, length: int, mask: str, steps: int, options: dict) -> dict:
    """Train for ``steps`` steps in this process; the row."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if variant == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = LlamaConfig(
        max_position_embeddings=8192, rms_norm_eps=1e-5, use_cache=False, attn_implementation="sdpa", **SHAPES[shape]
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step_model = model
    if variant == "inductor":
        step_model = torch.compile(model)
    elif variant == "fx_fusion":
        step_model = torch.compile(model, backend="fx_fusion", options=options or None)
    ids = torch.randint(0, config.vocab_size, (8, batch, length), device="cuda")
    extra = {}

    def step(i: int) -> torch.Tensor:
        if mask == "ones":  # a new tensor with every batch, as a collator makes it
            extra["attention_mask"] = torch.ones(batch, length, dtype=torch.long, device="cuda")
        out = step_model(input_ids=ids[i % 8], labels=ids[i % 8], **extra)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out.loss.detach()

    started = time.time()
    losses = [step(0)]
    torch.cuda.synchronize()
    first = time.time() - started
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
        "model": shape, "variant": variant, "batch": batch, "length": length, "mask": mask,
        "tokens_per_s": round(batch * length / ms * 1e3), "ms": round(ms, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "first_s": round(first, 1),
        "losses": [round(x.item(), 5) for x in losses], "options": options,
        "environment": environment(),
    }  # fmt: skip


def environment() -> dict:
    import torch
    import transformers
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        "triton": triton.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--variants", default="inductor,fx_fusion")
    parser.add_argument("--mask", default="none", help="none, ones or none,ones")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--options", default="{}", help="options of the fx_fusion variant, as JSON")
    parser.add_argument("--out", default="bench/results/models.jsonl")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one variant")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        options = json.loads(given.options)
        row = measure(given.shape, given.variants, given.batch, given.length, given.mask, given.steps, options)
        print("ROW " + json.dumps(row), flush=True)
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
            r["variant"], r["mask"], r["tokens_per_s"], r["ms"], r["peak_gib"], r["first_s"],
            f"{r['tokens_per_s'] / b['tokens_per_s']:.3f}", f"{r['peak_gib'] / b['peak_gib']:.3f}", r["losses"][-1],
        ))  # fmt: skip
    headers = ("variant", "mask", "tokens/s", "ms", "peak GiB", "first s", "x Inductor", "of its memory", "last loss")
    print(f"{given.shape}, {given.batch} x {given.length}")
    print(tabulate(table, headers=headers))


def _in_a_process(given: argparse.Namespace, variant: str, mask: str) -> dict:
    command = [
        sys.executable, "-m", "bench.models", given.shape, "--inside", "--variants", variant, "--mask", mask,
        "--batch", str(given.batch), "--length", str(given.length), "--steps", str(given.steps),
        "--options", given.options,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=given.timeout)
    except subprocess.TimeoutExpired as late:
        print((late.stderr or b"")[-3000:], file=sys.stderr)
        return {"variant": variant, "mask": mask, "error": f"no result after {given.timeout} s"}
    row = next((line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")), None)
    if row is None:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"variant": variant, "mask": mask, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:90]}
    return json.loads(row)


if __name__ == "__main__":
    main()
