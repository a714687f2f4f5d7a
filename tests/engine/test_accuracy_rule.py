"""The rule that decides what is accurate."""

import pytest
import torch

from fx_fusion.accuracy import compare
from fx_fusion.testing import Run, eager_nearby, nudged, run, run_oracle, worst_excess
from tests.fuzz.compare import parted


def test_nearly_tied_elements_may_go_either_way():
    """As the maximum of EvoNorm-B0: the accuracy rule takes eager's largest error over inputs within a rounding."""

    def largest(x, least):
        return torch.maximum(least, x).square().sum(1)

    x = torch.randn(4, 1000)
    inputs = {"x": x, "least": x.clone()}
    oracle, eager, fused = run_oracle(largest, inputs), run(largest, inputs), run(largest, nudged(inputs, 99))
    assert worst_excess(fused, eager, oracle, torch.float32)[1] > 1000
    nearby = eager_nearby(largest, inputs, oracle)
    assert worst_excess(fused, nearby, oracle, torch.float32)[1] <= 1
    wrong = Run({**fused.values, "dx": fused.values["dx"] * 3})
    assert worst_excess(wrong, nearby, oracle, torch.float32)[1] > 1


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "usual", "exact", "right"),
    [
        (1.0, 1.0, 1.0, True),
        (7e4, INF, 7e4, True),
        (1234.0, INF, 7e4, False),
        (INF, INF, 7e4, False),
        (INF, INF, INF, True),
        (-INF, INF, INF, False),
        (NAN, INF, INF, False),
        (INF, NAN, NAN, False),
        (NAN, NAN, NAN, True),
        (NAN, 1.0, 1.0, False),
    ],
)
def test_what_is_not_finite(found, usual, exact, right):
    """NaN and infinities are compared by kind and sign, and where eager alone overflows its error is none to measure by."""
    ours, eagers, truth = (torch.tensor([1.0, value], dtype=torch.float64) for value in (found, usual, exact))
    assert (worst_excess(*(Run({"y": y}) for y in (ours, eagers, truth)), torch.float16)[1] <= 1) == right
    right |= found == usual  # verify and the fuzzer ask for no more than eager gives
    assert (parted("y", ours, eagers, truth, torch.float16)[0] <= 1) == right
    (row,) = compare({"y": ours}, {"y": eagers.half()}, {"y": truth})
    assert row.ok == right
