"""Graphs that Inductor lays out channels last, and norms of images in them."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion import pipeline as sites
from fx_fusion.testing import run, run_oracle, worst_excess
from tests.helpers import rewritten
from tests.images import C, G, N, b0, batch_var, column, group_deviation, images, parameters

NORMS = {
    "group_norm": lambda x, v, w, b: F.group_norm(x, G, w, b),
    "group_norm_swish": lambda x, v, w, b: F.silu(F.group_norm(x, G, w, b)),
    "evonorm_s0": lambda x, v, w, b: x * (x * column(v)).sigmoid() / group_deviation(x, G) * column(w) + column(b),
    "evonorm_b0": lambda x, v, w, b: b0(x, (column(batch_var(x)) + 1e-3).sqrt(), v, w, b),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_that_inductor_lays_out_channels_last(name, dtype, monkeypatch):
    """The kernel runs channels last; the graph around it, results and gradients included, sees nothing of that."""
    monkeypatch.setattr(sites, "goes_channels_last", lambda graph: True)
    seen = []

    def network(x, v, w, b):
        y = NORMS[name](x * 2, v, w, b)
        seen.append(y.stride())
        return y.view(N, -1).sin()

    inputs = dict(zip("xvwb", (images(dtype=dtype), *parameters(dtype=dtype)), strict=True))
    fused = run(lambda **named: rewritten(network, *named.values())[0], inputs)
    _, report = rewritten(network, *inputs.values())
    assert report.count(name) == 1, str(report)
    after = report.graphs[-1].after
    assert after.count("fx_fusion.channels_last") == after.count("fx_fusion.any_layout") == 1
    named, used = worst_excess(fused, run(network, inputs), run_oracle(network, inputs), dtype)
    assert used <= 1, f"{named} uses {used:.2f} times the allowed error"
    assert set(seen) == {images().stride()}


def test_one_buffer_under_two_names_is_not_overwritten(monkeypatch):
    """Through Inductor: where x already lies channels last, x and its relaid copy are saved as one buffer."""
    monkeypatch.setattr(sites, "goes_channels_last", lambda graph: True)
    torch.manual_seed(0)
    conv, norm = torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.GroupNorm(4, 32)
    image, d = torch.randn(2, 16, 12, 12), torch.randn(2, 32, 12, 12)

    def gated(image, d):
        x = conv(image)
        return (norm(x) * x * d).sum()

    options = {"select": "always", "strict": True}
    with fx_fusion.recording() as report:
        compiled = torch.compile(gated, backend="fx_fusion", dynamic=False, options=options)
        found = torch.autograd.grad(compiled(image, d), [*conv.parameters(), *norm.parameters()])
    assert report.count("group_norm") == 1
    assert "fx_fusion.channels_last" in report.graphs[0].after
    expected = torch.autograd.grad(gated(image, d), [*conv.parameters(), *norm.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_what_a_view_of_is_returned_lies_as_the_graph_says(monkeypatch):
    monkeypatch.setattr(sites, "goes_channels_last", lambda graph: True)
    _, report = rewritten(lambda x, w, b: F.group_norm(x, G, w, b)[:, :, ::2], images(), *parameters()[:2])
    assert report.count("group_norm") == 1
    assert "any_layout" not in report.graphs[0].after


def test_parameters_shaped_as_the_images_are_no_images(monkeypatch):
    monkeypatch.setattr(sites, "goes_channels_last", lambda graph: True)

    def norm(x, v, w, b):
        grouped = x.reshape(1, G, C // G, 1, 1)
        deviation = (grouped.float().var(dim=(2, 3, 4), unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * (x * v).sigmoid() / deviation.to(x.dtype).expand(grouped.shape).reshape(x.shape) * w + b

    _, report = rewritten(norm, torch.randn(1, C, 1, 1), *(column(p).clone() for p in parameters()))
    assert report.count("evonorm_s0") == 1, str(report)
    assert report.graphs[0].after.count("fx_fusion.channels_last") == 1
