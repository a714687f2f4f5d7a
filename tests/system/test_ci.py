"""Test what .ci/run sets up before the tests, with commands that only say how they were called."""

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import seconds

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
    """The tests, the linters, the other quick tests, other builds of torch, and slow tests for as long as there is time."""
    assert calls[:3] == ["make test", "make lint", "make test-more"]
    other = [f"make TORCH=torch=={version} VENV=.venv-{version}" for version in ("2.11.0", "2.15.0")]
    ready = (f"{make} .venv-{make.rpartition('-')[2]}/ready-demo" for make in other)
    assert calls[3:7] == [call for pair in zip(ready, other, strict=True) for call in (pair[0], f"{pair[1]} test-torch")]
    assert re.fullmatch(r"make test-slow MINUTES=\d+", *calls[7:])


@pytest.mark.parametrize("works", [True, False])
def test_chromium_is_installed_where_it_is_missing_and_all_runs_without(tmp_path, works):
    calls, said = run_ci(tmp_path, works=works, apt_get=True)
    assert calls[0] == "apt-get update"
    assert any(call.endswith(" chromium") for call in calls) == works
    checks(calls[-8:])
    assert ("will skip" in said) == (not works)


@pytest.mark.parametrize("there", [{"chromium": True, "apt_get": True}, {}])
def test_nothing_is_installed_where_it_is_there_or_cannot_be(tmp_path, there):
    calls, _ = run_ci(tmp_path, **there)
    checks(calls)


def test_the_functions_whose_seconds_are_written_down_are_there():
    names = {name: set(re.findall(r"^def (test_\w+)", (ROOT / name).read_text(), re.M)) for name in files(seconds.table())}
    assert [f for f in (*seconds.table(), *seconds.SMOKE) if f.partition("::")[2] not in names[f.partition("::")[0]]] == []


def files(functions):
    return {function.partition("::")[0] for function in functions}


def test_a_tier_is_what_is_quick(monkeypatch):
    known = {"a::quick": 0.02, "a::dear": 0.2, "a::dearer": 1.2, "a::dearest": 9.0}
    monkeypatch.setattr(seconds, "table", lambda: known)
    monkeypatch.setattr(seconds, "SMOKE", {"a::dearer": 1})
    ids = [f"{function}[{i}]" for function in (*known, "a::new") for i in range(5)]
    counts = {tier: Counter(map(seconds.function_of, seconds.chosen(ids, tier))) for tier in seconds.TIERS}
    assert counts["check"] == {"a::quick": 3, "a::new": 3, "a::dearer": 1}
    assert counts["test"] == {"a::quick": 5, "a::dear": 5, "a::dearer": 2, "a::new": 5}
    assert seconds.spread(list("abcde"), 2) == ["a", "e"]
