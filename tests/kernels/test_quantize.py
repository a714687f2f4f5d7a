"""Kernels that make operands of float8 products. Triton's interpreter rounds two numbers in a hundred to e4m3 wrongly, where
the mantissa carries, and knows no NaN there: what it stores is compared closely on a GPU only."""

import pytest
import torch

from fx_fusion.kernels.float8.quantize import E4M3, LARGEST, WIDEST, quantize_columns, quantize_rows, quantize_rows_inline
from tests.helpers import pairwise

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = [
    pytest.param(quantize_rows_inline, id="inline"),
    pytest.param(quantize_rows, id="rows", marks=pytest.mark.gpu),
    pytest.param(quantize_columns, id="columns", marks=pytest.mark.gpu),
]
SHAPES = [(1, 1), (16, 16), (3, 130), (130, 3), (1030, 70), (128, 128), (513, 130), (3, WIDEST + 40)]


def values(m, n, dtype):
    torch.manual_seed(0)
    return torch.randn(m, n).mul(torch.logspace(-3, 3, n)).to(DEVICE, dtype)


def apart_in(q, wanted):
    """Return how many of the numbers differ that are no subnormals."""
    return ((q.float() != wanted.float()) & (wanted.float().abs() >= 2**-6)).sum()


@pairwise(shape=SHAPES, dtype=[torch.bfloat16, torch.float16, torch.float32], make=[quantize_rows, quantize_columns])
def test_as_torch_computes_it(make, shape, dtype):
    """Scales to the last bit; values too, but where rounding of the reciprocal decides between two neighbors."""
    wrong, apart = (0.01, 0.13) if DEVICE == "cuda" else (0.04, 0.5)
    x = values(*shape, dtype)
    q, scale = make(x)
    rows, row_scale = quantize_rows_inline(x.t().contiguous() if make is quantize_columns else x)
    assert (q.shape, q.dtype, scale.shape) == (rows.shape, E4M3, row_scale.shape)
    assert torch.equal(scale, row_scale)
    torch.testing.assert_close(q.float(), rows.float(), rtol=apart, atol=2**-9)
    assert apart_in(q, rows) <= wrong * q.numel() + 1


@pytest.mark.parametrize("make", ALL)
def test_what_is_lost(make):
    """Each number is within half a step of e4m3 (2**-4) of its value, or half a subnormal step of its scale."""
    x = values(300, 200, torch.bfloat16)
    q, scale = make(x)
    found = (q.float() * scale).double()
    true = (x.t() if make is quantize_columns else x).double()
    allowed = torch.maximum(true.abs() * 2.0**-4, 2.0**-10 * scale.double())
    assert ((found - true).abs() <= allowed * (1 + 1e-5)).all()
    assert q.float().abs().amax() == LARGEST


@pytest.mark.parametrize("make", ALL)
def test_zeros_and_what_is_not_finite(make):
    x = torch.randn(70, 80, device=DEVICE).to(torch.bfloat16)
    line = (lambda t, i: t[:, i]) if make is quantize_columns else (lambda t, i: t[i])
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


@pytest.mark.parametrize("make", [quantize_rows, quantize_columns], ids=["rows", "columns"])
def test_strides(make):
    x = values(100, 96, torch.bfloat16)
    for view in (x[:, 16:80], x.t(), x[::2]):
        for found, wanted in zip(make(view), make(view.contiguous()), strict=True):
            assert torch.equal(found.float(), wanted.float())


def test_columns_by_one_maximum():
    """As the scales of the rows know it: every column has its scale, and all are one."""
    x = values(200, 130, torch.bfloat16)
    _, by_rows = quantize_rows_inline(x)
    q, scale = quantize_columns(x, by_rows.amax() * LARGEST)
    assert torch.equal(scale, by_rows.amax().expand(130, 1))
    wanted = (x.t().float() / by_rows.amax()).to(E4M3)
    assert apart_in(q, wanted) <= (0.01 if DEVICE == "cuda" else 0.04) * q.numel()
