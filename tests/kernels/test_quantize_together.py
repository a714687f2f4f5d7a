"""Matrices that are quantized beside each other: the bits are those of one matrix made of them."""

import pytest
import torch

from fx_fusion.kernels.float8.quantize import quantize_columns, quantize_rows
from fx_fusion.kernels.float8.together import quantize_columns_together, quantize_rows_together

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = [(64, 16), (4096, 1024, 1024), (48, 130, 16), (1, 1, 1), (9000, 9000)]


def three(tensors):
    return [*tensors, *[None] * (3 - len(tensors))]


def matrices(shapes, dtype):
    torch.manual_seed(0)
    return [(torch.randn(m, n) * 10 ** torch.linspace(-3, 1, n)).to(DEVICE, dtype) for m, n in shapes]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("widths", WIDTHS)
def test_rows(widths, dtype, power_of_two):
    xs = matrices([(5, n) for n in widths], dtype)
    q, scale = quantize_rows_together(*three(xs), power_of_two)
    wanted, scales = quantize_rows(torch.cat(xs, 1), power_of_two)
    assert torch.equal(q.float(), wanted.float())
    assert torch.equal(scale, scales)


def test_rows_of_parts_of_others():
    """Views with a row stride, a transposed one, and no rows at all."""
    wide = matrices([(6, 96)], torch.bfloat16)[0]
    turned = matrices([(32, 6)], torch.bfloat16)[0].t()
    parts = [wide[:, 8:40], turned, wide[:, 64:]]
    q, _ = quantize_rows_together(*parts, False)
    assert torch.equal(q.float(), quantize_rows(torch.cat(parts, 1), False)[0].float())
    assert quantize_rows_together(*(part[:0] for part in parts), False)[0].shape == (0, 96)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heights", [(64, 16), (256, 128, 16), (48, 130, 16), (1, 1, 1)])
def test_columns(heights, dtype):
    xs = matrices([(m, 144) for m in heights], dtype)
    largest = [x.abs().max().float() for x in xs]
    q, scale = quantize_columns_together(*three(xs), *three(largest))
    wanted, scales = quantize_columns(torch.cat(xs), torch.stack(largest).max())
    assert torch.equal(q.float(), wanted.float())
    assert torch.equal(scale, scales)


def test_what_is_not_finite_stays():
    """A NaN or an infinity in one of them is one of the row, and of no other row."""
    xs = matrices([(3, 32), (3, 16)], torch.bfloat16)
    xs[1][1, 3] = float("inf")
    q, scale = quantize_rows_together(*xs, None, False)
    assert scale[1].isinf()
    assert scale[[0, 2]].isfinite().all()
    assert q.float()[[0, 2]].isfinite().all()
