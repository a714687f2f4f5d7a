"""``python -m fx_fusion bench``: variants in turns, what their ratios are worth, and what becomes of those that fail."""

import json
import subprocess
import sys

import pytest
import torch

from fx_fusion import benching
from fx_fusion.benching import AGAIN, TURNS, Measured, compare, noise_of, shown

# Stands for the process of a variant: a step of 10 ms, 8 of fx_fusion; what is in OUT runs out of memory beside others.
PROCESS = """
import json, os, sys
variant, alone = sys.argv[-1], os.environ.get("ALONE")
open(os.environ["LOG"], "a").write(variant + "\\n")
if variant == os.environ.get("BROKEN"):
    raise ValueError("no such class")
others = open(os.environ["LOG"]).read().split("\\n").count("end")
if variant == os.environ.get("OUT") and others < int(os.environ.get("AFTER", 0)):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
print("not for us")
print(json.dumps({"first": 3.0, "losses": [5.0, 4.0]}), flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": [0.008 if variant == "fx_fusion" else 0.01] * 3, "peak": 2**30}), flush=True)
"""
NAMES = ["eager", "inductor", "fx_fusion", AGAIN]


@pytest.fixture
def command(tmp_path, monkeypatch):
    file = tmp_path / "process.py"
    file.write_text(PROCESS)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return [sys.executable, str(file)]


def test_in_turns(command):
    said = []
    found = compare(command, NAMES, said.append)
    assert [one.variant for one in found] == NAMES
    assert all(len(one.seconds) == TURNS and one.peak == 2**30 and one.first == 3.0 for one in found)
    assert said[:4] == [f"{name}: compiling" for name in NAMES]
    text = shown(found, "llama, layers 2")
    assert "fx_fusion: 1.250 of Inductor's speed (1.250 to 1.250 by turn), faster: equal code differs by 0.5% here" in text
    assert text.splitlines()[-1] == "| llama, layers 2 | 1.00 | - | 1.25 | 1.00 |"


def test_one_that_fails_does_not_stop_the_others(command, monkeypatch):
    monkeypatch.setenv("BROKEN", "eager")
    found = compare(command, NAMES, lambda said: None)
    assert found[0].failed == "ValueError: no such class"
    assert all(len(one.seconds) == TURNS for one in found[1:])
    assert "ValueError: no such class" in shown(found, "llama")


def test_one_after_the_other_where_they_do_not_fit(command, monkeypatch):
    monkeypatch.setenv("OUT", "fx_fusion")
    said, ran = [], benching._Process

    class Alone(ran):
        """The memory of the others is free as soon as they have ended."""

        def __init__(self, command, variant):
            if any("alone" in line for line in said):
                monkeypatch.delenv("OUT", raising=False)
            super().__init__(command, variant)

    monkeypatch.setenv("AFTER", "1")
    monkeypatch.setattr(benching, "_Process", Alone)
    found = compare(command, NAMES, said.append)
    assert "they do not fit on the GPU together: one after the other" in said
    assert [one.variant for one in found] == NAMES
    assert all(len(one.seconds) == TURNS and not one.failed for one in found)


def measured(variant, *turns, losses=(5.0, 4.0), peak=None):
    return Measured(variant, [[seconds] * 3 for seconds in turns], 2.0, peak, list(losses))


@pytest.mark.parametrize(
    ("again", "ours", "verdict"),
    [
        ((1.0,) * 5, (0.99,) * 5, "faster"),
        ((1.02, 0.98, 1.02, 0.98, 1.02), (0.99,) * 5, "no difference"),
        ((1.0,) * 5, (1.002,) * 5, "no difference"),
        ((1.0, 1.0, 1.0, 1.0, 3.0), (1.1,) * 5, "slower"),
    ],
)
def test_a_ratio_is_worth_what_equal_code_differs_by(again, ours, verdict):
    found = [measured("inductor", *(1.0,) * 5), measured("fx_fusion", *ours), measured(AGAIN, *again)]
    assert f", {verdict}: " in shown(found, "llama")


def test_much_noise_and_other_losses_are_said():
    noisy = measured(AGAIN, 1.2, 1.2, 0.9, 1.1, 1.2)
    found = [measured("inductor", *(1.0,) * 5), measured("fx_fusion", *(0.5,) * 5, losses=(5.0, 2.0)), noisy]
    assert noise_of(found) == pytest.approx(1 - 1 / 1.2)
    text = shown(found, "llama")
    assert "measure again" in text
    assert "LOSSES DIFFER by 50.0%" in text


def test_without_inductor_there_is_no_ratio():
    found = [Measured("inductor", failed="g++ is missing"), measured("fx_fusion", *(1.0,) * 5)]
    assert "no ratio: Inductor or fx_fusion has no numbers" in shown(found, "llama")
    assert noise_of(found) == 0.5


@pytest.mark.parametrize("make", [lambda y: y * 2, lambda y: {"logits": y + 1}, lambda y: (1, None, y)])
def test_a_model_without_a_loss_is_trained_by_a_mean(make):
    output = make(torch.ones(3, requires_grad=True))
    assert benching.loss_of(output).dim() == 0
    assert benching.loss_of(output).requires_grad


def test_liger_runs_where_it_has_a_patch(monkeypatch):
    monkeypatch.setattr(benching, "_liger", lambda kind: print if kind == "llama" else None)
    assert benching.variants_here("llama") == ["eager", "inductor", "liger", "fx_fusion"]
    assert benching.variants_here("mamba2") == ["eager", "inductor", "fx_fusion"]


def run_bench(*arguments):
    return subprocess.run([sys.executable, "-m", "fx_fusion", "bench", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_tiny_model(tmp_path):
    file = tmp_path / "b.json"
    run = run_bench("llama", "--tiny", "--steps", "2", "--dtype", "float32", "--device", "cpu", "--json", str(file))
    assert run.returncode == 0, run.stderr
    assert "fx_fusion: " in run.stdout
    saved = [one for one in json.loads(file.read_text())["measured"] if one["variant"] != "liger"]
    assert [one["variant"] for one in saved] == NAMES
    assert len({tuple(round(loss, 3) for loss in one["losses"]) for one in saved}) == 1


def test_what_is_no_target_is_one_line():
    run = run_bench("no_such_model")
    assert (run.returncode, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1
