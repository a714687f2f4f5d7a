"""``python -m tests.fuzz --seeds 0-500 --rest aot_eager``: prints each failing program as a script of its own.

What was found so far: tests/fuzz/RESULTS.md."""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from tests.fuzz import fuzzed
from tests.fuzz.judge import RESTS, judge
from tests.fuzz.program import script


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0-100", help="from-to, or several seeds with commas")
    parser.add_argument("--rest", choices=list(RESTS), default="eager", help="what runs the rewritten graph")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no program after so many")
    parser.add_argument("--graphs", action="store_true", help="more graphs than without the rewrite are a failure too")
    parser.add_argument("--brief", action="store_true", help="one line a failure, no scripts")
    parser.add_argument("--show", action="store_true", help="print the programs instead of running them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first, _, last = given.seeds.partition("-")
    seeds = range(int(first), int(last)) if last else [int(s) for s in first.split(",")]
    fused, judged, families, mutations = Counter(), Counter(), Counter(), Counter()
    failed, blind, started = [], 0, time.time()
    for seed in seeds:
        if time.time() - started > given.seconds:
            print(f"stopped before seed {seed}")
            break
        program = fuzzed(seed)
        if given.show:
            print(script(program, given.rest))
            continue
        verdict = judge(program, given.rest, given.graphs)
        fused.update(verdict.fused)
        judged["programs"] += 1
        judged["judged"] += verdict.judged > 0
        judged["calls"] += verdict.judged
        families[program.family] += sum(verdict.fused.values())
        mutations.update(program.mutations)
        blind += verdict.blind
        if verdict.failure:
            failed.append(seed)
            print(
                f"FAILED {seed} {program.family} {program.dtype} {program.mutations}: {verdict.failure.splitlines()[0]}",
                flush=True,
            )
            if not given.brief:
                print(script(program, given.rest), verdict.report, "\n", sep="\n", flush=True)
    print(f"{dict(judged)}, {blind} numbers by a tolerance only, {time.time() - started:.0f} s")
    print("fused:", dict(fused.most_common()))
    print("fused by family:", dict(families.most_common()))
    print("mutations:", dict(mutations.most_common()))
    print(f"{len(failed)} failed: {','.join(map(str, failed))}")


if __name__ == "__main__":
    main()
