"""Fusions that other packages bring: found, used, checked, reported, part of the compile caches' keys, and never in the way."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plugins.md"  # not there in the copy that tests/docs makes
FILES = dict(re.findall(r"^```(?:python|toml) (\S+)\n(.*?)^```$", PAGE.read_text() if PAGE.exists() else "", re.S | re.M))
USE = """
import torch, fx_fusion
from fx_fusion.testing import rewriting_backend
tensors = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
def layer(g, u):
    return u * torch.relu(g) ** 2
def compiled(**options):
    torch.compiler.reset()
    with fx_fusion.recording() as report:
        y = torch.compile(layer, backend=rewriting_backend(**options))(*tensors)
    torch.testing.assert_close(y, layer(*tensors))
    return report
"""


@pytest.fixture
def package(tmp_path):
    """The files of docs/plugins.md, and what pip writes for an installed package beside them."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def install(package, entry="relu2_glu = my_fusions.relu2_glu:FUSION"):
    """What ``pip install`` leaves of the package's entry points."""
    info = package / "my_fusions-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-fusions\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[fx_fusion.fusions]\n{entry}\n")


def python(package, code, **environment):
    """Return what a process prints that can import the package, and how it ended."""
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    script = package / "script.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=package, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_entry_point_of_the_document_is_the_one_that_is_tested():
    assert 'relu2_glu = "my_fusions.relu2_glu:FUSION"' in FILES["pyproject.toml"]
    assert '[project.entry-points."fx_fusion.fusions"]' in FILES["pyproject.toml"]


def test_an_installed_plug_in_is_used_without_a_line_of_the_user(package):
    install(package)
    ended, said = python(package, USE + """
compiled().assert_fused(relu2_glu=1)
assert not compiled(fusions=["-relu2_glu"]).count("relu2_glu")
from fx_fusion.doctor import facts
assert any("relu2_glu (my_fusions.relu2_glu)" in fact.says for fact in facts()), [f.says for f in facts()]
print("DONE")
""")  # fmt: skip
    assert ended == 0, said
    assert "DONE" in said


@pytest.mark.slow
def test_check_passes_with_kernels_and_finds_a_wrong_one(package):
    ended, said = python(package, FILES["test_relu2_glu.py"] + "\ntest_relu2_glu()\nprint('DONE')", TRITON_INTERPRET="1")
    assert ended == 0, said
    assert "kernels ran" in said
    assert "DONE" in said
    file = package / "my_fusions" / "relu2_glu.py"
    assert "2.0 * dy" in file.read_text()
    file.write_text(file.read_text().replace("2.0 * dy", "2.1 * dy"))
    ended, said = python(package, FILES["test_relu2_glu.py"] + "\ntest_relu2_glu()", TRITON_INTERPRET="1")
    assert ended != 0
    assert re.search(r"cases: odd, float32: kernel: dgate uses [\d.]+ times the allowed error", said), said[-2000:]
    assert "reference: d" not in said


@pytest.mark.slow
def test_check_without_the_interpreter_says_that_no_kernel_ran(package):
    ended, said = python(package, FILES["test_relu2_glu.py"] + "\ntest_relu2_glu()")
    assert ended == 0, said
    assert "references only: TRITON_INTERPRET=1 was not set" in said


def test_registering_twice_a_taken_name_and_no_fusion(package):
    ended, said = python(package, """
import dataclasses
from fx_fusion.fusion.registry import all_fusions, register
from my_fusions.relu2_glu import FUSION
register(FUSION)
register(FUSION)
assert [f.name for f in all_fusions()].count("relu2_glu") == 1
taken = next(f for f in all_fusions() if f.name == "rms_norm")
unknown = dataclasses.replace(FUSION, name="more", before=("relu_glu",))
for wrong in (taken, dataclasses.replace(FUSION), unknown, "relu2_glu"):
    try:
        register(wrong)
    except TypeError as error:
        print(error)
    else:
        print("nothing was raised")
assert len([f for f in all_fusions() if f.pattern.__module__ == "my_fusions.relu2_glu"]) == 1
""")  # fmt: skip
    assert ended == 0, said
    for found, expected in zip(said.splitlines(), (
        "fusion 'rms_norm' of fx_fusion.patterns.rms_norm: fx_fusion.patterns.rms_norm has one of this name.",
        "fusion 'relu2_glu' of my_fusions.relu2_glu: my_fusions.relu2_glu has one of this name.",
        "fusion 'more' is before 'relu_glu', which does not exist. Did you mean 'relu2_glu'?",
        "a plug-in gives a Fusion, or several; got 'relu2_glu'.",
    ), strict=True):  # fmt: skip
        assert found.startswith(expected)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("relu2_glu = my_fusions.nowhere:FUSION", "ModuleNotFoundError"),
        pytest.param("relu2_glu = my_fusions.relu2_glu:BLOCK", "not iterable", marks=pytest.mark.slow),
        pytest.param(
            "relu2_glu = my_fusions.relu2_glu:NAMES", "a plug-in gives a Fusion, or several; got 'rms_norm'.", marks=pytest.mark.slow
        ),
    ],
)
def test_a_broken_plug_in_is_left_out_with_a_warning(package, entry, reason):
    """Everybody else's fusions work on."""
    with open(package / "my_fusions" / "relu2_glu.py", "a") as file:
        file.write('\nNAMES = ("rms_norm",)\n')
    install(package, entry)
    ended, said = python(package, """
import torch, fx_fusion
from fx_fusion.testing import rewriting_backend
with fx_fusion.recording() as report:
    torch.compile(torch.nn.RMSNorm(8), backend=rewriting_backend())(torch.randn(4, 8))
report.assert_fused(rms_norm=1)
from fx_fusion.doctor import facts
print([fact.says for fact in facts() if fact.about == "plug-ins"])
""")  # fmt: skip
    assert ended == 0, said
    assert said.count("UserWarning: fx_fusion: plug-in relu2_glu") == 1, said
    assert reason in said


