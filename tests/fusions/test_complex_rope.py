"""Rotations by complex numbers."""

import pytest
import torch

from tests.helpers import rewritten


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
