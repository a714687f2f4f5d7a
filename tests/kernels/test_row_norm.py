"""Norms over rows: layouts of operands and gradients, gradients that nobody wants."""

import pytest
import torch

from fx_fusion.kernels.add_layer_norm import add_layer_norm
from fx_fusion.kernels.add_rms_norm import add_rms_norm
from fx_fusion.kernels.norms import row_norm
from fx_fusion.kernels.norms.row_norm_kernels import row_norm_fwd_kernel
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.kernels.swiglu import swiglu
from fx_fusion.kernels.swish import swish
from fx_fusion.ops.launch import launch
from tests.changed_launches import changed

pytestmark = pytest.mark.kernel


def reference_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


LAYOUTS = {
    "transposed": lambda d: torch.randn(2, 5, 3, 24, device=d).transpose(1, 2),
    "sliced": lambda d: torch.randn(4, 6, 48, device=d)[..., 3:27],
    "columns_first": lambda d: torch.randn(24, 5, device=d).t(),
    "columns_in_the_middle": lambda d: torch.randn(3, 24, 4, device=d).transpose(1, 2),
    "rows_apart": lambda d: torch.randn(8, 24, device=d)[::2],
    "expanded": lambda d: torch.randn(1, 24, device=d).expand(5, 24),
    "expanded_over_a_batch": lambda d: torch.randn(1, 5, 24, device=d).expand(3, 5, 24),  # latents of a resampler
    "one_row": lambda d: torch.randn(24, device=d),
    "strided_columns": lambda d: torch.randn(4, 48, device=d)[:, ::2],
    "empty": lambda d: torch.randn(0, 24, device=d),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_inputs_and_gradients(name, device):
    x = LAYOUTS[name](device).requires_grad_()
    weight = torch.randn(24, device=device, requires_grad=True)
    y = rms_norm(x, weight, 1e-6, 0.0, False)
    expected = reference_norm(x, weight)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for upstream in (
        torch.ones((), device=device).expand(y.shape),
        torch.randn(*y.shape[:-1], 48, device=device)[..., ::2],
    ):
        ours = torch.autograd.grad(y, (x, weight), upstream, retain_graph=True)
        theirs = torch.autograd.grad(expected, (x, weight), upstream, retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    gated = swiglu(x, x * 2)
    torch.testing.assert_close(gated, torch.nn.functional.silu(x) * x * 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(swish(x), torch.nn.functional.silu(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_summands(name, center, device):
    """The backward knows the sum alone, not how each of its summands lies."""
    a = LAYOUTS[name](device)
    b = torch.randn(a.shape, device=device)
    b = b * torch.arange(1, a[..., 0].numel() + 1, device=device).view(*a.shape[:-1], 1)  # each row has another deviation
    weight, upstream = torch.randn(24, device=device), torch.randn(a.shape, device=device)

    def gradients(function, x, r):
        leaves = [t.detach().requires_grad_() for t in (x, r, weight)]
        return torch.autograd.grad((function(*leaves) * upstream).sum(), leaves)

    def ours(x, r, w):
        return (add_layer_norm(x, r, w, None, 1e-6, False) if center else add_rms_norm(x, r, w, 1e-6, 0.0, False))[0]

    def reference(x, r, w):
        h = x + r
        return torch.nn.functional.layer_norm(h, (24,), w, None, 1e-6) if center else reference_norm(h, w)

    for x, r in ((a, b), (b, a)):
        for found, expected in zip(gradients(ours, x, r), gradients(reference, x, r), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_only_one_gradient_comes_back(device):
    x, r = torch.randn(5, 24, device=device, requires_grad=True), torch.randn(5, 24, device=device, requires_grad=True)
    weight = torch.randn(24, device=device, requires_grad=True)
    y, h = add_rms_norm(x, r, weight, 1e-6, 0.0, False)
    (only_h,) = torch.autograd.grad(h.sum(), (x,), retain_graph=True)
    torch.testing.assert_close(only_h, torch.ones_like(x))
    only_y = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    expected = torch.autograd.grad(reference_norm(x + r, weight).sum(), (x, weight))
    for a, b in zip(only_y, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_frozen_weight_costs_no_gradient(device):
    x, weight = torch.randn(5, 24, device=device, requires_grad=True), torch.randn(24, device=device)
    rms_norm(x, weight, 1e-6, 0.0, True).sum().backward()
    assert weight.grad is None
    _, dweight = torch.ops.fx_fusion.rms_norm_bwd(
        x.detach(), x.detach(), weight, torch.ones(5, device=device), 1e-6, 0.0, True, [True, False]
    )
    assert dweight.numel() == 0


def test_saved_tensors_are_not_written_to(device):
    x, weight = (
        torch.randn(5, 24, device=device, requires_grad=True),
        torch.randn(24, device=device, requires_grad=True),
    )
    y = rms_norm(x, weight, 1e-6, 0.0, False)
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("round_first", [True, False])
@pytest.mark.parametrize(("center", "bias"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(5, 24), (7, 2048)], ids=str)
def test_the_backward_hands_out_y(shape, center, bias, round_first, device, monkeypatch):
    """As the memory pass changes the launch of it: y to the last bit, and the same gradients."""
    x, residual, dy = (torch.randn(*shape, device=device).bfloat16() for _ in range(3))
    w, b = torch.randn(2, shape[-1], device=device).bfloat16()
    b = b if bias else None
    y, h, stats = row_norm.norm_fwd(x, residual, w, b, 1e-6, 0.0, round_first, center=center)
    again = torch.full_like(y, float("nan"))

    def handing_out(kernel, grid, *args, **options):
        dy, dh, h, w, _, stats, dx, _, *rest = args
        launch(kernel, grid, dy, dh, h, w, w if b is None else b, stats, dx, again, *rest,
               **{**options, "HAS_BIAS": bias, "STORE_Y": True})  # fmt: skip

    def backward():
        return row_norm.norm_bwd(dy, h, h, w, b, stats, 0.0, round_first, [True] * 3, center=center)

    before = backward()
    monkeypatch.setattr(row_norm, "launch", handing_out)
    after = backward()
    assert torch.equal(again, y)
    assert all(map(torch.equal, after, before))


@pytest.mark.parametrize("n", [48, 20001])
@pytest.mark.parametrize("others", [torch.float32, torch.float16])
def test_the_rounding_is_that_of_x(n, others, device):
    """``round(x̂) · w`` of 16-bit rows and a float32 weight, whatever memory stands for the sum that there is not: passes
    change it with that of y, whose dtype is another."""
    x, w = torch.randn(6, n, device=device).half(), torch.randn(n, device=device)
    with changed(row_norm, row_norm_fwd_kernel, h_ptr=torch.empty(1, dtype=others, device=device)):
        y, *_ = row_norm.norm_fwd(x, None, w, None, 1e-6, 0.0, True, center=False)
    wide = x.double()
    xhat = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).half()
    assert y.dtype == torch.float32
    off = (y - xhat.float() * w).abs() > 1e-6 * y.abs()  # x̂ at the edge of two roundings
    assert off.sum() <= 1e-3 * y.numel()
