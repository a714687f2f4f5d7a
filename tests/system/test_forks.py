"""Processes that are forked from one that has compiled: children run the compiled model, and compile another.

With one thread: Inductor, also without fx_fusion, waits for ever for the threads that compile C++, which a fork leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
START = """
import os, signal, torch, fx_fusion
torch.set_num_threads(1)  # OpenMP's threads do not live in a forked child
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, use_cache=False)
model = LlamaForCausalLM(config)
run = torch.compile(model, backend="fx_fusion", options={"select": "always", "strict": True})
full = torch.ones(2, 16, dtype=torch.long)
padded = full.clone()
padded[0, 10:] = 0

def batch(n, mask=full):
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(n))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}

def check(n, mask=full):
    ours, theirs = run(**batch(n, mask)), model(**batch(n, mask))
    torch.testing.assert_close(ours.loss, theirs.loss)
    grads = [torch.autograd.grad(out.loss, list(model.parameters())) for out in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.logits + 0, theirs.logits, rtol=1e-4, atol=1e-5)

with fx_fusion.recording() as report:
    check(0)
report.assert_fused(linear_cross_entropy=1, rms_norm=1, add_rms_norm=2)
"""
FORK = """
waiting = run(**batch(1))  # its logits are read in the child, and here
children = []
for n in range(2):
    pid = os.fork()
    if pid == 0:
        signal.alarm(900)  # a child that waits for ever is killed, and fails
        try:
            check(2 + n)
            check(4 + n, padded)  # another version, compiled in the child
            torch.testing.assert_close(waiting.logits + 0, model(**batch(1)).logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(torch.compile(torch.nn.RMSNorm(8), backend="fx_fusion")(full[:, :8].float()), full[:, :8].float())
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(pid)
check(6, padded)
torch.testing.assert_close(waiting.logits + 0, model(**batch(1)).logits, rtol=1e-4, atol=1e-5)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
print("RIGHT")
"""
WORKERS = """
class Scored(torch.utils.data.Dataset):
    \"\"\"Rows with the loss that the compiled model gives them, computed in the worker.\"\"\"

    def __len__(self):
        return 8

    def __getitem__(self, n):
        with torch.no_grad():
            out = run(**batch(n))
            return n, out.loss, out.logits + 0

loader = torch.utils.data.DataLoader(Scored(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=900)
seen = 0
for numbers, losses, logits in loader:
    for n, loss, made in zip(numbers.tolist(), losses, logits):
        expected = model(**batch(n))
        torch.testing.assert_close(loss, expected.loss.detach())
        torch.testing.assert_close(made, expected.logits.detach(), rtol=1e-4, atol=1e-5)
        seen += 1
    check(10 + seen)  # and training goes on beside them
assert seen == 8
print("RIGHT")
"""


CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="autograd of a build for CUDA refuses a child's backward")


@pytest.mark.slow
@pytest.mark.parametrize("body", [pytest.param(FORK, id="fork", marks=CUDA), pytest.param(WORKERS, id="workers")])
def test_children(body, tmp_path):
    (tmp_path / "script.py").write_text(START + body)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RIGHT" in done.stdout
