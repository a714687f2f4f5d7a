"""Masks over numbers that their dtype does not hold, through FlexAttention's kernels: never another mask than eager's."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
S = 512


def times():
    return 1.7e9 + torch.arange(S, dtype=torch.float32, device="cuda")


def earlier(t):
    return t[None] <= t[:, None]


MASKS = {
    "causal": lambda padding: earlier(times()),
    "window": lambda padding: earlier(times()) & (times()[None] > times()[:, None] - 64),
    "chunks": lambda padding: earlier(torch.arange(S, device="cuda")) & (times()[None] // 64 == times()[:, None] // 64),
    "padding": lambda padding: earlier(times()) & (padding[:, None, None].float() + 2.0**24 > 2.0**24),
    "window in int64": lambda padding: (
        earlier(torch.arange(S, device="cuda")) & (torch.arange(S, device="cuda") > torch.arange(S, device="cuda")[:, None] - 64)
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_of_times_is_eagers(name):
    q, k, v = (torch.randn(2, 2, S, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    padding = torch.ones(2, S, dtype=torch.long, device="cuda")
    padding[0, 400:] = 0

    def attend(q, k, v, padding):
        mask = MASKS[name](padding)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(2, 1, S, S))

    with fx_fusion.recording() as report:
        found = torch.compile(attend, backend="fx_fusion", options={"select": "always"})(q, k, v, padding)
    expected = attend(q, k, v, padding)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-1, atol=1e-1)
    assert report.count("block_sparse_attention") == (name == "window in int64"), str(report)
