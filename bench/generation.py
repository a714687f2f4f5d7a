"""Generation with a static cache, each variant in a process of its own: ``python -m bench.generation llama-1b``.

``model.generate`` of transformers as it is, greedy, bfloat16, random weights; transformers compiles the forward with the
backend that ``compile_config`` names. A row: milliseconds a new token (the difference between long and short generations,
so that the prompt and what a call costs once drop out), seconds to the first generation. That the tokens are right is
tested elsewhere, in float32: random weights in bfloat16 are full of ties.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from tabulate import tabulate

from bench.families import FAMILIES
from bench.process import environment, give, measured

SHORT, LONG = 16, 144  # new tokens


def measure(given: argparse.Namespace, variant: str, mode: str) -> dict:
    import torch
    from transformers import CompileConfig

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model, inputs, _ = FAMILIES[given.family].build(given.batch, given.prompt)
    torch.set_default_dtype(torch.float32)
    model.eval()
    ids = inputs(0)["input_ids"]
    mask = torch.ones_like(ids)
    about = {"do_sample": False, "eos_token_id": None, "use_cache": True, "cache_implementation": "static"}
    chosen = {"disable_compile": True}
    if variant != "eager":
        named = None if mode == "default" else mode
        chosen = {"compile_config": CompileConfig(backend=variant, mode=named, fullgraph=False)}

    def seconds(new: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, **about, **chosen)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    first = seconds(LONG)
    seconds(SHORT), seconds(LONG), seconds(SHORT)
    per_token = [(seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) for _ in range(given.rounds)]
    return {
        "model": given.family, "variant": variant, "mode": mode, "batch": given.batch, "prompt": given.prompt,
        "ms_a_token": round(statistics.median(per_token) * 1e3, 3), "first_s": round(first, 1),
        "environment": environment(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default="eager,inductor,fx_fusion")
    parser.add_argument("--modes", default="default,reduce-overhead")
    parser.add_argument("--out", default="bench/results/generation.jsonl")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one variant")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        give(measure(given, given.variants, given.modes))
        return
    table = []
    for variant in given.variants.split(","):
        for mode in given.modes.split(",") if variant != "eager" else ["default"]:
            command = ["bench.generation", given.family, "--inside", "--variants", variant, "--modes", mode]
            command += [f"--{name}={getattr(given, name)}" for name in ("batch", "prompt", "rounds")]
            row = measured(command, given.timeout)
            table.append((variant, mode, *(row.get(n, row.get("error")) for n in ("ms_a_token", "first_s"))))
            if "error" not in row:
                with Path(given.out).open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(given.family, "batch", given.batch, "prompt", given.prompt)
    print(tabulate(table, headers=("variant", "mode", "ms a token", "first s")))


if __name__ == "__main__":
    main()
