"""The model of step time against what was measured, and the page against the model."""

import re
from pathlib import Path

import pytest

from bench import step_time

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()


def test_two_gpus_are_predicted_within_a_tenth():
    given, seen = step_time.steps(), step_time.measured()
    assert set(seen) == {(w, v) for w in ("ddp", "fsdp2") for v in ("inductor", "fx_fusion")}
    for (wrapper, variant), ms in seen.items():
        assert step_time.WRAPPERS[wrapper](given[variant], 2) * 1e3 == pytest.approx(ms, rel=0.1)


@pytest.mark.parametrize("count", step_time.COUNTS)
def test_the_page_says_what_the_model_says(count):
    row = re.search(rf"^\| {count} \| (.*) \|$", PAGE, re.MULTILINE)[1].split(" | ")
    given = step_time.steps()
    expected = []
    for function in step_time.WRAPPERS.values():
        base, ours = (function(given[variant], count) * 1e3 for variant in ("inductor", "fx_fusion"))
        expected += [base, ours, base / ours]
    assert [float(x) for x in row] == pytest.approx(expected, abs=0.051)


def test_a_step_gets_longer_with_more_gpus():
    for step in step_time.steps().values():
        for function in step_time.WRAPPERS.values():
            times = [function(step, n) for n in step_time.COUNTS]
            assert times == sorted(times)
