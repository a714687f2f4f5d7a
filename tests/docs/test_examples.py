"""The examples run as their page says, on this machine, and what they show is fused."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "README.md"
COMMANDS = re.findall(r"^\| `((?:python|torchrun|accelerate launch) [^`]+)` \|", PAGE.read_text(), re.M) if PAGE.exists() else []
SHOWN = {
    "train.py": ("linear_cross_entropy", r"not assumed, as it did not hold in the first call: \w+ is all ones; held in 0 of 4 calls"),
    "trainer.py": ("linear_cross_entropy", r"the page: out/fx_fusion.html"),
    "sft.py": ("repeat_kv", r"calls of trl are part of it"),
    "dpo.py": ("repeat_kv", r"calls of trl are part of it"),
    "grpo.py": ("causal_mask repeat_kv", r"calls of trl are part of it"),
    "qlora.py": ("linear_cross_entropy repeat_kv", r"Linear4bit of \d+ MiB"),
    "lora.py": ("linear_cross_entropy", r"trainable params: 6,656"),
    "lightning_module.py": ("linear_cross_entropy", r"graph 0: not assumed, as it did not hold in the first call"),
    "distributed.py": ("linear_cross_entropy", r"loss \d+\.\d+"),
    "images.py": ("evonorm_s0", r"loss \d+\.\d+"),
    "diffusion.py": ("group_norm_swish", r"loss \d+\.\d+"),
    "accelerated.py": ("linear_cross_entropy", r"loss \d+\.\d+"),
}
LOSSES = {"dpo.py": 4, "grpo.py": 4, "qlora.py": 4}  # printed, one a step
STARTS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "accelerate launch": ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"],
}
NEEDS = {"lora.py": "peft", "trainer.py": "accelerate", "lightning_module.py": "lightning", "images.py": "torch",
         "diffusion.py": "diffusers", "accelerated.py": "accelerate", "sft.py": "trl", "dpo.py": "trl", "grpo.py": "trl",
         "qlora.py": "bitsandbytes"}  # fmt: skip


def run(command, folder):
    program = next(name for name in STARTS if command.startswith(name))
    arguments = command.removeprefix(program).replace("examples/", f"{ROOT}/examples/").split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *STARTS[program], *arguments], capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def named(command):
    return next(name for name in SHOWN if f"/{name}" in command)


def checked(command, folder):
    pytest.importorskip(NEEDS.get(named(command), "transformers"))
    fusions, line = SHOWN[named(command)]
    shown = run(command, folder)
    for fusion in fusions.split():
        assert re.search(rf"^fused +{fusion} ", shown, re.M), shown
    assert re.search(line, shown), shown
    losses = [float(loss) for loss in re.findall(r"(?:^loss |'loss': ')([^\s',]+)", shown, re.M)]
    assert len(losses) >= LOSSES.get(named(command), 0), shown
    assert all(map(math.isfinite, losses)), losses


def test_every_example_is_on_the_page():
    assert {named(command) for command in COMMANDS} == set(SHOWN)
    assert {f.name for f in (ROOT / "examples").glob("*.py")} == {*SHOWN, "small.py"}


def test_what_examples_need_is_installed_for_the_tests():
    extra = re.search(r"^test = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[1]
    assert set(NEEDS.values()) - {"torch"} <= set(re.findall(r'"([\w-]+)', extra))


@pytest.mark.slow
def test_the_training_loop(tmp_path):
    checked("python examples/train.py --steps 4", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" not in c])
def test_examples(command, tmp_path):
    checked(command, tmp_path)


@pytest.mark.slow
def test_fsdp2(tmp_path):
    checked("torchrun --nproc-per-node 2 examples/distributed.py fsdp2", tmp_path)


@pytest.mark.slow
def test_what_lightning_logs(tmp_path):
    """In the rows of its own loggers, and as a page in its folder."""
    pytest.importorskip("lightning")
    script = (ROOT / "examples" / "lightning_module.py").read_text()
    assert "logger=False" in script
    logged = script.replace("logger=False", 'logger=lightning.pytorch.loggers.CSVLogger("out")')
    (tmp_path / "logged.py").write_text(f'import sys\nsys.path.insert(0, "{ROOT}/examples")\n{logged}')
    run(f"python {tmp_path}/logged.py", tmp_path)
    header, *rows = next((tmp_path / "out").rglob("metrics.csv")).read_text().splitlines()
    last = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert float(last["fx_fusion/fused"]) >= 3
    assert float(last["fx_fusion/logits_read"]) == 0
    assert float(last["loss"]) > 0
    assert "linear_cross_entropy" in (tmp_path / "out" / "fx_fusion.html").read_text()
