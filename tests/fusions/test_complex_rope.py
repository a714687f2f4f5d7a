"""Rotations by complex numbers."""

import pytest
import torch

from tests.fusions.test_spellings_of_rotations import assert_fused_and_accurate
from tests.helpers import reasons, rewritten

freqs = torch.polar(torch.ones(5, 4), torch.randn(5, 4, generator=torch.Generator().manual_seed(2)))[None, :, None]


def pairs_of(q):
    return torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))


@pytest.mark.parametrize(
    "combine",
    [lambda z, f: z + f, lambda z, f: z / f, lambda z, f: f / z, lambda z, f: z * f.conj(), lambda z, f: z * z],
    ids=["sum", "quotient", "inverse", "conjugate", "square"],
)
def test_what_is_no_rotation_by_complex_numbers(combine):
    freqs = torch.polar(torch.rand(5, 3) + 0.5, torch.randn(5, 3))[None, :, None]

    def turned(q):
        return torch.view_as_real(combine(pairs_of(q), freqs)).flatten(3).type_as(q)

    q = torch.randn(2, 5, 3, 6)
    result, report = rewritten(turned, q)
    assert report.count("complex_rope") == 0, str(report)
    torch.testing.assert_close(result, turned(q))


def test_arguments_of_a_rotation_by_name():
    freqs = torch.polar(torch.ones(5, 3), torch.randn(5, 3))[None, :, None]

    def turned(q):
        z = torch.view_as_complex(input=torch.reshape(input=q.float(), shape=(*q.shape[:-1], -1, 2)))
        return torch.view_as_real(input=z * freqs).flatten(3)

    q = torch.randn(2, 5, 3, 6)
    result, report = rewritten(turned, q)
    assert report.count("complex_rope") == 1, str(report)
    torch.testing.assert_close(result, turned(q))


def complex_halves(x):
    return torch.view_as_complex(torch.stack(wide(x).chunk(2, -1), -1))


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def contiguous_pairs(x, freqs):
    pairs = torch.view_as_complex(wide(x).reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * freqs).flatten(3).type_as(x)


def cast_behind_the_pairs(x, freqs):
    pairs = torch.view_as_complex(wide(x.unflatten(-1, (-1, 2))))
    return torch.view_as_real(freqs * pairs).reshape(x.shape).type_as(x)


def stacked_pairs(x, freqs):
    pairs = torch.view_as_complex(torch.stack([wide(x)[..., 0::2], wide(x)[..., 1::2]], -1))
    return torch.view_as_real(pairs * freqs).flatten(3).type_as(x)


def transposed_halves(x, freqs):
    return torch.view_as_real(complex_halves(x) * freqs).transpose(-1, -2).flatten(-2).type_as(x)


def halves_by_unbind(x, freqs):
    return torch.cat(torch.view_as_real(complex_halves(x) * freqs).unbind(-1), -1).type_as(x)


def halves_by_index(x, freqs):
    y = torch.view_as_real(complex_halves(x) * freqs)
    return torch.cat([y[..., 0], y[..., 1]], -1).to(x.dtype)


def gemma(x, freqs):
    """As gemma_pytorch writes it: what it rounds are pairs."""
    y = torch.view_as_real(complex_halves(x) * freqs).type_as(x)
    y = torch.cat(torch.chunk(y, 2, dim=-1), dim=-2)
    return y.reshape(y.shape[0], y.shape[1], y.shape[2], -1)


def pairs_to_halves(x, freqs):
    return torch.cat(torch.view_as_real(torch.view_as_complex(wide(x).unflatten(-1, (-1, 2))) * freqs).unbind(-1), -1).type_as(x)


SPELLINGS = [
    contiguous_pairs, cast_behind_the_pairs, stacked_pairs, transposed_halves, halves_by_unbind, halves_by_index, gemma, pairs_to_halves,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_complex_rope_spelling_is_fused(function, dtype):
    assert_fused_and_accurate(function, dtype, freqs, fusion="complex_rope")


def halves_to_pairs(x):
    return torch.view_as_real(complex_halves(x) * freqs).flatten(3)


def imaginary_first(x):
    return torch.cat(torch.view_as_real(complex_halves(x) * freqs).unbind(-1)[::-1], -1)


def second_half_first(x):
    return torch.cat(torch.view_as_real(torch.view_as_complex(torch.stack(x.chunk(2, -1)[::-1], -1)) * freqs).unbind(-1), -1)


def halves_of_two(x):
    z = torch.view_as_complex(torch.stack([x[..., :4], (x * 2)[..., 4:]], -1))
    return torch.cat(torch.view_as_real(z * freqs).unbind(-1), -1)


def real_parts_twice(x):
    y = torch.view_as_real(complex_halves(x) * freqs)
    return torch.cat([y[..., 0], y[..., 0]], -1)


def rounded_in_between(x):
    y = torch.view_as_real(complex_halves(x) * freqs)
    return torch.cat([y[..., 0].half().float(), y[..., 1]], -1)


def written_in_between(x):
    x = x * 1
    first, _ = x.chunk(2, -1)
    first = first.clone()
    x.mul_(2)
    z = torch.view_as_complex(torch.stack([first, x.chunk(2, -1)[1]], -1))
    return torch.cat(torch.view_as_real(z * freqs).unbind(-1), -1)


OTHERS = {
    halves_to_pairs: "puts halves together as pairs", imaginary_first: "in another order than the kernel",
    second_half_first: "does not read the last dim of a tensor as pairs, or its halves", halves_of_two: "does not read the last dim",
    real_parts_twice: "in another order", rounded_in_between: "rounds to another dtype", written_in_between: "",
}  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_complex_rope_other_orders_are_left_alone_and_named(function):
    leaves = [torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2)]
    result, report = rewritten(function, leaves[0])
    assert report.count("complex_rope") == 0, str(report)
    assert OTHERS[function] in reasons(report, "complex_rope"), str(report)
    expected = function(leaves[1])
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
