"""EvoNorm-B0 in each of its ways."""

import functools
import itertools

import pytest
import torch

from fx_fusion.kernels import evonorm_b0
from fx_fusion.patterns.evonorm_b0 import over_larger_deviation
from fx_fusion.testing import Run, eager_nearby, run_oracle, worst_excess
from tests.helpers import slow_but
from tests.kernels.evonorm_b0_ways import B0_WAYS, by

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("way", B0_WAYS)
@pytest.mark.parametrize("shape", slow_but([(9, 5, 7, 7), (2, 9, 1, 1)], [(5, 6, 14, 14), (9, 5, 7, 7), (2, 3, 40, 40), (2, 9, 1, 1)]))
def test_evonorm_b0_by_channel_and_by_tile(shape, way, device):
    for last, dtype, running in itertools.product((False, True), (torch.float32, torch.bfloat16), (False, True)):
        form = torch.channels_last if last else torch.contiguous_format
        x, dy = (torch.randn(shape, device=device).to(dtype, memory_format=form) for _ in range(2))
        inputs = {"x": x} | {n: torch.randn(shape[1], device=device).to(dtype) for n in ("v", "weight", "bias")}
        running_var = torch.rand(shape[1], device=device) + 0.1 if running else None
        name, used = b0_excess(inputs, dy, running_var, way)
        assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


def b0_excess(inputs, dy, running_var, way):
    leaves = {n: t.clone(memory_format=torch.preserve_format).requires_grad_() for n, t in inputs.items()}
    with by(way):
        y, var, *_ = evonorm_b0.evonorm_b0(*leaves.values(), running_var, 1e-3)
        y.backward(dy)
    found = Run({"out0": y.detach(), "out1": var, **{f"d{n}": t.grad for n, t in leaves.items()}})
    reference = functools.partial(over_larger_deviation, running_var=running_var, eps=1e-3)
    upstream = (dy, torch.zeros_like(var))
    exact = run_oracle(reference, inputs, upstream)
    return worst_excess(found, eager_nearby(reference, inputs, exact, upstream), exact, dy.dtype)
