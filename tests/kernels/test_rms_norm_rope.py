"""The norm of queries and keys and their rotation in one kernel."""

import itertools

import pytest
import torch

from fx_fusion.kernels.rms_norm_rope import rms_norm_rope
from fx_fusion.kernels.rope import STYLES
from fx_fusion.patterns.rope import rotated, rotated_by_halves

pytestmark = pytest.mark.kernel

B, H, S, D = 2, 3, 5, 12
# Head dim in halves or pairs, one angle a pair or a column; the norm of a head or across heads; what is rounded first.
CASES = [
    (style, columns, across, heads_last)
    for style, columns in itertools.product(STYLES, (D // 2, D))
    for across, heads_last in ((False, True), (True, False), (True, True), (False, False))
    if (style != "swap_halves" or columns == D) and (style != "even_odd_to_halves" or columns < D)
]


def exact(x, weight, cos, sin, offset, across, style):
    """The formulas in float64, differentiated by autograd."""
    tokens = x.transpose(1, 2).flatten(-2) if across else x
    q = tokens * torch.rsqrt(tokens.square().mean(-1, keepdim=True) + 1e-6)
    q = q if weight is None else q * (offset + weight)
    q = q.unflatten(-1, (-1, D)).transpose(1, 2) if across else q
    rotate = rotated if cos.shape[-1] == D else rotated_by_halves
    return rotate(q, cos, sin, style, "promoted", False)


@pytest.mark.parametrize(("style", "columns", "across", "heads_last"), CASES)
def test_against_float64(style, columns, across, heads_last, device):
    for dtype, has_weight, offset in ((torch.float32, True, 1.0), (torch.bfloat16, True, 0.0), (torch.bfloat16, False, 0.0)):
        x = torch.randn(B, S, H, D).transpose(1, 2) if heads_last else torch.randn(B, H, S, D)
        x = x.to(device, dtype).requires_grad_()
        weight = torch.randn(H * D if across else D).to(device, dtype).requires_grad_() if has_weight else None
        cos, sin = torch.randn(2, 1, 1, S, columns, device=device)
        static = 1e-6, offset, dtype == torch.bfloat16 and has_weight, across, style, "input", False
        y = rms_norm_rope(x, weight, cos, sin, *static)
        given = [t for t in (x, weight) if t is not None]
        dy = torch.randn_like(y)
        found = y, *torch.autograd.grad(y, given, dy)
        wide = [t.detach().double().requires_grad_() for t in given]
        expected = exact(wide[0], wide[1] if has_weight else None, cos.double(), sin.double(), offset, across, style)
        expected = expected, *torch.autograd.grad(expected, wide, dy.double())
        for name, a, b in zip(("y", "dx", "dweight"), found, expected, strict=False):
            error = ((a.double() - b).abs().max() / b.abs().max()).item()
            assert error < (2e-6 if dtype == torch.float32 else 2e-2), (name, dtype, error)
        assert y.stride() == x.stride()


@pytest.mark.parametrize("across", [False, True])
def test_strides_and_empty_tensors(across, device):
    """A part of a projection of q, k and v, positions before heads; no tokens at all."""
    qkv = torch.randn(B, S, 3 * H * D, device=device)
    weight = torch.randn(H * D if across else D, device=device, requires_grad=True)
    cos, sin = torch.randn(2, S, 1, D, device=device)
    static = 1e-6, 0.0, False, across, "rotate_half", "input", True
    part = qkv[..., H * D : 2 * H * D].unflatten(-1, (H, D))
    y = rms_norm_rope(part, weight, cos, sin, *static)
    torch.testing.assert_close(y, rms_norm_rope(part.contiguous(), weight, cos, sin, *static))
    y = rms_norm_rope(part[:0], weight, cos, sin, *static)
    (dweight,) = torch.autograd.grad(y.sum(), weight)
    assert y.shape == (0, S, H, D)
    assert not dweight.any()
