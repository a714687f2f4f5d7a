"""The documents on adding a fusion: their code works, and their mistakes give the sentences that they quote."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text() for name in ("add_a_fusion.md", "write_a_kernel.md")}
FILES = {file: code for page in PAGES.values() for file, code in re.findall(r"^```python (\S+)\n(.*?)^```$", page, re.S | re.M)}
PATTERN, KERNEL, TEST = "patterns/dyt.py", "kernels/dyt.py", "tests/fusions/test_dyt.py"
NO_BIAS = ("    kernel=dyt,", '    variants=({}, {"bias": None}),\n    kernel=dyt,')

# The sentence of a mistake: the file, and what is written there instead.
WHEN_IMPORTED = {
    "the dims '..., n' can't be read: '...,' is no dim. Write names between spaces:": (PATTERN, ('"weight": "n"', '"weight": "..., n"')),
    "tanh_scaled calls asinh, which graph/signatures.py does not list: it would match nothing.": (PATTERN, ("torch.tanh", "torch.asinh")),
    "tanh_scaled can't be traced with {}: symbolically traced variables cannot be used as inputs to control flow": (
        PATTERN, ("    return weight *", "    if alpha > 0:\n        pass\n    return weight *"),
    ),
    "its kernel takes (x, a, weight, bias), the fusion declares (x, alpha, weight, bias).": (
        KERNEL, ("Tensor alpha,", "Tensor a,"), ('"alpha", "weight", "bias")', '"a", "weight", "bias")'),
    ),
    "guard(x, a, weight, bias) does not take the declared inputs and statics (x, alpha, weight, bias).": (
        PATTERN, ("def guard(x, alpha,", "def guard(x, a,"),
    ),
    "dyt.py declares the fusion 'dynamic_tanh'; both must have one name.": (PATTERN, ('name="dyt"', 'name="dynamic_tanh"')),
    "a variant has no bias; declare it in the kernel's schema as": (PATTERN, NO_BIAS),
    "the backward of dyt doesn't take ['bias'], so its reference can't be differentiated on CPU": (
        KERNEL, ("{INPUTS}, bool[] needs", "Tensor x, Tensor alpha, Tensor weight, bool[] needs"),
    ),
    "grads of dyt names alhpa; it names inputs of the forward (x, alpha, weight, bias)": (KERNEL, ('"alpha", "weight", "bias")', '"alhpa", "weight", "bias")')),
    "case 'one_element' has no size of k.": (PATTERN, ('"weight": "n"', '"weight": "k"')),
}  # fmt: skip
IN_THE_REPORT = {
    "alpha has shape (1,); its n must be 24": (PATTERN, ('"alpha": "1"', '"alpha": "n"')),
    "why_keep returned True. It returns a sentence that says why not, or None": (
        PATTERN, ("return too_small(x)", "return True"),
    ),
    "the op's result is torch.float64 where the graph has torch.float32": (KERNEL, ("dtype=dtype, device=x.device", "dtype=torch.float64, device=x.device")),
}  # fmt: skip
IN_A_TEST = {
    "kernel: dx uses 3111734.76 times the allowed error": (KERNEL, ("(du * alpha).to(", "du.to(")),
    """InterpreterError: NameError("name 'nn' is not defined")""": (KERNEL, ("n + cols, cols < n, 0.0", "n + cols, cols < nn, 0.0")),
}
IMPORT = "from fx_fusion.fusion.registry import all_fusions; all_fusions()"
COMPILE = """
import torch, fx_fusion
from fx_fusion.testing import rewriting_backend
tensors = torch.randn(2, 5, 24), torch.ones(1), torch.randn(24), torch.randn(24)
with fx_fusion.recording() as report:
    torch.compile(lambda x, a, w, b: w * torch.tanh(a * x) + b, backend=rewriting_backend(select="auto", strict=False))(*tensors)
print([site.reason for site in report.sites], [graph.fallback for graph in report.graphs])
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository with the files that the documents have the reader write."""
    for folder in ("fx_fusion", "patterns", "kernels", "tests", "bench"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "results", "docs"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, code in FILES.items():
        assert not (tmp_path / file).exists()
        (tmp_path / file).write_text(code)
    return tmp_path


def python(checkout, *arguments):
    """Return what a process prints in the copy, and how it ended."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def edit(checkout, file, *changes):
    for old, new in changes:
        assert old in FILES[file]
        (checkout / file).write_text((checkout / file).read_text().replace(old, new))


def test_the_documents_have_three_files():
    assert set(FILES) == {PATTERN, KERNEL, TEST}


def test_the_code_has_the_style_of_the_repository(checkout):
    ended, said = python(checkout, "-m", "ruff", "check", *FILES)
    assert ended == 0, said


def test_the_fusion_of_the_documents_works(checkout):
    ended, said = python(checkout, "-m", "pytest", "-q", "-k", "dyt", "-m", "not slow", "tests/fusions")
    assert ended == 0, said[-3000:]
    assert int(re.search(r"(\d+) passed", said)[1]) >= 8


@pytest.mark.slow
def test_everything_that_comes_by_itself(checkout):
    ended, said = python(checkout, "-m", "pytest", "-q", "-k", "dyt", "tests")
    assert ended == 0, said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("sentence", [*WHEN_IMPORTED, *IN_THE_REPORT], ids=itertools.count())  # no name for the reader's -k
def test_a_mistake_gives_the_sentence_of_the_document(checkout, sentence):
    assert sentence in PAGES["add_a_fusion.md"]
    edit(checkout, *{**WHEN_IMPORTED, **IN_THE_REPORT}[sentence])
    if sentence in IN_THE_REPORT:
        edit(checkout, PATTERN, ("    kernel=dyt,", "    kernel=dyt,\n    on_cpu=True,"))  # or select="auto" asks no further
    _, said = python(checkout, "-W", "ignore", "-c", IMPORT if sentence in WHEN_IMPORTED else COMPILE)
    assert sentence in said.replace("\\'", "'")


@pytest.mark.slow
@pytest.mark.parametrize("sentence", IN_A_TEST, ids=itertools.count())
def test_a_broken_kernel_fails_as_in_the_document(checkout, sentence):
    assert sentence in PAGES["add_a_fusion.md"]
    edit(checkout, *IN_A_TEST[sentence])
    _, said = python(checkout, "-m", "pytest", "-q", "-k", "dyt-odd-0-float32", "tests/fusions/test_every_fusion.py")
    assert re.sub(r"[\d.]+ times", "times", sentence) in re.sub(r"[\d.]+ times", "times", said)
