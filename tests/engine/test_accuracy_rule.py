"""The rule that decides what is accurate."""

import torch

from fx_fusion.testing import Run, eager_nearby, nudged, run, run_oracle, worst_excess


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
