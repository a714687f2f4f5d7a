"""GeGLU: every spelling of the GELU, and what only looks like one."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import check_rewritten

a, b = torch.randn(6, 8), torch.randn(6, 8)


def tanh_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def erf_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


SPELLINGS = {
    "library": lambda a, b: F.gelu(a) * b,
    "library_tanh": lambda a, b: b * F.gelu(a, approximate="tanh"),
    "tanh": lambda a, b: tanh_gelu(a) * b,
    "fast": lambda a, b: b * fast_gelu(a),
    "erf": lambda a, b: erf_gelu(a) * b,
    "sigmoid": lambda a, b: a * torch.sigmoid(1.702 * a) * b,
    "sigmoid_first": lambda a, b: b * (torch.sigmoid(a * 1.702) * a),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    check_rewritten(SPELLINGS[name], a, b, rtol=1e-5, atol=1e-6, geglu=1)


LOOKALIKES = {
    "constant_off": lambda a, b: 0.5 * a * (1.0 + torch.tanh(0.7978845608 * (a + 0.0448 * a**3))) * b,
    "factor_off": lambda a, b: 0.49 * a * (1.0 + torch.erf(a / math.sqrt(2.0))) * b,
    "slope_1_7": lambda a, b: a * torch.sigmoid(1.7 * a) * b,
    "tanh_of_another": lambda a, b: 0.5 * a * (1.0 + torch.tanh(0.7978845608 * (b + 0.044715 * b**3))),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes(name):
    check_rewritten(LOOKALIKES[name], a, b, rtol=1e-5, atol=1e-6, swiglu=0, geglu=0)
