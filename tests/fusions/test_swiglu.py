"""SwiGLU: spellings, and what only looks like it."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import check_rewritten, reasons, rewritten

a, b = torch.randn(6, 8), torch.randn(6, 8)

SPELLINGS = {
    "silu": lambda a, b: F.silu(a) * b,
    "up_first": lambda a, b: b * F.silu(a),
    "sigmoid": lambda a, b: a * torch.sigmoid(a) * b,
    "methods": lambda a, b: b.mul(a.sigmoid().mul(a)),
    "not_in_place": lambda a, b: F.silu(a, inplace=False) * b,
    "chunks": lambda a, b: (lambda h: F.silu(h[0]) * h[1])(torch.cat([a, b], -1).chunk(2, -1)),
    "slices": lambda a, b: (lambda h: h[..., 8:] * F.silu(h[..., :8]))(torch.cat([a, b], -1)),
    "split": lambda a, b: (lambda h: F.silu(h[0]) * h[1])(torch.split(torch.cat([a, b], -1), 8, dim=-1)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    check_rewritten(SPELLINGS[name], a, b, rtol=1e-5, atol=1e-6, swiglu=1)


LOOKALIKES = {
    "gate_of_another": lambda a, b: a * torch.sigmoid(b),
    "broadcast": lambda a, b: F.silu(a) * b[:1],
    "relu": lambda a, b: F.relu(a) * b,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes(name):
    check_rewritten(LOOKALIKES[name], a, b, rtol=1e-5, atol=1e-6, swiglu=0, geglu=0)


def test_reasons():
    _, report = rewritten(lambda a, b: F.silu(a) * b[:1], a, b)
    assert report.count("swish") == 1, "silu alone still is one"

    def escapes(a, b):
        s = F.silu(a)
        return s * b + s

    result, report = rewritten(escapes, a, b, options={"fusions": ["swiglu"]})
    assert "also used outside the pattern" in reasons(report, "swiglu")
    torch.testing.assert_close(result, escapes(a, b))
    _, report = rewritten(lambda a, b: F.silu(a) * b, a, b.double(), options={"fusions": ["swiglu"]})
    assert "one dtype" in reasons(report, "swiglu")


def test_an_activation_in_place_on_a_live_value():
    def live(a, b):
        a = a + 0
        s = F.silu(a, inplace=True)
        return s * b, a

    result, report = rewritten(live, a, b)
    report.assert_fused(swiglu=0)
    expected = live(a.clone(), b)
    torch.testing.assert_close(result[0], expected[0])
    torch.testing.assert_close(result[1], expected[1])
