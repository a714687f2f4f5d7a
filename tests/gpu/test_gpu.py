"""What only a GPU can show: offsets beyond 2^31, the device guard, CUDA graphs, real sizes."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion.registry as registry
from fx_fusion.kernels.cross_entropy import cross_entropy
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.kernels.swiglu import swiglu

pytestmark = pytest.mark.gpu
registry.all_fusions()


def test_more_than_2_to_the_31_elements():
    rows = 2**31 // 8192 + 64
    x = torch.randn(rows, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(8192, device="cuda", dtype=torch.bfloat16)
    y = rms_norm(x, w, 1e-6, 0.0, True)
    torch.testing.assert_close(y[-2:], F.rms_norm(x[-2:], (8192,), w, 1e-6), rtol=1e-2, atol=1e-2)
    y.backward(torch.ones((), device="cuda", dtype=torch.bfloat16).expand(y.shape))
    tail = x.detach()[-2:].float().requires_grad_()
    F.rms_norm(tail, (8192,), None, 1e-6).sum().backward()
    torch.testing.assert_close(x.grad[-2:].float(), tail.grad, rtol=2e-2, atol=2e-3)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(x, x)[-1], F.silu(x[-1]) * x[-1], rtol=1e-2, atol=1e-2)


def test_cross_entropy_of_more_than_2_to_the_31_logits():
    m, v = 17000, 128256
    logits = torch.randn(m, v, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, v, (m,), device="cuda")
    loss = cross_entropy(logits, target, None, -100, 0.0, 0.0, 1.0)
    torch.testing.assert_close(
        loss[-4:], F.cross_entropy(logits[-4:].float(), target[-4:], reduction="none"), rtol=1e-4, atol=1e-4
    )
    loss.sum().backward()
    row = logits.detach()[-1:].float().requires_grad_()
    F.cross_entropy(row, target[-1:], reduction="sum").backward()
    torch.testing.assert_close(logits.grad[-1:].float(), row.grad, rtol=1e-2, atol=1e-4)


def test_cuda_graphs_through_reduce_overhead():
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def norm(x):
        return w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    options = {"select": "always", "strict": True, "triton.cudagraphs": True}  # what mode="reduce-overhead" stands for
    run = torch.compile(norm, backend="fx_fusion", options=options)
    for _ in range(4):
        x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(run(x).clone(), norm(x), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_other_device():
    x = torch.randn(8, 64, device="cuda:1", requires_grad=True)
    y = rms_norm(x, None, 1e-6, 0.0, False)
    assert y.device == x.device
    y.sum().backward()
    torch.testing.assert_close(y, F.rms_norm(x, (64,), None, 1e-6))
