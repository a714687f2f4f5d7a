"""EvoNorm-B0: the running statistics, roundings, and what must not match."""

import copy

import pytest
import torch

from fx_fusion.testing import Run, worst_excess
from tests.helpers import as_eager, rewritten, statuses
from tests.images import C, b0, batch_var, check_layer_of_timm, check_rounding, column, half, images, parameters


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("layer", "count"), [("EvoNorm2dB0", 1), ("EvoNorm2dB1", 0), ("EvoNorm2dB2", 0)])
def test_evonorm_b0_of_timm(layer, count, train):
    check_layer_of_timm(layer, "evonorm_b0", count, train)


class EvoNormB0(torch.nn.Module):
    """Liu et al. 2020, table 2, with a running variance."""

    def __init__(self, channels, how="copy"):
        super().__init__()
        for name in ("weight", "bias", "v"):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(channels)))
        self.register_buffer("running_var", torch.ones(channels))
        self.how = how

    def forward(self, x):
        if self.training:
            var = x.float().var(dim=(0, 2, 3), unbiased=False)
            if self.how == "copy":
                self.running_var.copy_(self.running_var * 0.9 + var.detach() * 0.1)
            else:
                with torch.no_grad():
                    self.running_var.mul_(0.9).add_(0.1 * var)
        else:
            var = self.running_var
        left = (var + 1e-3).sqrt().to(x.dtype).view(1, -1, 1, 1)
        right = x * column(self.v).to(x.dtype) + (x.float().var((2, 3), unbiased=False, keepdim=True) + 1e-3).sqrt().to(
            x.dtype
        )
        return x / left.max(right) * column(self.weight).to(x.dtype) + column(self.bias).to(x.dtype)


@pytest.mark.parametrize("how", ["copy", "no_grad"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evonorm_b0_and_its_running_variance(how, train, dtype, device):
    ours = EvoNormB0(C, how).train(train).to(device)
    theirs = copy.deepcopy(ours)
    exact = copy.deepcopy(ours).double()
    for seed in range(2):
        torch.manual_seed(seed)
        x = images(device, dtype)
        y, report = rewritten(ours, x, options={"fusions": ["evonorm_b0"]})
        assert report.count("evonorm_b0") == 1, str(report)
        made = {"ours": y, "theirs": theirs(x), "exact": exact(x.double())}
        for y in made.values():
            y.double().square().sum().backward()
        close(made["ours"], made["theirs"], made["exact"], dtype)
        close(ours.running_var, theirs.running_var, exact.running_var, torch.float32)
    for three in zip(ours.parameters(), theirs.parameters(), exact.parameters(), strict=True):
        close(*(parameter.grad for parameter in three), dtype)


def close(ours, theirs, exact, dtype):
    """By the accuracy rule."""
    ours, theirs, exact = (Run({"d": t.detach()}) for t in (ours, theirs, exact))
    _, used = worst_excess(ours, theirs, exact, dtype)
    assert used <= 1, f"uses {used:.2f} times the allowed error"


NOT_B0 = {
    "unbiased batch variance": lambda x, v, w, b, r: b0(x, (column(batch_var(x, unbiased=True)) + 1e-3).sqrt(), v, w, b),
    "variance written out": lambda x, v, w, b, r: b0(x, (column((x - x.mean((0, 2, 3), keepdim=True)).square().mean((0, 2, 3))) + 1e-3).sqrt(), v, w, b),
    "scaled deviation": lambda x, v, w, b, r: b0(x, (column(r) + 1e-3).sqrt() * 2, v, w, b),
    "clamped deviation": lambda x, v, w, b, r: b0(x, (column(r) + 1e-3).sqrt().clamp(min=0.9), v, w, b),
    "another eps": lambda x, v, w, b, r: b0(x, (column(r) + 0.1).sqrt(), v, w, b),
    "alpha": lambda x, v, w, b, r: b0(x, torch.add(column(r), 1e-3, alpha=3).sqrt(), v, w, b),
    "returned with a gradient": lambda x, v, w, b, r: b0(x, (column(batch_var(x)) + 1e-3).sqrt(), v, w, b) + batch_var(x).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_B0)
def test_what_is_no_evonorm_b0(name):
    torch.manual_seed(0)
    x, r, (v, w, b) = images().requires_grad_(), torch.rand(C) + 0.5, parameters()
    report = as_eager(NOT_B0[name], x, v, w, b, r)
    if name != "returned with a gradient":
        assert "fused" not in statuses(report, "evonorm_b0"), str(report)


def b0_of(x, v, w, b, at):
    """EvoNorm-B0 likewise."""
    r = {at: half}.get
    same = lambda t: t  # noqa: E731
    left = (column(r("statistic", same)(batch_var(r("x of the variance", same)(x)))) + 1e-3).sqrt()
    of_image = (r("x of an image", same)(x).var((2, 3), unbiased=False, keepdim=True) + 1e-3).sqrt()
    right = r("x of the product", same)(x) * column(r("v", same)(v)) + r("deviation", same)(of_image)
    return x / r("batch deviation", same)(left).max(right) * r("weight", same)(column(w)) + column(b)


@pytest.mark.parametrize(
    "at",
    ["statistic", "x of the variance", "x of an image", "x of the product", "v", "deviation", "batch deviation", "weight"],
)
def test_a_rounding_that_the_kernel_of_b0_has_not(at):
    check_rounding(b0_of, "evonorm_b0", at)
