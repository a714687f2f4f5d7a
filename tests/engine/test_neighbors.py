"""Pointwise ops beside a norm, which Inductor computes in the norm's own kernel: sites whose gain they take are kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fusion
from fx_fusion.graph.devices import planning_for

N = 1024


class Block(nn.Module):
    """A residual block: what is in front of the sum and behind the norm differs."""

    def __init__(self, front=None, behind=None):
        super().__init__()
        self.front, self.behind = front, behind
        self.linear, self.out, self.norm = nn.Linear(N, N), nn.Linear(N, N), nn.LayerNorm(N)
        self.scale = nn.Parameter(torch.ones(N))

    def forward(self, x, residual):
        x = self.linear(x)
        h = residual + (x if self.front is None else self.front(x, self.scale))
        y = self.norm(h)
        return self.out(y if self.behind is None else self.behind(y, self.scale)), h


def explained(model, rows=16384, grad=True, **options):
    with FakeTensorMode(allow_non_fake_inputs=True), planning_for("NVIDIA H200"), torch.set_grad_enabled(grad):
        given = [torch.empty(4, rows // 4, N, dtype=torch.bfloat16, requires_grad=grad) for _ in range(2)]
        torch.set_default_dtype(torch.bfloat16)
        try:
            made = model()
        finally:
            torch.set_default_dtype(torch.float32)
        return fx_fusion.explain(made.requires_grad_(grad), *given, options=options)


def norm_of(report):
    (site,) = [s for s in report.sites if "layer_norm" in s.fusion]
    return site


def passes(report):
    """Return how often neighbors read and write a tensor."""
    microseconds = norm_of(report).estimate.get("beside", 0)
    return round(microseconds * 4e12 / 1e6 / (2 * 16384 * N))


def layer_scale(x, scale):
    return x * scale


def modulate(y, scale):
    return y * (1 + scale) + scale


def dropped(x, scale):
    return F.dropout(x, 0.1)


@pytest.mark.parametrize(
    ("block", "grad", "count"),
    [
        (lambda: Block(), True, 0),
        (lambda: Block(front=layer_scale), True, 3),  # written, read; the sum's gradient read once more
        (lambda: Block(front=layer_scale), False, 2),
        (lambda: Block(front=dropped), True, 3),
        (lambda: Block(behind=modulate), True, 4),  # written, read; its gradient written, read
        (lambda: Block(behind=modulate), False, 2),
        (lambda: Block(behind=lambda y, scale: modulate(y, scale) + F.linear(y, torch.ones(N, N).bfloat16())), True, 3),
        (lambda: Block(front=layer_scale, behind=modulate), True, 7),
        (lambda: Block(behind=lambda y, scale: y + scale), True, 2),  # a sum's gradient is the one that comes in
        (lambda: Block(front=lambda x, scale: x.view(-1, N).view_as(x)), True, 0),
        (lambda: Block(front=lambda x, scale: torch.reshape(input=x * scale, shape=x.shape)), True, 3),
        (lambda: Block(behind=lambda y, scale: torch.flatten(input=y, end_dim=1).mul(scale)), True, 4),
        (lambda: Block(behind=lambda y, scale: y[..., ::2].mul(2).repeat(1, 1, 2)), True, 0),  # another size
    ],
)  # fmt: skip
def test_how_often_they_read_and_write(block, grad, count):
    assert passes(explained(block, grad=grad, select="always")) == count


@pytest.mark.parametrize(("front", "behind", "op"), [(layer_scale, None, "mul"), (None, modulate, "mul")])
def test_a_site_whose_gain_they_take_is_kept(front, behind, op):
    """LayerScale (DINOv2), and the modulation of a diffusion transformer. The norm without its sum is none either."""
    site = norm_of(explained(lambda: Block(front, behind)))
    assert site.status == "kept"
    assert f"Inductor's kernel computes the {op} beside it too" in site.reason
    assert site.estimate["speed"] < 1


def test_who_asks_for_it_gets_it():
    assert norm_of(explained(lambda: Block(layer_scale), select="always")).status == "fused"


def test_without_neighbors_it_pays():
    site = norm_of(explained(Block))
    assert (site.status, "beside" in site.estimate) == ("fused", False)


def test_an_op_with_several_results():
    def model():
        made = Block(front=layer_scale)
        made.norm.forward = lambda h: torch.native_layer_norm(h, (N,), made.norm.weight, made.norm.bias, 1e-5)[0]
        return made

    report = explained(model)
    assert not any(graph.fallback for graph in report.graphs)
    assert norm_of(report).status in ("kept", "fused")


class Two(nn.Module):
    """Two layers: the sum of the first, which a kernel of its own stores, is the second's residual."""

    def __init__(self, kind=nn.LayerNorm):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        self.norms = nn.ModuleList(kind(N) for _ in range(2))

    def forward(self, x, residual):
        h = residual + self.linears[0](x)
        h = h + self.linears[1](self.norms[0](h))
        return self.linears[2](self.norms[1](h))


def test_what_another_kernel_stores_is_no_neighbor():
    sites = explained(Two).sites
    assert [(s.fusion, s.status, "beside" in s.estimate) for s in sites] == [("add_layer_norm", "fused", False)] * 2


class Sandwich(nn.Module):
    """Gemma's: a norm behind the linear, in front of the sum of the next norm."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.first, self.second = nn.Linear(N, N), nn.Linear(N, N), nn.RMSNorm(N), nn.RMSNorm(N)

    def forward(self, x, residual):
        h = residual + self.first(self.a(x))
        return self.b(self.second(h)), h


def test_ops_of_other_sites_are_no_neighbors():
    report = explained(Sandwich)
    assert (report.count("rms_norm"), report.count("add_rms_norm")) == (1, 1), str(report)
    assert all("beside" not in s.estimate for s in report.sites)


class AfterConvolution(nn.Module):
    """A norm of a convolution's channels, as in ConvNeXt: they are the last dim behind a permutation."""

    def __init__(self, bias=True):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(N, N, 7, padding=3, groups=N, bias=bias), nn.LayerNorm(N), nn.Linear(N, N)

    def forward(self, x, _):
        return self.out(self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2).contiguous()))


@pytest.mark.parametrize(
    ("bias", "grad", "count"),
    [(True, True, 3), (True, False, 1), (False, True, 2), (False, False, 0)],  # the bias added; the gradient laid out anew
)
def test_a_convolution_in_front(bias, grad, count):
    """Inductor adds its bias, and lays its gradient out, in the norm's kernels."""
    assert passes(explained(lambda: AfterConvolution(bias), grad=grad, select="always")) == count


def test_a_norm_behind_a_convolution_is_kept():
    site = norm_of(explained(AfterConvolution))
    assert site.status == "kept"
    assert "the bias of a convolution beside it too" in site.reason
