"""Train a real, unmodified transformers Llama with random weights under eager, Inductor and fx_fusion.

Each variant runs in a process of its own, so that peak memory and compile caches are its own. On CPU the model has a few
layers and a vocabulary of 32000; on a GPU it has the shape of Llama-3.2-1B at 8 x 2048 tokens.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tabulate import tabulate

from fx_fusion.console import Output
from fx_fusion.doctor import cpp_compiler
from fx_fusion.report.verdict import counted

VARIANTS = ("eager", "inductor", "fx_fusion")
ON_CPU: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
ON_GPU: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


def configuration(device: str, layers: int | None = None, hidden: int | None = None) -> dict[str, Any]:
    """Returns what the model is made of on a device. Of another width it has heads of the same size, and more of them or
    fewer. Raises ValueError for a width that can't be."""
    made = dict(ON_GPU if device == "cuda" else ON_CPU)
    width, heads = made["hidden_size"], made["num_attention_heads"]
    step = width // made["num_key_value_heads"]  # so many columns have one head of keys
    if hidden is not None and hidden % step:
        raise ValueError(f"--hidden: must be a multiple of {step}; got {hidden}")
    wide = hidden or width
    return {
        **made, "num_hidden_layers": layers or made["num_hidden_layers"], "hidden_size": wide,
        "intermediate_size": made["intermediate_size"] * wide // width, "head_dim": width // heads,
        "num_attention_heads": wide * heads // width, "num_key_value_heads": wide // step,
    }  # fmt: skip


def train(variant: str, steps: int, device: str, layers: int | None, hidden: int | None) -> None:
    """Train in this process; one JSON line a step on standard output, the summary last."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import fx_fusion

    gpu = device == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    batch, length = (8, 2048) if gpu else (4, 1024)
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=8192, use_cache=False, **configuration(device, layers, hidden))
    model = LlamaForCausalLM(config).to(device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if gpu else None)
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)
    run: Any = model
    if variant == "inductor":
        run = torch.compile(model)
    elif variant == "fx_fusion":
        run = torch.compile(model, backend="fx_fusion")
    before = _resident()
    losses, times = [], []
    with fx_fusion.recording() as report:
        for _ in range(steps):
            started = time.perf_counter()
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            times.append(time.perf_counter() - started)
            if not gpu and len(losses) == 1:
                _forget_peak()  # compiling needs memory of its own
            print(json.dumps({"step": len(losses), "loss": losses[-1]}), flush=True)
    peak = torch.cuda.max_memory_allocated() if gpu else _peak() - before
    summary = {
        "losses": losses, "first_s": times[0], "step_s": statistics.median(times[1:] or times), "peak": peak,
        "table": str(report), "shape": f"{batch} x {length} tokens, {counted(config.num_hidden_layers, 'layer')}, "
        f"width {config.hidden_size}, vocabulary {config.vocab_size}, {device}",
    }  # fmt: skip
    print(json.dumps(summary), flush=True)


def main(
    steps: int, variant: str | None, device: str | None = None, layers: int | None = None, hidden: int | None = None
) -> int:  # fmt: skip
    """Run all variants and print coverage, losses, times and peaks; the exit code. Raises ValueError for a device that is
    not there, and for a width that can't be."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: torch finds no GPU here; leave it out, or take cpu")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if variant is not None:
        train(variant, steps, device, layers, hidden)
        return 0
    configuration(device, layers, hidden)
    console = Output(highlight=False)
    if device == "cpu" and cpp_compiler() is None:
        console.print("Inductor needs a C++ compiler on CPU: install g++ (Debian, Ubuntu: apt-get install g++).")
        return 1
    given = {"steps": steps, "device": device, "layers": layers, "hidden": hidden}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    results: dict[str, dict[str, Any]] = {}
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        for name in VARIANTS:
            task = progress.add_task(name, total=steps, note="")
            results[name] = _in_a_process(name, options, progress, task)
    ours, base = results["fx_fusion"], results["inductor"]
    console.print(f"\nLlamaForCausalLM, unmodified: {ours['shape']}, forward + backward + AdamW\n", soft_wrap=True)
    print(ours["table"])
    rows = [
        (
            name, f"{r['step_s'] * 1e3:.0f}", f"{base['step_s'] / r['step_s']:.2f}", f"{r['peak'] / 2**20:.0f}",
            f"{r['peak'] / base['peak']:.2f}", f"{r['first_s']:.1f}", f"{r['losses'][0]:.5f}", f"{r['losses'][-1]:.5f}",
        )
        for name, r in results.items()
    ]  # fmt: skip
    headers = ("", "ms a step", "x Inductor", "peak MiB", "of its memory", "first step s", "first loss", "last loss")
    print("\n" + tabulate(rows, headers=headers))
    if device == "cpu":
        print("peak: resident memory over what the model and its optimizer need before the first step")
    agree = all(abs(a - b) <= 2e-2 * abs(a) for a, b in zip(base["losses"], ours["losses"], strict=True))
    print("losses agree" if agree else "LOSSES DIFFER")
    return 0 if agree else 1


def _in_a_process(name: str, options: list[str], progress: Progress, task: Any) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "fx_fusion", "demo", *options, "--variant", name]
    last: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            last = json.loads(line)
            if "step" in last:
                progress.update(task, completed=last["step"], note=f"loss {last['loss']:.4f}")
    if process.returncode or "losses" not in last:
        raise SystemExit(f"the {name} run failed; run `{' '.join(command)}` to see why")
    return last


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak() -> int:
    """Bytes: the high-water mark of resident memory (VmHWM)."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _forget_peak() -> None:
    """Reset the high-water mark to what is resident now; where the kernel does not allow it, the mark stays."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return
