"""Test what .ci/run sets up before the tests, with commands that only say how they were called."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[2]


def run_ci(tmp_path, *, works=True, **there):
    """The commands that .ci/run calls, and what it says. ``there``: whether a command exists."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "rm"):
        (folder / name).symlink_to(shutil.which(name))
    for name in ["make", *(name.replace("_", "-") for name, exists in there.items() if exists)]:
        status = 0 if works or name == "make" else 1
        (folder / name).write_text(f'#!{shutil.which("bash")}\necho "{name} $*" >> "{tmp_path}/calls"\nexit {status}\n')
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [str(ROOT / ".ci/run")], env={**os.environ, "PATH": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (tmp_path / "calls").read_text().splitlines(), done.stderr


def checks(calls):
    """The tests, the linters, other builds of torch, and the slow tests for as long as there is time."""
    assert calls[:2] == ["make test", "make lint"]
    other = [f"make TORCH=torch=={version} VENV=.venv-{version}" for version in ("2.11.0", "2.15.0")]
    ready = (f"{make} .venv-{make.rpartition('-')[2]}/ready-demo" for make in other)
    assert calls[2:6] == [call for pair in zip(ready, other, strict=True) for call in (pair[0], f"{pair[1]} test-torch")]
    assert re.fullmatch(r"make test-slow MINUTES=\d+", *calls[6:])


@pytest.mark.parametrize("works", [True, False])
def test_chromium_is_installed_where_it_is_missing_and_all_runs_without(tmp_path, works):
    calls, said = run_ci(tmp_path, works=works, apt_get=True)
    assert calls[0] == "apt-get update"
    assert any(call.endswith(" chromium") for call in calls) == works
    checks(calls[-7:])
    assert ("will skip" in said) == (not works)


@pytest.mark.parametrize("there", [{"chromium": True, "apt_get": True}, {}])
def test_nothing_is_installed_where_it_is_there_or_cannot_be(tmp_path, there):
    calls, _ = run_ci(tmp_path, **there)
    checks(calls)


def test_the_longest_files_are_there():
    stems = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in LONGEST if name not in stems] == []
