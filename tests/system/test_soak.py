"""A short soak: nothing is compiled, and nothing grows, behind the first steps. ``make soak`` is the long one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_hundred_and_fifty_steps(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.soak", "--steps", "150"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Python objects of" in done.stdout


@pytest.mark.parametrize(("changed", "said"), [
    ({"compiled": 9}, "compiled again: 8 -> 9"), ({"resident": 104 << 20}, "memory grew by 4.0%"), ({"objects": 1600}, "600 more Python objects"),
])  # fmt: skip
def test_what_it_finds(changed, said):
    """A process that grew fails it: what it looks at is what it says."""
    from tests.soak import flat

    before = {"compiled": 8, "resident": 100 << 20, "objects": 1000}
    flat(before, before, before)
    with pytest.raises(AssertionError, match=said):
        flat(before, before, {**before, **changed})
