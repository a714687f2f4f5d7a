"""The benchmarks that several processes run, on CPUs: whether they end, with a row of each variant. No figures."""

import re
import subprocess
import sys

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.slow
on_ranks = pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo")


def output_of(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@on_ranks
@pytest.mark.parametrize("mode", ["fsdp2", "experts"])
def test_distributed(mode, tmp_path):
    """Both variants train alike, and the profiles say where the time goes."""
    said = output_of("bench.distributed", mode, "--tiny", "--profile", str(tmp_path))
    row = said.splitlines()[-1].split()
    assert row[:2] == [mode, "2"], said
    assert float(row[4]) > 0, said
    assert float(row[-1]) < 1e-3, said
    for variant in ("inductor", "fx_fusion"):
        assert "Self CPU time total" in (tmp_path / f"{mode}_{variant}.txt").read_text()


@on_ranks
def test_the_loss_over_ranks():
    started = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "bench.loss_over_ranks", "--tiny")
    said = output_of(*started)
    assert re.search(r'"ranks": 2, "ms": \{"alone": [\d.]+, "over_ranks": [\d.]+\}', said), said


def test_fine_tuning():
    """Both trainers train alike."""
    pytest.importorskip("trl")
    said = output_of("bench.sft", "trl-fx_fusion", "trainer-fx_fusion", "--tiny")
    rows = [line.split(maxsplit=4) for line in said.splitlines()[2:]]
    assert [row[0] for row in rows] == ["trl-fx_fusion", "trainer-fx_fusion"], said
    assert rows[0][3] == rows[1][3], "the loss"
    assert all("causal_mask" in row[4] for row in rows), said
