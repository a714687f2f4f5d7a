"""Test what the gradient of a weight multiplies: a matrix in e4m3 by columns. Triton's interpreter rounds two numbers in a hundred to
e4m3 wrongly, where the mantissa carries: what it stores is compared closely on a GPU only."""

import pytest
import torch

from fx_fusion.kernels.float8.quantize import E4M3, LARGEST, quantize_rows, quantize_rows_inline
from fx_fusion.kernels.float8.turn import turn_rows
from tests.kernels.test_quantize import DEVICE, apart_in, values

pytestmark = pytest.mark.kernel
SHAPES = [(1, 1), (16, 16), (3, 130), (130, 3), (1030, 70), (128, 128), (513, 130)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_as_torch_computes_it(m, n, dtype):
    """Rows are columns, a multiple of 16 long; what was added is zero."""
    x = values(m, n, dtype)
    scale = torch.logspace(-2, 2, m, device=DEVICE)[:, None]
    q = turn_rows(x, scale)
    wanted = (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(E4M3).t()
    assert (q.shape, q.dtype) == ((n, -(-m // 16) * 16), E4M3)
    assert (q[:, m:].float() == 0).all()
    assert apart_in(q[:, :m], wanted) <= (0 if DEVICE == "cuda" else 0.04 * q.numel() + 1)


@pytest.mark.parametrize("make", [quantize_rows, quantize_rows_inline], ids=["rows", "inline"])
def test_powers_of_two(make):
    """The scale is the next power of two; rows that are moved by one are exact, where nothing underflows."""
    x = values(300, 200, torch.bfloat16)
    q, scale = make(x, power_of_two=True)
    exponent = torch.log2(x.float().abs().amax(1, keepdim=True) / LARGEST).ceil()
    assert torch.equal(scale, torch.exp2(exponent))
    turned = turn_rows(q, torch.full_like(scale, 4.0))[:, :300]
    large = q.float().t().abs() >= 2.0**-4
    assert torch.equal(turned.float()[large], q.float().t()[large] / 4)


@pytest.mark.parametrize("make", [quantize_rows, quantize_rows_inline], ids=["rows", "inline"])
def test_rows_whose_scale_is_special(make):
    """Exact powers of two stay; zeros have a scale that is no zero; an infinity does not become a number."""
    x = torch.zeros(4, 64, device=DEVICE, dtype=torch.bfloat16)
    x[0, 3], x[1, 5], x[2, 7] = LARGEST, 2 * LARGEST, float("inf")
    q, scale = make(x, power_of_two=True)
    assert scale[:2, 0].tolist() == [1, 2]
    assert q[:2].float().amax(1).tolist() == [LARGEST, LARGEST]
    assert 0 < scale[3, 0] < 1e-30
    assert (q[3].float() == 0).all()
    assert not (q[2].float() * scale[2]).isfinite().all()


def test_beyond_the_range():
    x = torch.tensor([[1e4, -1e4, float("nan")]], device=DEVICE, dtype=torch.bfloat16)
    q = turn_rows(x, torch.ones(1, 1, device=DEVICE)).float()
    assert q[:2, 0].tolist() == [LARGEST, -LARGEST]
    if DEVICE == "cuda":  # the interpreter knows no NaN there
        assert q[2, 0].isnan()


def test_strides():
    x = values(100, 96, torch.bfloat16)
    scale = torch.rand(200, 1, device=DEVICE) + 0.1
    for view in (x[:, 16:80], x.t(), x[::2]):
        some = scale[: 2 * len(view) : 2]
        assert torch.equal(turn_rows(view, some).float(), turn_rows(view.contiguous(), some.contiguous()).float())
