"""Share what tests of norms of images need."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fx_fusion.testing import run, run_oracle, worst_excess
from tests.helpers import rewritten, statuses

N, C, G, H, W = 3, 8, 2, 5, 6


def compare(function, fusion, *tensors, count=1):
    """Outputs, strides and gradients through the rewriter against float64, by the accuracy rule."""
    inputs = {f"t{i}": t for i, t in enumerate(tensors)}

    def call(**named):
        return function(*named.values())

    outputs, report = rewritten(function, *tensors, options={"fusions": [fusion]})
    assert report.count(fusion) == count, str(report)
    assert outputs.stride() == promised(function, *tensors).stride()
    fused = run(lambda **named: rewritten(function, *named.values(), options={"fusions": [fusion]})[0], inputs)
    name, used = worst_excess(fused, run(call, inputs), run_oracle(call, inputs), tensors[0].dtype)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


def promised(function, *tensors):
    """The result as torch captures it, without its data. Of group_norm it is contiguous since torch 2.14, also where eager's
    lies channels last on a CPU; in both versions on a GPU."""
    with FakeTensorMode() as mode:
        return function(*(mode.from_tensor(t) for t in tensors))


def images(device="cpu", dtype=torch.float32, last=False):
    x = torch.randn(N, C, H, W, dtype=dtype, device=device)
    return x.to(memory_format=torch.channels_last) if last else x


def parameters(device="cpu", dtype=torch.float32):
    return tuple(torch.randn(C, dtype=dtype, device=device) for _ in range(3))


def group_deviation(x, groups, unbiased=False, eps=1e-5):
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, x.shape[2], x.shape[3])
    var = grouped.float().var(dim=(2, 3, 4), unbiased=unbiased, keepdim=True)
    return (var + eps).sqrt().to(x.dtype).expand(grouped.shape).reshape(x.shape)


def column(p):
    return p.view(1, -1, 1, 1)


def check_layer_of_timm(layer, fusion, count, train):
    """Outputs, gradients and running statistics of a norm of timm are eager's."""
    layers = pytest.importorskip("timm.layers.evo_norm")
    x = images().requires_grad_()
    ours = getattr(layers, layer)(C, **({"group_size": C // G} if "S0" in layer else {})).train(train)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_()
    theirs = copy.deepcopy(ours)
    y, report = rewritten(ours, x)
    expected = theirs(x)
    assert report.count(fusion) == count, str(report)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(expected)
    for norm, out in ((ours, y), (theirs, expected)):
        norm.dx = torch.autograd.grad(out, [x, *norm.parameters()], dy)
    for a, b in zip(ours.dx, theirs.dx, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def b0(x, left, v, w, b):
    right = x * column(v) + (x.float().var((2, 3), unbiased=False, keepdim=True) + 1e-3).sqrt().to(x.dtype)
    return x / left.to(x.dtype).max(right) * column(w) + column(b)


def batch_var(x, **how):
    return x.float().var((0, 2, 3), **{"unbiased": False, **how})


def half(t):
    """A rounding to bfloat16 and back."""
    return t.bfloat16().to(t.dtype)


def check_rounding(function, name, at):
    """Declined, and eager's numbers to the bit; without the rounding the same function fuses."""
    torch.manual_seed(0)
    x, (v, w, b) = images() * 3, parameters()
    y, report = rewritten(lambda *given: function(*given, at), x, v, w, b)
    assert "fused" not in statuses(report, name), str(report)
    assert torch.equal(y, function(x, v, w, b, at))
    _, report = rewritten(lambda *given: function(*given, ""), x, v, w, b)
    assert statuses(report, name) == ["fused"], str(report)