@pytest.mark.slow
def test_the_compile_caches_see_a_changed_line_of_a_plug_in(package):
    install(package)
    ask = "from fx_fusion.inductor.cache_key import source_hash\nprint(source_hash())"
    hashes = [python(package, ask)[1]]
    hashes.append(python(package, ask)[1])
    with open(package / "my_fusions" / "helpers.py", "a") as file:
        file.write("# changed\n")
    hashes.append(python(package, ask)[1])
    assert hashes[0] == hashes[1] != hashes[2], hashes


@pytest.mark.slow
def test_measuring_on_the_spot_finds_the_plug_in(package):
    """In a process of its own, from wherever the user's script imported it."""
    ended, said = python(package, USE + """
from my_fusions.relu2_glu import FUSION
fx_fusion.register(FUSION)
report = compiled(select="measure")
print(report)
""", FX_FUSION_CACHE_DIR=str(package / "cache"))  # fmt: skip
    assert ended == 0, said
    assert re.search(r"kept +relu2_glu .*measured here: [\d.]+ ms, Inductor [\d.]+ ms", said) or re.search(r"fused +relu2_glu", said), said
    assert "not measured" not in said


# What bench.run does on a GPU, on a CPU: no time is taken, and inputs are small.
MEASURE = """
import dataclasses
import torch
from bench import run
from fx_fusion.testing import make_inputs
(fusion, case, dtype), *rest = run.work(["relu2_glu"], modules={modules})
assert (fusion.name, case.name, dtype, rest) == ("relu2_glu", "llama_8b", torch.bfloat16, []), (fusion, case, dtype, rest)
assert len(run.work(["relu2_glu"], grid=True)) > 12
assert {{"relu2_glu", "rms_norm"}} <= {{fusion.name for fusion, _, _ in run.work([])}}
run.make_inputs = lambda fusion, case, statics, dtype, device: make_inputs(fusion, case, statics, dtype, "cpu")
for name in ("call_ms", "host_us", "peak_mib"):
    setattr(run.timing, name, lambda call: call() or 1.0)
run.timing.in_turns = lambda calls: [call() or 1.0 for call in calls]
case = dataclasses.replace(case, sizes={{"m": 4, "n": 96}})
rows = run.Bench(fusion, case, dtype, ["eager", "inductor", "fx_fusion"]).measure(1e12)
assert not any("error" in row for row in rows), rows
for row in rows:
    print(row["fusion"], row["mode"], row["provider"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["installed", "imported"])
def test_bench_run_measures_a_plug_in(package, how):
    if how == "installed":
        install(package)
    ended, said = python(package, MEASURE.format(modules=["my_fusions.relu2_glu"] if how == "imported" else []))
    assert ended == 0, said
    rows = re.findall(r"^relu2_glu (.*)$", said, re.M)
    assert sorted(rows) == sorted(f"{m} {p}" for m in ("forward", "forward+backward") for p in ("eager", "inductor", "fx_fusion"))


def test_an_op_is_defined_once(package):
    ended, said = python(package, """
import importlib, my_fusions.relu2_glu
importlib.reload(my_fusions.relu2_glu)
""")  # fmt: skip
    assert ended != 0
    assert "the op 'relu2_glu' is defined already and can't be replaced in this process: rename it." in said
