"""Norms that write their results in e4m3 too, as a launch that was changed for float8 does: the bits are those of a kernel
behind them. (The results themselves may be summed in another order than by the launch that was not changed.)"""

import pytest
import torch

from fx_fusion.kernels.add_layer_norm import add_layer_norm
from fx_fusion.kernels.add_rms_norm import add_rms_norm
from fx_fusion.kernels.float8.quantize import E4M3, quantize_rows
from fx_fusion.kernels.norms import row_norm
from tests.helpers import pairwise

pytestmark = pytest.mark.kernel
KINDS = ["rms_norm", "layer_norm"]


class Quantizing:
    """``launch``, but the kernels of norms get memory for q and the scales of their result, and are asked to write them."""

    def __init__(self, of, power_of_two, without_y=False):
        self.of, self.power_of_two, self.without_y = of, power_of_two, without_y

    def __call__(self, kernel, grid, *args, **options):
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        if "STORE_Q" in given:
            m, n = given["m"], given["n"]
            self.q = torch.empty((m, n), dtype=E4M3, device=self.of.device)
            self.scale = torch.full((m, 1), -1.0, device=self.of.device)
            given |= {"q_ptr": self.q, "scale_ptr": self.scale, "STORE_Q": True, "POWER_OF_TWO": self.power_of_two}
            if self.without_y:
                given |= {"y_ptr": given["x_ptr"], "STORE_Y": False}
        kernel[grid](**given)


def operands(kind, shape, dtype, device):
    torch.manual_seed(0)
    n = shape[-1]
    x, residual, dy, dh = (torch.randn(shape).mul(torch.logspace(-2, 1, n)).to(device, dtype) for _ in range(4))
    weight = torch.randn(n).to(device, dtype)
    tensors = [x, residual, weight, weight.clone()] if kind == "layer_norm" else [x, residual, weight]
    constants = [1e-6, True] if kind == "layer_norm" else [1e-6, 0.0, True]
    op = add_layer_norm if kind == "layer_norm" else add_rms_norm
    return op, [*(t.requires_grad_() for t in tensors), *constants], (dy, dh)


@pairwise(
    kind=KINDS, shape=[(5, 24), (3, 7, 130), (2, 4096), (300, 64)], dtype=[torch.bfloat16, torch.float32],
    power_of_two=[False, True],
)  # fmt: skip
def test_forward_and_backward(monkeypatch, device, kind, shape, dtype, power_of_two):
    op, given, dys = operands(kind, shape, dtype, device)
    wanted = op(*given)
    gradients = torch.autograd.grad(wanted, given[:3], dys)
    quantizing = Quantizing(given[0], power_of_two)
    monkeypatch.setattr(row_norm, "launch", quantizing)
    found = op(*given)
    check(quantizing, found[0], power_of_two)
    found += torch.autograd.grad(found, given[:3], dys)
    check(quantizing, found[2], power_of_two)
    for one, other in zip(found, (*wanted, *gradients), strict=True):
        torch.testing.assert_close(one, other)


def check(quantizing, result, power_of_two):
    q, scale = quantize_rows(result.detach().reshape(-1, result.shape[-1]), power_of_two)
    assert torch.equal(quantizing.scale, scale)
    assert torch.equal(quantizing.q.float(), q.float())


@pytest.mark.parametrize("kind", KINDS)
def test_y_is_not_stored_for_nobody(monkeypatch, device, kind):
    """x, whose place y's has taken, is as it was."""
    op, given, _ = operands(kind, (5, 24), torch.bfloat16, device)
    before = given[0].clone()
    found = []
    for without_y in (False, True):
        quantizing = Quantizing(given[0], False, without_y)
        monkeypatch.setattr(row_norm, "launch", quantizing)
        y, _ = op(*given)
        found.append((quantizing.q.float(), quantizing.scale))
        assert without_y or torch.equal(found[0][0], quantize_rows(y.detach(), False)[0].float())
    torch.testing.assert_close(found[0], found[1])
    assert torch.equal(given[0], before)
