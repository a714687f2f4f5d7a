"""EvoNorm-S0: spellings, roundings, and what must not match."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import reasons, rewritten, statuses
from tests.images import (
    C,
    G,
    H,
    N,
    W,
    check_layer_of_timm,
    check_rounding,
    column,
    compare,
    group_deviation,
    half,
    images,
    parameters,
)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layer", ["EvoNorm2dS0", "EvoNorm2dS0a"])
def test_evonorm_s0_of_timm(layer, train):
    check_layer_of_timm(layer, "evonorm_s0", 1, train)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
def test_evonorm_s0_of_the_paper(last, unbiased, device):
    def norm(x, v, w, b):
        deviation = torch.sqrt(x.view(N, G, C // G, H, W).var((2, 3, 4), unbiased=unbiased, keepdim=True) + 1e-5)
        deviation = deviation.expand(N, G, C // G, H, W).reshape(N, C, H, W)
        return x * torch.sigmoid(column(v) * x) / deviation * column(w) + column(b)

    def strided(x, v, w, b):
        return x * (x * column(v)).sigmoid() / group_deviation(x, G, unbiased) * column(w) + column(b)

    compare(strided if last else norm, "evonorm_s0", images(device, last=last), *parameters(device))


def test_evonorm_s0_with_parameters_of_four_dims():
    def norm(x, v, w, b):
        return x * (x * v).sigmoid() / group_deviation(x, G) * w + b

    compare(norm, "evonorm_s0", images(), *(column(p).clone() for p in parameters()))


def s0(x, deviation, v, w, b):
    return x * (x * column(v)).sigmoid() / deviation * column(w) + column(b)


def narrow(x):
    return (x.reshape(N, G, -1).var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()


NOT_S0 = {
    "groups interleaved": lambda x, v, w, b: s0(x, narrow(x).view(N, 1, G, 1, 1).expand(N, C // G, G, H, W).reshape(x.shape), v, w, b),
    "groups swapped": lambda x, v, w, b: s0(x, narrow(x)[:, [1, 0]].expand(N, G, C // G * H * W).reshape(x.shape), v, w, b),
    "first image's": lambda x, v, w, b: s0(x, narrow(x)[:1].expand(N, G, C // G * H * W).reshape(x.shape), v, w, b),
    "alpha": lambda x, v, w, b: torch.add(x * (x * column(v)).sigmoid() / group_deviation(x, G) * column(w), column(b), alpha=3),
    "rounded quotient": lambda x, v, w, b: torch.div(x * (x * column(v)).sigmoid(), group_deviation(x, G), rounding_mode="floor") * column(w) + column(b),
    "weight permuted": lambda x, v, w, b: s0(x, group_deviation(x, G), v, w[[7, 6, 5, 4, 3, 2, 1, 0]], b),
    "integer deviation": lambda x, v, w, b: s0(x, (1 + group_deviation(x, G)).int().float(), v, w, b),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_S0)
def test_what_is_no_evonorm_s0(name):
    torch.manual_seed(0)
    x, (v, w, b) = images(), parameters()
    y, report = rewritten(NOT_S0[name], x, v, w, b)
    torch.testing.assert_close(y, NOT_S0[name](x, v, w, b))
    if name != "weight permuted":  # that is a vector like another
        assert "fused" not in statuses(report, "evonorm_s0"), str(report)


def s0_of(x, v, w, b, at):
    """EvoNorm-S0 in float32 with one value rounded to bfloat16."""
    r = {at: half}.get
    same = lambda t: t  # noqa: E731
    deviation = group_deviation(r("x of the variance", same)(x), G)
    gate = (r("x of the sigmoid", same)(x) * column(r("v", same)(v))).sigmoid()
    y = x * r("sigmoid", same)(gate) / r("deviation", same)(deviation)
    return y * column(r("weight", same)(w)) + r("bias", same)(column(b))


@pytest.mark.parametrize("at", ["x of the variance", "x of the sigmoid", "v", "sigmoid", "deviation", "weight", "bias"])
def test_a_rounding_that_the_kernel_of_s0_has_not(at):
    check_rounding(s0_of, "evonorm_s0", at)


def test_a_near_miss_says_why():
    x, (v, w, b) = images(), parameters()
    _, report = rewritten(NOT_S0["groups interleaved"], x, v, w, b)
    assert "expands (3, 1, 2, 1, 1) to (3, 4, 2, 5, 6)" in reasons(report, "evonorm_s0")


def test_other_sigmoids_of_images_are_called_by_keyword():
    """One of them cost the graph all of its fusions."""

    def function(x, w):
        gate = torch.sigmoid(input=x) * torch.special.expit(input=x)
        return F.layer_norm(gate, (6,), w)

    inputs = torch.randn(2, 3, 4, 6), torch.randn(6)
    found, report = rewritten(function, *inputs, options={"select": "always"})
    torch.testing.assert_close(found, function(*inputs))
    assert report.count("layer_norm") == 1
