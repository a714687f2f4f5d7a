"""The compile caches of torch, across processes: they hit when nothing of ours changed, and miss when anything did."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, torch, torch.nn.functional as F
from torch._dynamo.utils import counters
options = json.loads(sys.argv[1])
torch.manual_seed(0)
w = torch.randn(32, requires_grad=True)
h = torch.randn(50, 32, requires_grad=True)
t = torch.arange(8) % 50
def f(x, w, h):
    n = w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    return F.cross_entropy(F.linear(n, h), t)
x = torch.randn(8, 32, requires_grad=True)
torch.compile(f, backend="fx_fusion", options=options)(x, w, h).backward()
found = dict(counters["aot_autograd"]), dict(counters["inductor"])
print("RESULT", json.dumps([found[0].get("autograd_cache_hit", 0), found[0].get("autograd_cache_miss", 0),
    found[0].get("autograd_cache_bypass", 0), found[1].get("fxgraph_cache_hit", 0), w.grad.abs().sum().item()]))
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package that a test may edit, and a cache folder of its own."""
    for folder in ("fx_fusion", "patterns", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(checkout, options=None):
    import json

    environment = {
        **os.environ, "PYTHONPATH": str(checkout), "TORCHINDUCTOR_CACHE_DIR": str(checkout / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    (checkout / "script.py").write_text(SCRIPT)
    given = json.dumps({"select": "always", "strict": True, **(options or {})})
    done = subprocess.run(
        [sys.executable, str(checkout / "script.py"), given],
        capture_output=True,
        text=True,
        env=environment,
        cwd=checkout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    hit, miss, bypass, fx_hit, gradient = json.loads(line[7:])
    return {"hit": hit, "miss": miss, "bypass": bypass, "fx_hit": fx_hit, "gradient": gradient}


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_second_process_hits(checkout):
    cold = run(checkout)
    assert cold["bypass"] == 0, "every node of the rewritten graph is cacheable"
    assert cold["miss"] == 1
    warm = run(checkout)
    assert (warm["hit"], warm["miss"]) == (1, 0)
    assert warm["gradient"] == cold["gradient"]


@pytest.mark.slow
def test_misses(checkout):
    cold = run(checkout)
    assert run(checkout, {"fusions": ["-rms_norm", "-add_rms_norm"]})["hit"] == 0, "another option"

    edit(
        checkout / "kernels" / "linear_cross_entropy.py",
        "torch.where(factors == 0, 0.0, dloss.float() * factors)",
        "torch.where(factors == 0, 0.0, 2 * dloss.float() * factors)",
    )
    doubled = run(checkout)
    assert doubled["hit"] == 0, "another backward formula"
    assert doubled["gradient"] == pytest.approx(2 * cold["gradient"], rel=1e-5)

    edit(checkout / "kernels" / "norms" / "row_norm.py", "_WHOLE_ROW = 16384", "_WHOLE_ROW = 8192")
    assert run(checkout)["hit"] == 0, "another kernel"
    edit(checkout / "patterns" / "rms_norm.py", "# round_first: the", "# round_first: The")
    assert run(checkout)["hit"] == 0, "another pattern"
    edit(checkout / "fx_fusion" / "__init__.py", '__version__ = "', '__version__ = "9.')
    assert run(checkout)["hit"] == 0, "another version"
    assert run(checkout)["hit"] == 1


PRECOMPILED = """
import os, sys, torch, torch.nn as nn, torch.nn.functional as F, fx_fusion
from torch._dynamo.utils import counters
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
    def forward(self, ids, padding):
        n = ids.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None] & padding[:, None, None, :].bool()
        q = (x := self.table(ids)).view(*ids.shape, 2, 16).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 50), ids.view(-1)), logits
torch.manual_seed(0)
model, ids = Model(), torch.randint(0, 50, (2, 8))
ones = torch.ones(2, 8, dtype=torch.long)
padded = ones.clone()
padded[0, :4] = 0
compiled = torch.compile(model, backend=sys.argv[1])
for padding in (ones, padded) if sys.argv[2] == "read" else (ones,):
    found, expected = compiled(ids, padding), model(ids, padding)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1] + 0, expected[1])
if sys.argv[2] == "write":
    compiled(ids, ones)[0].backward()
    torch.compiler.save_cache_artifacts()
"""


ORDERS = ["fx_fusion read", "fx_fusion write, fx_fusion read"]


@pytest.mark.parametrize("order", [*ORDERS, pytest.param("fx_fusion write, inductor read", marks=pytest.mark.slow)])
def test_dynamos_own_cache_keeps_nothing_of_ours(order, tmp_path):
    """``caching_precompile``: another process calls what AOTAutograd compiled in place of the backend. Padding and what reads
    deferred logits are around that."""
    (tmp_path / "script.py").write_text(PRECOMPILED)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TORCH_CACHING_PRECOMPILE": "1", "FX_FUSION_SELECT": "always",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    for arguments in order.split(", "):
        command = [sys.executable, str(tmp_path / "script.py"), *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


def test_a_backward_that_runs_twice_is_not_one_that_overwrites_its_arguments():
    """Where AOTAutograd's cache has nothing, Inductor's key does not tell them apart."""

    def f(x, w):
        z = (F.layer_norm(x, (64,)) @ w).exp().sin().exp()
        return (z * z.sum(-1, keepdim=True).sigmoid() @ w).tanh().sum()

    x, w = torch.randn(32, 64, requires_grad=True), (torch.randn(64, 64) / 32).requires_grad_()
    expected = torch.autograd.grad(f(x, w), (x, w))

    def gradients(times):
        torch._dynamo.reset()
        out = torch.compile(f, backend="fx_fusion", options={"strict": True})(x, w)
        return [torch.autograd.grad(out, (x, w), retain_graph=times > 1) for _ in range(times)]

    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=False):
        for found in (*gradients(1), *gradients(2)):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        counters.clear()
        gradients(2)
        assert counters["inductor"]["fxgraph_cache_hit"] == 2
