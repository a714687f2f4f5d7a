"""A saved gradient times the upstream one, in place: ``fx_fusion::scaled`` and what Inductor launches for it."""

import pytest
import torch

from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits.scaled import scale_kernel, scaled

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [0.0, 0.3, -7.0, float("nan")])
@pytest.mark.parametrize("n", [1, 31, 4096, 9001])
def test_a_product_in_place(dtype, factor, n, device):
    x, number = torch.randn(n, device=device).to(dtype), torch.tensor(factor, device=device)
    expected = (x.double() * number.double()).to(dtype)
    torch.testing.assert_close(scaled(x, number), expected, equal_nan=True)
    scale_kernel[(2,)](x, number, n, BLOCK=64)
    torch.testing.assert_close(x, expected, equal_nan=True)


def test_one_moves_nothing(device):
    """Not even a NaN."""
    x = torch.tensor([float("nan"), 1.0, float("inf")], device=device)
    before = x.clone()
    scale_kernel[(1,)](x, torch.tensor(1.0, device=device), 3, BLOCK=4)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def a_loss(dtype, device):
    """In eager, as of logits that left a graph: the loss, its input and its weight."""
    generator = torch.Generator().manual_seed(0)
    x, lm_head = (torch.randn(n, 32, generator=generator).to(device, dtype).requires_grad_() for n in (40, 96))
    target = torch.randint(0, 96, (40,), generator=generator).to(device)
    options = ("mean", -100, 0.0, 0.0, 1.0, [True, True, False], False)
    return linear_cross_entropy(x, lm_head, None, target, None, *options)[0], x, lm_head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("upstream", [1.0, 4.0])
def test_a_backward_that_may_run_again_overwrites_nothing(upstream, dtype, device):
    loss, *inputs = a_loss(dtype, device)
    found = [torch.autograd.grad(loss * upstream, inputs, retain_graph=again) for again in (True, True, False)]
    copies = [[g.clone() for g in grads] for grads in found]
    loss, *inputs = a_loss(dtype, device)
    expected = [g * upstream for g in torch.autograd.grad(loss, inputs)]
    for grads in copies:
        torch.testing.assert_close(grads, expected)


def test_the_last_backward_copies_nothing(device):
    for _ in range(2):  # in the first, a kernel that is compiled keeps what it is given for a while
        loss, x, lm_head = a_loss(torch.bfloat16, device)
        saved = {t.data_ptr() for t in loss.grad_fn.saved_tensors}
        loss.backward()
    assert lm_head.grad.data_ptr() in saved
    assert x.grad.data_ptr() in saved
