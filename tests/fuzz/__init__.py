"""A fuzzer: random programs near the patterns, through the rewriter, judged against eager and float64.

``programs`` makes a program of a seed, ``mutations`` changes it, ``judge`` runs it, ``python -m tests.fuzz`` looks for
failures and prints each as a script of its own.
"""

from __future__ import annotations

import random

from tests.fuzz.mutations import mutated
from tests.fuzz.program import Program
from tests.fuzz.programs import program_of


def fuzzed(seed: int) -> Program:
    """The program of a seed, always the same one."""
    return mutated(program_of(seed), random.Random(f"mutations {seed}"))
