"""Fusions x cases x {eager, Inductor, fx_fusion} x {forward, forward + backward}: milliseconds and share of the bandwidth.

    python -m bench.run [--fusion NAME] [--out bench/results/ops.jsonl]

Names no fusion: functions, inputs and sizes come from the declarations. The fewest bytes are computed (each input read
once, each output written once; gradients likewise), and ``share`` is their time at the copy rate measured in the same run.
A case whose fused function fails the accuracy rule is not timed.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import Progress
from tabulate import tabulate
from triton.testing import do_bench

from bench.models import environment
from fx_fusion.fusion import Case, Fusion
from fx_fusion.pattern import patterns_of
from fx_fusion.registry import all_fusions
from fx_fusion.testing import make_inputs, run, run_oracle, worst_excess

PROVIDERS: dict[str, Callable] = {
    "eager": lambda f: f,
    "inductor": lambda f: torch.compile(f, fullgraph=True),
    "fx_fusion": lambda f: torch.compile(
        f, fullgraph=True, backend="fx_fusion", options={"select": "always", "strict": True}
    ),
}


def copy_rate() -> float:
    """Bytes a second (read and written) of a large device-to-device copy."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    ms = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() * 4 / ms * 1e3


def measure(fusion: Fusion, case: Case, dtype: torch.dtype, rate: float) -> list[dict]:
    """The rows of one case; one row with ``error`` if the fused function is wrong."""
    torch._dynamo.reset()
    statics = {**fusion.variants[0], **case.statics}
    function = (
        fusion.pattern
        if fusion.find
        else next(p.function for p in patterns_of(fusion) if p.statics.items() <= statics.items())
    )
    function = functools.partial(function, **statics)
    inputs = make_inputs(fusion, case, statics, dtype, "cuda")
    frozen = ("cos", "sin")
    small = Case(
        case.name, {d: min(n, 512) if d in ("m", "b", "v") else n for d, n in case.sizes.items()}, statics=case.statics
    )
    if (wrong := _inaccuracy(fusion, function, small, statics, dtype, frozen)) > 1:
        return [{"fusion": fusion.name, "case": case.name, "error": f"uses {wrong:.1f} times the allowed error"}]
    rows = []
    for name, wrap in PROVIDERS.items():
        torch._dynamo.reset()
        leaves = {
            k: v.clone().requires_grad_(k not in frozen) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in inputs.items()
        }
        wrapped = wrap(function)
        out = wrapped(**leaves)
        outs = out if isinstance(out, tuple) else (out,)
        upstream = [torch.randn_like(o) for o in outs]
        differentiable = [v for v in leaves.values() if isinstance(v, torch.Tensor) and v.requires_grad]

        def both(wrapped=wrapped, leaves=leaves, upstream=upstream, differentiable=differentiable):
            made = wrapped(**leaves)
            torch.autograd.grad(made if isinstance(made, tuple) else (made,), differentiable, upstream)

        def forward(wrapped=wrapped, leaves=leaves):
            with torch.no_grad():
                wrapped(**leaves)

        nbytes = sum(t.numel() * t.element_size() for t in (*leaves.values(), *outs) if isinstance(t, torch.Tensor))
        gradients = sum(t.numel() * t.element_size() for t in (*differentiable, *outs))
        for mode, call, least in (("forward", forward, nbytes), ("forward+backward", both, 2 * nbytes + gradients)):
            call()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            peak = torch.cuda.max_memory_allocated() - before
            ms = do_bench(call, return_mode="median")
            rows.append({
                "fusion": fusion.name, "case": case.name, "sizes": dict(case.sizes), "dtype": str(dtype)[6:], "mode": mode,
                "provider": name, "ms": round(ms, 4), "share": round(least / rate / ms * 1e3, 3),
                "peak_mib": round(peak / 2**20),
            })  # fmt: skip
    return rows


def _inaccuracy(fusion: Fusion, function: Callable, case: Case, statics: dict, dtype: torch.dtype, frozen: tuple) -> float:
    inputs = make_inputs(fusion, case, statics, dtype, "cuda")
    fused = run(PROVIDERS["fx_fusion"](function), inputs, frozen=frozen)
    return worst_excess(fused, run(function, inputs, frozen=frozen), run_oracle(function, inputs, frozen=frozen), dtype)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fusion", help="only this one")
    parser.add_argument("--out", default="bench/results/ops.jsonl")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.run times kernels on a GPU: there is no CUDA device here.")
    rate = copy_rate()
    work = [(f, c) for f in all_fusions() if given.fusion in (None, f.name) for c in f.cases if c.bench]
    rows: list[dict] = []
    with Progress() as progress:
        for fusion, case in progress.track(work, description="measuring"):
            rows += measure(fusion, case, torch.bfloat16, rate)
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    with open(given.out, "a") as file:
        for row in rows:
            file.write(json.dumps({**row, "environment": environment()}) + "\n")
    print(f"copy rate {rate / 1e9:.0f} GB/s")
    print(
        tabulate(
            table(rows),
            headers=("fusion", "case", "mode", "eager", "inductor", "fx_fusion", "x Inductor", "share", "peak MiB"),
        )
    )


def table(rows: list[dict]) -> list[tuple]:
    """One line a case and mode, milliseconds by provider."""
    lines = []
    for key in dict.fromkeys((r["fusion"], r["case"], r.get("mode")) for r in rows):
        found = {r.get("provider"): r for r in rows if (r["fusion"], r["case"], r.get("mode")) == key}
        if "fx_fusion" not in found:
            lines.append((*key[:2], next(iter(found.values()))["error"]))
            continue
        ours, base = found["fx_fusion"], found["inductor"]
        lines.append((
            *key, found["eager"]["ms"], base["ms"], ours["ms"], f"{base['ms'] / ours['ms']:.2f}", ours["share"],
            f"{base['peak_mib']} -> {ours['peak_mib']}",
        ))  # fmt: skip
    return lines


if __name__ == "__main__":
    main()
