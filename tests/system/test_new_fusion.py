"""``python -m fx_fusion new-fusion``: what it writes works as it stands, and what it would break it refuses."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = """
import torch, torch.nn.functional as F, fx_fusion
def layer(x, gate):
    return x * F.relu(gate)
x, gate = (torch.randn(4, 40, requires_grad=True) for _ in range(2))
with fx_fusion.recording() as report:
    y = torch.compile(layer, backend="fx_fusion", options={"select": "always"})(x, gate)
report.assert_fused(my_op=1)
torch.testing.assert_close(y, layer(x, gate))
for ours, eagers in zip(torch.autograd.grad(y.sum(), (x, gate)), torch.autograd.grad(layer(x, gate).sum(), (x, gate))):
    torch.testing.assert_close(ours, eagers)
"""


def call(*command, cwd, path=ROOT, code=0, **environment):
    """Return what a process prints, which must end with this exit code."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr if code else done.stdout


def new_fusion(*arguments, cwd, **more):
    return call(sys.executable, "-m", "fx_fusion", "new-fusion", *arguments, cwd=cwd, **more)


@pytest.mark.slow
def test_a_package_of_ones_own(tmp_path):
    """The printed command checks it, the printed entry point makes it known, the backend fuses it."""
    said = new_fusion("my_op", "--into", "src/mine", cwd=tmp_path)
    assert "written: src/mine/my_op.py" in said
    path = f"{tmp_path / 'src'}{os.pathsep}{ROOT}"
    check = re.search(r"^    (TRITON_INTERPRET=1 )python( -c .*)$", said, re.M)
    checked = call("sh", "-c", f"{check[1]}{sys.executable}{check[2]}", cwd=tmp_path, path=path)
    assert "my_op on cpu: 6 cases, 2 layouts, 1 ops, 1 empty; kernels ran" in checked
    assert '    my_op = "mine.my_op:FUSION"\n' in said
    info = tmp_path / "src" / "mine-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[fx_fusion.fusions]\nmy_op = mine.my_op:FUSION\n")
    call(sys.executable, "-c", USE, cwd=tmp_path, path=path)
    call(sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "src/mine/my_op.py", cwd=tmp_path)


@pytest.mark.slow
def test_a_checkout(tmp_path):
    """The tests that a fusion gets by itself, and the linter, pass with the three files."""
    for folder in ("fx_fusion", "patterns", "kernels", "tests", "bench"):
        hidden = shutil.ignore_patterns("__pycache__", "results", "docs")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=hidden)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    said = new_fusion("my_op", cwd=tmp_path / "tests", path=tmp_path)
    written = [tmp_path / file for file in ("patterns/my_op.py", "kernels/my_op.py", "tests/fusions/test_my_op.py")]
    assert all(file.name in said and file.exists() for file in written)
    call(sys.executable, "-m", "ruff", "check", *map(str, written), cwd=tmp_path)
    test = (sys.executable, "-m", "pytest", "-q", "-k", "my_op", "-m", "not slow", "tests/fusions")
    assert int(re.search(r"(\d+) passed", call(*test, cwd=tmp_path, path=tmp_path))[1]) >= 8


@pytest.mark.slow
def test_outside_of_both(tmp_path):
    """A module here; in a folder of a package, under the package's name."""
    assert 'my_op = "my_op:FUSION"' in new_fusion("my_op", cwd=tmp_path)
    package = tmp_path / "one" / "two"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    assert 'my_op = "one.two.my_op:FUSION"' in new_fusion("my_op", cwd=package)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("rms_norm",), "a fusion 'rms_norm' exists already"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (("two words",), "'two words' can't name a fusion: files, an op and a Python name are called so"),
                (("class",), "'class' can't name a fusion"),
                (("rms_norm_bwd",), "an op 'rms_norm_bwd' exists already"),
                (("launch",), "'launch' means something else in the file of a fusion: choose another name"),
                (("my_op", "--into", "my-fusions"), "'my-fusions' can't be imported: --into takes the folder of a package"),
                (("there", "--into", "mine"), "mine/there.py would be overwritten"),
            ]
        ),
    ],
)
def test_what_is_refused(tmp_path, arguments, sentence):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "there.py").write_text("of somebody")
    said = new_fusion(*arguments, cwd=tmp_path, code=2)
    assert sentence in said
    assert said.count("\n") == 1, "one sentence, no traceback"
    assert [f for f in tmp_path.rglob("*") if f.is_file()] == [tmp_path / "mine" / "there.py"]
    assert (tmp_path / "mine" / "there.py").read_text() == "of somebody"
