"""Kernels through Triton's compiler for an H200, down to machine code; it needs no GPU. One process compiles all."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.compile_h200 import FUSIONS, PAIRS, PLANS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiles without running")
ROOT = Path(__file__).parents[2]


@functools.cache
def compiled(kind):
    """Return what was compiled, by group of launches: kernels and the narrow accesses of each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_h200", kind], cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["group"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [f.name for f in FUSIONS])
def test_the_kernels_of_a_fusion(name):
    """Those that its cases launch, forward and backward."""
    row = compiled("fusions")[name]
    assert row["error"] is None, row["error"]
    assert row["kernels"], "nothing was launched"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_kernels_of_other_plans(name):
    """Sizes that choose other tiles, other numbers of stages, other ways."""
    row = compiled("plans")[name]
    assert row["error"] is None, row["error"]
    assert row["kernels"], "nothing was launched"


@pytest.mark.parametrize("name", PAIRS)
def test_sizes_that_8_divides_are_read_as_wide_as_those_of_16(name):
    """16 bytes at once: a vocabulary of Whisper or Mamba, anything of pad_to_multiple_of=8."""
    eights, sixteens = (compiled("pairs")[f"{name} {size}"] for size in PAIRS[name][1:])
    assert eights["error"] is None, eights["error"]
    assert eights["kernels"]
    assert eights["kernels"] == sixteens["kernels"]
