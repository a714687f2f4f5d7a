"""Caches that are damaged, and that several processes fill at once: compiled anew, with the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, torch, torch.nn.functional as F
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)
w, h = torch.randn(32, requires_grad=True), torch.randn(64, 32, requires_grad=True)
x, t = torch.randn(8, 32), torch.arange(8)
def loss(x, w, h):
    return F.cross_entropy(F.linear(F.rms_norm(x, (32,), w), h), t)
import fx_fusion
with fx_fusion.recording() as report:
    found = torch.compile(loss, backend="fx_fusion", options={"select": "always", "strict": True})(x, w, h)
report.assert_fused(linear_cross_entropy=1, rms_norm=1)
expected = loss(x, w, h)
torch.testing.assert_close(found, expected)
for ours, theirs in zip(*(torch.autograd.grad(y, (w, h)) for y in (found, expected))):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
print("RESULT", json.dumps(counters["aot_autograd"].get("autograd_cache_hit", 0)))
"""


def start(folder):
    (folder / "script.py").write_text(SCRIPT)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }  # fmt: skip
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)


def hits(process):
    out, error = process.communicate()
    assert process.returncode == 0, error[-3000:]
    return json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "half", "noise"])
def test_damaged_files_of_the_compile_cache(damage, tmp_path):
    """What torch keeps of a graph, AOTAutograd's entry and Inductor's: the run after it hits again, or compiles again."""
    assert hits(start(tmp_path)) == 0
    entries = [f for name in ("aotautograd", "fxgraph") for f in (tmp_path / "cache" / name).rglob("*") if f.is_file()]
    assert len(entries) >= 2
    for file in entries:
        whole = file.read_bytes()
        file.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "noise": os.urandom(len(whole))}[damage])
    assert hits(start(tmp_path)) == 0


@pytest.mark.slow
def test_processes_that_fill_one_cache(tmp_path):
    for process in [start(tmp_path) for _ in range(3)]:
        hits(process)
    assert hits(start(tmp_path)) == 1
