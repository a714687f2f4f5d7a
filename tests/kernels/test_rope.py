"""The rotation of queries and keys."""

import pytest
import torch

from fx_fusion.kernels import rope

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("style", rope.STYLES)
def test_one_tensor_whose_positions_stand_before_its_heads(style, device):
    """As Llama 4 has its queries when complex numbers rotate them."""
    q = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    cos, sin = torch.randn(2, 2, 5, 1, 4 if style == "even_odd_to_halves" else 8, device=device)
    turned, _ = rope.rope(q, None, cos, sin, style, "input", False)
    swapped, cos, sin = (t.transpose(1, 2).detach().contiguous() for t in (q, cos, sin))
    expected, _ = rope.rope(swapped.requires_grad_(), None, cos, sin, style, "input", False)
    torch.testing.assert_close(turned, expected.transpose(1, 2))
    (dq,), (dswapped,) = torch.autograd.grad(turned.sum(), q), torch.autograd.grad(expected.sum(), swapped)
    torch.testing.assert_close(dq, dswapped.transpose(1, 2))
