"""AdamW's step over half a billion parameters: ``python -m bench.optimizer``.

Eager (foreach and fused), and the foreach step compiled by Inductor and fx_fusion. First a schedule of ten learning rates,
one a step: how often the step was compiled and how long the ten steps took, compiling included; parameters after it are
compared with eager's. Then milliseconds a step (the median of calls as they are launched) at the second rate, a constant of
Inductor's step and a tensor of fx_fusion's, and the share of 7 elements an element at the copy rate. Not at the last rates:
Inductor's step is eager by then.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._dynamo.testing import CompileCounterWithBackend

import fx_fusion  # noqa: F401  registers the backend
from bench.process import environment
from fx_fusion.cost.timing import call_ms, copy_rate

SHAPES = (
    (128256, 2048),
    *[(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192), (2048,)] * 4,
)
RATES = [1e-4 * 0.9**i for i in range(10)]
VARIANTS = ("foreach", "fused", "inductor", "fx_fusion")


def parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_() for shape in SHAPES]
    for p in made:
        p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(dtype)
    return made


def measure(variant: str, dtype: torch.dtype, rate: float) -> tuple[dict[str, Any], list[torch.Tensor]]:
    torch._dynamo.reset()
    made = parameters(dtype)
    optimizer = torch.optim.AdamW(made, lr=RATES[0], weight_decay=0.1, fused=variant == "fused", foreach=variant != "fused")
    step, counter = optimizer.step, CompileCounterWithBackend(variant)
    if variant in ("inductor", "fx_fusion"):
        step = torch.compile(optimizer.step, backend=counter)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for lr in RATES:
        optimizer.param_groups[0]["lr"] = lr
        step()
    torch.cuda.synchronize()
    seconds, result = time.perf_counter() - started, [p.detach().clone() for p in made]
    optimizer.param_groups[0]["lr"] = RATES[1]
    ms = call_ms(step)
    moved = 7 * sum(p.numel() * p.element_size() for p in made)
    row = {
        "variant": variant, "dtype": str(dtype)[6:], "parameters": sum(p.numel() for p in made), "ms": round(ms, 3),
        "share": round(moved / rate / ms * 1e3, 3), "compiled": counter.frame_count,
        "schedule_s": round(seconds, 1), "environment": environment(),
    }  # fmt: skip
    return row, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="bench/results/optimizer.jsonl")
    given = parser.parse_args()
    rate, rows = copy_rate(), []
    for dtype in (torch.bfloat16, torch.float32):
        exact: list[torch.Tensor] = []
        for variant in VARIANTS:
            row, result = measure(variant, dtype, rate)
            exact = exact or result
            row["off"] = max((a - b).abs().max().item() for a, b in zip(result, exact, strict=True))
            rows.append(row)
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    with open(given.out, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    columns = ("variant", "dtype", "ms", "share", "compiled", "schedule_s", "off")
    print(tabulate([[row[c] for c in columns] for row in rows], headers=columns))


if __name__ == "__main__":
    main()
