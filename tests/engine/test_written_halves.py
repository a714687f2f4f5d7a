"""New tensors that are written in two halves: which are one value, and which must stay as they are."""

import pytest
import torch

from tests.helpers import rewritten

x, y = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 4, 4, requires_grad=True)


def pairs(x, y):
    out = torch.empty_like(x)
    out[..., 0::2] = y.sin()
    out[..., 1::2] = y * 2
    return out * x


def halves(x, y):
    out = x.new_empty(3, 4, 8)
    out[:, :, :4] = y.sin()
    out[:, :, 4:] = y * 2
    return out, out + 1


def narrower(x, y):
    """The halves are rounded where they are written."""
    out = torch.empty(3, 4, 8, dtype=torch.bfloat16)
    out[..., ::2] = y.sin()
    out[..., 1::2] = y.bfloat16()
    return out + x


JOINED = [pairs, halves, narrower]


def the_other_way_round(x, y):
    out = torch.empty_like(x)
    out[..., 1::2] = y
    out[..., 0::2] = y.sin()
    return out * x


def one_half_twice(x, y):
    out = torch.zeros_like(x)
    out[..., 0::2] = y
    out[..., 0::2] = y.sin()
    return out * x


def written_again(x, y):
    out = torch.empty_like(x)
    out[..., 0::2] = y.sin()
    out[..., 1::2] = y * 2
    out[0] = 1.0
    return out * x


def read_between(x, y):
    out = torch.empty_like(x)
    out[..., 0::2] = y.sin()
    first = out[..., 0::2] * 3
    out[..., 1::2] = first
    return out * x


def broadcast(x, y):
    out = torch.empty_like(x)
    out[..., 0::2] = y[:1].sin()
    out[..., 1::2] = 2.0
    return out * x


def in_another_layout(x, y):
    out = torch.empty_like(x.transpose(0, 1))
    out[..., 0::2] = y.transpose(0, 1)
    out[..., 1::2] = y.transpose(0, 1).sin()
    return out


def without_gradient(x, y):
    out = torch.empty_like(x)
    with torch.no_grad():
        out[..., 0::2] = y.sin()
    out[..., 1::2] = y * 2
    return out * x


def written_to_between(x, y):
    out, a = torch.empty_like(x), y.sin()
    out[..., 0::2] = a
    out[..., 1::2] = a.mul_(2)
    return out * x


KEPT = [written_to_between, the_other_way_round, one_half_twice, written_again, read_between, broadcast, in_another_layout, without_gradient]


@pytest.mark.parametrize("function", [*JOINED, *KEPT], ids=lambda f: f.__name__)
def test_values_and_gradients(function):
    found, report = rewritten(function, x, y, options={"verify": True})
    expected = function(x, y)
    torch.testing.assert_close(found, expected)
    first = [t if isinstance(t, torch.Tensor) else t[0] for t in (found, expected)]
    ours, theirs = (torch.autograd.grad(t.square().sum(), (x, y), allow_unused=True) for t in first)
    torch.testing.assert_close(ours, theirs)
    joined = "written in two halves are one value" in str(report)
    assert joined == (function in JOINED), str(report)
    assert ("setitem(" in report.graphs[0].after) != joined
