"""The package as users get it: wheel, sdist, editable install, bare checkout; and nothing of ours shadows `kernels`."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fx_fusion

ROOT = Path(__file__).parents[2]
USE = "import fx_fusion.kernels.rms_norm, fx_fusion.patterns.rms_norm, fx_fusion.fusion.registry as r; print(len(r.all_fusions()))"


def python(*arguments, cwd, **environment):
    import os

    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + (done.stderr if "PYTHONWARNINGS" in environment else "")


def test_bare_checkout(tmp_path):
    assert (
        int(
            python(
                "-S",
                "-c",
                f"import sys; sys.path[:0] = [{str(ROOT)!r}, *{[p for p in sys.path if p]!r}]; {USE}",
                cwd=tmp_path,
            )
        )
        >= 10
    )


@pytest.mark.slow
def test_the_backend_needs_no_import(tmp_path):
    code = "import torch; print(torch.compile(lambda x: x + 1, backend='fx_fusion')(torch.ones(1)).item())"
    assert python("-c", code, cwd=tmp_path).strip() == "2.0"


# Hides the entry point of an installed fx_fusion, as on a machine where a checkout is only on PYTHONPATH.
NOT_INSTALLED = """
import importlib.metadata
known = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **given: (
    importlib.metadata.EntryPoints(()) if given.get("group") == "torch_dynamo_backends" else known(**given)
)
"""


@pytest.mark.parametrize(
    "imports", ["import fx_fusion, torch", "import torch._dynamo, fx_fusion"], ids=["before_dynamo", "after_dynamo"]
)
def test_backend_not_installed_is_known_after_import(tmp_path, imports):
    """`torch.compile` looks the name up at once and raises InvalidBackend for an unknown one."""
    code = f"{NOT_INSTALLED}{imports}\ntorch.compile(len, backend='fx_fusion'); fx_fusion.compile(len)\n"
    code += "print('fx_fusion' in torch.compiler.list_backends())"
    assert python("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).strip() == "True"


def test_import_when_installed_leaves_lookup_to_entry_point(tmp_path):
    """Dynamo imports the package while it looks the name up, and registers the same name afterwards."""
    code = "import torch; torch.compile(len, backend='fx_fusion'); import fx_fusion; fx_fusion.compile(len); print('fine')"
    assert python("-c", code, cwd=tmp_path).strip() == "fine"


@pytest.mark.parametrize(
    "imports",
    ["import fx_fusion, accelerate.utils", "import accelerate.utils, fx_fusion", "import fx_fusion.accelerate, accelerate.utils"],
    ids=["before_accelerate", "after_accelerate", "by_its_module"],
)
def test_accelerate_accepts_backend_after_import(tmp_path, imports):
    pytest.importorskip("accelerate")
    code = f"{imports}\nprint(accelerate.utils.TorchDynamoPlugin(backend='fx_fusion').backend.value)"
    assert python("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).strip() == "FX_FUSION"


def test_import_fx_fusion_imports_neither_torch_nor_accelerate(tmp_path):
    code = "import sys, fx_fusion; print({'torch', 'accelerate', 'importlib.metadata'} & set(sys.modules) or 'none')"
    assert python("-S", "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).strip() == "none"


@pytest.mark.parametrize("there", ["a file", "missing"])
def test_a_download_that_kept_no_links_says_so(tmp_path, there):
    """Some programs unpack a link as a file that holds where it led, and pip builds a package without what is behind it."""
    package = tmp_path / "fx_fusion"
    shutil.copytree(ROOT / "fx_fusion", package, ignore=shutil.ignore_patterns("kernels", "patterns", "__pycache__"))
    if there == "a file":
        (package / "kernels").write_text("../kernels")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import fx_fusion"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {package / 'kernels'} has to be a folder, and is {there}: "), done.stderr
    assert "ln -sfn ../kernels fx_fusion/kernels && ln -sfn ../patterns fx_fusion/patterns" in last
    for name in ("kernels", "patterns"):
        subprocess.run(["ln", "-sfn", str(ROOT / name), str(package / name)], check=True)
    assert python("-S", "-c", "import fx_fusion; print(fx_fusion.__file__)", cwd=tmp_path).startswith(str(package))


@pytest.mark.slow
def test_wheel_and_sdist(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r}); b.build_sdist({str(tmp_path)!r})"
    assert "deprecated" not in python("-c", build, cwd=source, PYTHONWARNINGS="always").lower()
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert "fx_fusion/kernels/rms_norm.py" in names
    assert "fx_fusion/patterns/rms_norm.py" in names
    assert "fx_fusion/skeleton_files/plugin.py.jinja" in names
    assert not any(n.startswith(("kernels/", "patterns/")) for n in names)
    assert (
        "[torch_dynamo_backends]"
        in zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    )
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("/METADATA"))).decode()
    assert f"\nVersion: {fx_fusion.__version__}\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata
    with tarfile.open(sdist) as packing:
        assert not any(member.issym() or member.islnk() for member in packing)
        packed = {name.split("/", 1)[1] for name in packing.getnames() if "/" in name}
    assert {"LICENSE", "CITATION.cff", "docs/report.md", "examples/train.py", "fx_fusion/patterns/rope.py"} <= packed
    assert "fx_fusion/skeleton_files/plugin.py.jinja" in packed
    assert not any(name.startswith(("tests", "bench")) for name in packed), "tests that could not run there"
    for archive in (wheel, sdist):
        target = tmp_path / archive.suffix.strip(".")
        python(
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(target),
            str(archive),
            cwd=tmp_path,
        )
        where = python("-c", f"import fx_fusion; print(fx_fusion.__file__); {USE}", cwd=tmp_path, PYTHONPATH=str(target))
        assert str(target) in where.splitlines()[0]


@pytest.mark.slow
def test_the_package_kernels_is_not_shadowed(tmp_path):
    pytest.importorskip("kernels")
    code = (
        "import kernels, fx_fusion.kernels.rms_norm, fx_fusion, transformers; from transformers.integrations import hub_kernels;"
        "print(kernels.__file__); from kernels import get_kernel"
    )
    for folder in (ROOT, tmp_path):
        assert "site-packages" in python("-c", code, cwd=folder)


def test_our_sources_are_imported_by_one_path_only():
    """A second path to a kernel file would define its ops twice."""
    for file in [
        *ROOT.glob("fx_fusion/**/*.py"),
        *ROOT.glob("kernels/**/*.py"),
        *ROOT.glob("patterns/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("bench/*.py"),
    ]:
        for line in file.read_text().splitlines():
            assert not line.startswith(("from kernels", "import kernels", "from patterns", "import patterns")), (
                file,
                line,
            )
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "patterns" / "__init__.py").exists()


def test_one_version():
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M) == [fx_fusion.__version__]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_installs_no_tests(tmp_path):
    def steps(target):
        command = ["make", "-n", f"VENV={tmp_path}/new", "TORCH=torch==2.13.0", target]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    extras = {target: re.findall(r"-e \"\.\[(\w+)\]", steps(target)) for target in ("demo", "test", "docs")}
    assert extras == {"demo": ["demo"], "test": ["demo", "test"], "docs": ["demo", "docs"]}
    for line in steps("test").splitlines():
        assert "pip install" not in line or "--upgrade pip" in line or '"torch==2.13.0"' in line or "[demo]" in line, line


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_help_names_every_command():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(re.findall(r"^  ([a-z-]+) +\S", shown, re.M)) == sorted(phony)
