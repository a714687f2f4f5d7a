"""GroupNorm and EvoNorm in graphs: layouts, spellings, the running statistics, and what must not match."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fx_fusion
from fx_fusion import pipeline as sites
from fx_fusion.fusion.registry import fusion_named
from fx_fusion.kernels.lib.image_tiles import empty_images
from fx_fusion.testing import Run, eager_nearby, nudged, run, run_oracle, worst_excess
from tests.helpers import as_eager, reasons, rewritten, statuses

N, C, G, H, W = 3, 8, 2, 5, 6


def compare(function, fusion, *tensors, count=1):
    """Outputs, strides and gradients through the rewriter against float64, by the accuracy rule."""
    inputs = {f"t{i}": t for i, t in enumerate(tensors)}

    def call(**named):
        return function(*named.values())

    outputs, report = rewritten(function, *tensors, options={"fusions": [fusion]})
    assert report.count(fusion) == count, str(report)
    expected = function(*tensors)
    assert outputs.stride() == expected.stride()
    fused = run(lambda **named: rewritten(function, *named.values(), options={"fusions": [fusion]})[0], inputs)
    name, used = worst_excess(fused, run(call, inputs), run_oracle(call, inputs), tensors[0].dtype)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


def images(device="cpu", dtype=torch.float32, last=False):
    x = torch.randn(N, C, H, W, dtype=dtype, device=device)
    return x.to(memory_format=torch.channels_last) if last else x


def parameters(device="cpu", dtype=torch.float32):
    return tuple(torch.randn(C, dtype=dtype, device=device) for _ in range(3))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("swish", [False, True])
def test_group_norm_in_both_layouts(last, swish, device):
    w, b, _ = parameters(device)

    def norm(x, w, b):
        y = F.group_norm(x, G, w, b)
        return y * torch.sigmoid(y) if swish else y

    compare(norm, "group_norm_swish" if swish else "group_norm", images(device, last=last), w, b)


@pytest.mark.parametrize("shape", [(2, 6, 7), (2, 6, 4, 5), (2, 6, 3, 4, 5), (2, 6, 1, 4)])
def test_results_of_both_passes_are_allocated_apart(shape):
    """AOTAutograd takes two equal ``empty_strided`` for one value: the forward then saved its result unwritten for the
    backward, and both passes copied it before they wrote to it."""
    x = torch.empty(shape).movedim(1, -1).contiguous().movedim(-1, 1)
    traced = make_fx(lambda x: (empty_images(x) + 1, empty_images(x) + 2), select_decomp_table(), tracing_mode="fake")(x)
    made = [node for node in fx_graph_cse(traced.graph).nodes if "empty" in str(node.target)]
    assert len(made) == 2
    assert empty_images(x).movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("shape", [(2, 6, 7), (2, 6, 3, 4, 5), (1, 6, 1), (2, 6, 0), (0, 6, 4, 4)])
def test_group_norm_of_other_ranks_and_of_nothing(shape):
    x = torch.randn(shape)
    if 0 in shape:
        y, report = rewritten(lambda x: F.group_norm(x, 3), x)
        assert y.shape == x.shape
        assert report.count("group_norm") == 1
    else:
        compare(lambda x: F.group_norm(x, 3), "group_norm", x)


def group_deviation(x, groups, unbiased=False, eps=1e-5):
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, x.shape[2], x.shape[3])
    var = grouped.float().var(dim=(2, 3, 4), unbiased=unbiased, keepdim=True)
    return (var + eps).sqrt().to(x.dtype).expand(grouped.shape).reshape(x.shape)


def column(p):
    return p.view(1, -1, 1, 1)


NOT_GROUP_NORM = {
    "statistics over rows": lambda x, w, b: F.layer_norm(x, (W,)),
    "statistics over the batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "written out, unbiased": lambda x, w, b: written_out(x, 1) * column(w) + column(b),
    "in float64": lambda x, w, b: F.group_norm(x.double(), G, w.double(), b.double()).float(),
}
NOT_SWISH = {
    "another activation": lambda x, w, b: F.gelu(F.group_norm(x, G, w, b)),
    "a scaled sigmoid": lambda x, w, b: (lambda y: y * torch.sigmoid(1.702 * y))(F.group_norm(x, G, w, b)),
    "another tensor's sigmoid": lambda x, w, b: F.group_norm(x, G, w, b) * torch.sigmoid(x),
    "the norm is used as well": lambda x, w, b: (lambda y: F.silu(y) + y)(F.group_norm(x, G, w, b)),
}


def written_out(x, correction):
    rows = x.reshape(N, G, -1)
    return ((rows - rows.mean(2, keepdim=True)) / (rows.var(2, keepdim=True, correction=correction) + 1e-5).sqrt()).view_as(
        x
    )


@pytest.mark.parametrize("name", [*NOT_GROUP_NORM, *NOT_SWISH])
def test_what_is_no_group_norm(name):
    function = (NOT_GROUP_NORM | NOT_SWISH)[name]
    x, (w, b, _) = images().requires_grad_(), parameters()
    report = as_eager(function, x, w, b)
    assert "fused" not in statuses(report, "group_norm_swish"), str(report)
    assert report.count("group_norm") == (name in NOT_SWISH), str(report)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("layer", "fusion", "count"),
    [("EvoNorm2dS0", "evonorm_s0", 1), ("EvoNorm2dS0a", "evonorm_s0", 1), ("EvoNorm2dB0", "evonorm_b0", 1),
     ("EvoNorm2dB1", "evonorm_b0", 0), ("EvoNorm2dB2", "evonorm_b0", 0)],
)  # fmt: skip
def test_the_norms_of_timm(layer, fusion, count, train):
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


@pytest.mark.parametrize("name", ["group_norm", "group_norm_swish", "evonorm_s0", "evonorm_b0"])
def test_channels_longer_than_the_kernels_count(name):
    fusion = fusion_named(name)
    given = {n: torch.empty(4, device="meta") if n in ("v", "weight", "bias") else 2 for n in fusion.inputs if n != "x"}
    for positions, said in (
        (2**30 - 1, None),
        (2**30, "a channel of 1073741824 positions; the kernel takes fewer than 2^30"),
    ):
        x = torch.empty(1, 4, 1, positions, device="meta", dtype=torch.bfloat16)
        assert fusion.guard(**{**given, "x": x, **({"running_var": None} if name == "evonorm_b0" else {})}) == said


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


def b0(x, left, v, w, b):
    right = x * column(v) + (x.float().var((2, 3), unbiased=False, keepdim=True) + 1e-3).sqrt().to(x.dtype)
    return x / left.to(x.dtype).max(right) * column(w) + column(b)


def batch_var(x, **how):
    return x.float().var((0, 2, 3), **{"unbiased": False, **how})


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


def half(t):
    """A rounding to bfloat16 and back."""
    return t.bfloat16().to(t.dtype)


def s0_of(x, v, w, b, at):
    """EvoNorm-S0 in float32 with one value rounded to bfloat16."""
    r = {at: half}.get
    same = lambda t: t  # noqa: E731
    deviation = group_deviation(r("x of the variance", same)(x), G)
    gate = (r("x of the sigmoid", same)(x) * column(r("v", same)(v))).sigmoid()
    y = x * r("sigmoid", same)(gate) / r("deviation", same)(deviation)
    return y * column(r("weight", same)(w)) + r("bias", same)(column(b))


def b0_of(x, v, w, b, at):
    """EvoNorm-B0 likewise."""
    r = {at: half}.get
    same = lambda t: t  # noqa: E731
    left = (column(r("statistic", same)(batch_var(r("x of the variance", same)(x)))) + 1e-3).sqrt()
    of_image = (r("x of an image", same)(x).var((2, 3), unbiased=False, keepdim=True) + 1e-3).sqrt()
    right = r("x of the product", same)(x) * column(r("v", same)(v)) + r("deviation", same)(of_image)
    return x / r("batch deviation", same)(left).max(right) * r("weight", same)(column(w)) + column(b)


ROUNDED = [
    *((s0_of, "evonorm_s0", at) for at in ("x of the variance", "x of the sigmoid", "v", "sigmoid", "deviation", "weight", "bias")),
    *((b0_of, "evonorm_b0", at) for at in ("statistic", "x of the variance", "x of an image", "x of the product", "v", "deviation", "batch deviation", "weight")),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name", "at"), ROUNDED, ids=lambda p: p if isinstance(p, str) else "")
def test_a_rounding_that_the_kernel_has_not(function, name, at):
    """Declined, and eager's numbers to the bit; without the rounding the same function fuses."""
    torch.manual_seed(0)
    x, (v, w, b) = images() * 3, parameters()
    y, report = rewritten(lambda *given: function(*given, at), x, v, w, b)
    assert "fused" not in statuses(report, name), str(report)
    assert torch.equal(y, function(x, v, w, b, at))
    _, report = rewritten(lambda *given: function(*given, ""), x, v, w, b)
    assert statuses(report, name) == ["fused"], str(report)


def test_a_near_miss_says_why():
    x, (v, w, b) = images(), parameters()
    _, report = rewritten(NOT_S0["groups interleaved"], x, v, w, b)
    assert "expands (3, 1, 2, 1, 1) to (3, 4, 2, 5, 6)" in reasons(report, "evonorm_s0")


def test_nearly_tied_elements_may_go_either_way():
    """As the maximum of EvoNorm-B0: the accuracy rule takes eager's largest error over inputs within a rounding."""

    def largest(x, least):
        return torch.maximum(least, x).square().sum(1)

    x = torch.randn(4, 1000)
    inputs = {"x": x, "least": x.clone()}
    oracle, eager, fused = run_oracle(largest, inputs), run(largest, inputs), run(largest, nudged(inputs, 99))
    assert worst_excess(fused, eager, oracle, torch.float32)[1] > 1000
    nearby = eager_nearby(largest, inputs, oracle)
    assert worst_excess(fused, nearby, oracle, torch.float32)[1] <= 1
    wrong = Run({**fused.values, "dx": fused.values["dx"] * 3})
    assert worst_excess(wrong, nearby, oracle, torch.float32)[1] > 1
