"""Kernels that make operands of float8 products. Triton's interpreter rounds two numbers in a hundred to e4m3 wrongly, where
the mantissa carries, and knows no NaN there: what it stores is compared closely on a GPU only."""

import pytest
import torch

from fx_fusion.kernels.float8.quantise import E4M3, LARGEST, quantise_columns, quantise_rows

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = [pytest.param(quantise_rows, id="rows"), pytest.param(quantise_columns, id="columns", marks=pytest.mark.gpu)]
SHAPES = [(1, 1), (16, 16), (3, 130), (130, 3), (1030, 70), (128, 128), (513, 130)]


def values(m, n, dtype):
    torch.manual_seed(0)
    return torch.randn(m, n).mul(torch.logspace(-3, 3, n)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_columns_are_rows_of_the_transposed(m, n, dtype):
    """Scales to the last bit; values too, but where rounding of the reciprocal decides between two neighbours."""
    wrong, apart = (0.01, 0.13) if DEVICE == "cuda" else (0.04, 0.5)
    x = values(m, n, dtype)
    q, scale = quantise_columns(x)
    rows, row_scale = quantise_rows(x.t().contiguous())
    assert (q.shape, q.dtype, scale.shape) == ((n, m), E4M3, (n, 1))
    assert torch.equal(scale, row_scale)
    torch.testing.assert_close(q.float(), rows.float(), rtol=apart, atol=0)
    assert (q.float() != rows.float()).sum() <= wrong * q.numel() + 1


@pytest.mark.parametrize("make", BOTH)
def test_what_is_lost(make):
    """Each number is within half a step of e4m3 (2**-4) of its value, or half a subnormal step of its scale."""
    x = values(300, 200, torch.bfloat16)
    q, scale = make(x)
    found = (q.float() * scale).double()
    true = (x.t() if make is quantise_columns else x).double()
    allowed = torch.maximum(true.abs() * 2.0**-4, 2.0**-10 * scale.double())
    assert ((found - true).abs() <= allowed * (1 + 1e-5)).all()
    assert q.float().abs().amax() == LARGEST


@pytest.mark.parametrize("make", BOTH)
def test_zeros_and_what_is_not_finite(make):
    x = torch.randn(70, 80, device=DEVICE).to(torch.bfloat16)
    line = (lambda t, i: t[:, i]) if make is quantise_columns else (lambda t, i: t[i])
    line(x, 1).zero_()
    line(x, 2)[3] = float("nan")
    line(x, 4)[5] = float("inf")
    line(x, 6).fill_(1e-38)
    q, scale = make(x)
    found = q.float() * scale
    assert (found[1] == 0).all()
    assert found[2, 3].isnan()
    assert not found[4].isfinite().all()
    assert (found[6].abs() < 1e-30).all()
    rest = [i for i in range(found.shape[0]) if i not in (2, 4)]
    assert found[rest].isfinite().all()


def test_strided_columns():
    x = values(100, 96, torch.bfloat16)
    for view in (x[:, 16:80], x.t(), x[::2]):
        for found, wanted in zip(quantise_columns(view), quantise_columns(view.contiguous()), strict=True):
            assert torch.equal(found.float(), wanted.float())
