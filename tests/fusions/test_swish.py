"""Swish: an activation whose result is no factor of a gate."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import check_rewritten

a, b = torch.randn(6, 8), torch.randn(6, 8)

SPELLINGS = {
    "silu": lambda a, b: F.silu(a) + b,
    "sigmoid": lambda a, b: a * torch.sigmoid(a),
    "sigmoid_first": lambda a, b: torch.sigmoid(a) * a - b,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    check_rewritten(SPELLINGS[name], a, b, rtol=1e-5, atol=1e-6, swish=1)


LOOKALIKES = {
    "of_another": lambda a, b: a * torch.sigmoid(b),
    "scaled": lambda a, b: a * torch.sigmoid(1.5 * a),
    "tanh": lambda a, b: a * torch.tanh(a),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes(name):
    check_rewritten(LOOKALIKES[name], a, b, rtol=1e-5, atol=1e-6, swish=0)
