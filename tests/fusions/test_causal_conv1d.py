"""Short causal convolutions of channels: how models write them, what only looks like one, and how the results lie."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fx_fusion
from fx_fusion.kernels import causal_conv1d as kernels
from fx_fusion.kernels.causal_conv1d import causal_conv1d
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons, rewritten, statuses

B, C, T, TAPS = 2, 12, 21, 4
x, weight, bias = torch.randn(B, C, T), torch.randn(C, 1, TAPS), torch.randn(C)
rows = torch.randn(B, T, 2 * C)  # of a linear layer, whose channels are innermost


def cut(x, w, b, padding=TAPS - 1, **options):
    return F.conv1d(x, w, b, padding=padding, groups=C, **options)[:, :, :T]


def padded(x, w, b, sizes=(TAPS - 1, 0), **options):
    return F.conv1d(F.pad(x, sizes, **options), w, b, groups=C)


class Layer(nn.Conv1d):
    """A module of its own, as Mamba's first code has it."""

    def __init__(self):
        super().__init__(C, C, TAPS, padding=TAPS - 1, groups=C)

    def forward(self, x):
        return F.silu(super().forward(x)[..., : x.shape[2]])


FIRES = {
    "cut": cut,
    "cut, then SiLU": lambda x, w, b: F.silu(cut(x, w, b)),
    "cut by narrow": lambda x, w, b: F.conv1d(x, w, b, 1, (TAPS - 1,), (1,), C).narrow(2, 0, T),
    "padded in front": padded,
    "padded in front, then SiLU": lambda x, w, b: nn.SiLU()(padded(x, w, b)),
    "without a bias": lambda x, w, b: F.silu(cut(x, w, None)),
    "channels of a product": lambda x, w, b: F.silu(cut(rows[..., C:].transpose(1, 2), w, b)).transpose(1, 2),
    "gates around it": lambda x, w, b: x.tanh() * cut(x.sigmoid() * x, w, b),
    "weight of a matrix": lambda x, w, b: cut(x, w.squeeze(1).unsqueeze(1), b),
}
LEFT = {
    "what is behind the tokens, too": lambda x, w, b: F.conv1d(x, w, b, padding=TAPS - 1, groups=C),
    "the last tokens": lambda x, w, b: F.conv1d(x, w, b, padding=TAPS - 1, groups=C)[..., TAPS - 1 :],
    "padded behind, too": lambda x, w, b: padded(x, w, b, (TAPS - 1, 1)),
    "padded behind": lambda x, w, b: padded(x, w, b, (0, TAPS - 1)),
    "padded with ones": lambda x, w, b: padded(x, w, b, value=1.0),
    "padded with what is there": lambda x, w, b: padded(x, w, b, mode="replicate"),
    "same padding": lambda x, w, b: F.conv1d(x, w[..., 1:], b, padding="same", groups=C),
    "dilated": lambda x, w, b: cut(x, w, b, dilation=2),
    "strided": lambda x, w, b: F.conv1d(x, w, b, 2, TAPS - 1, groups=C)[..., :T],
    "channels in pairs": lambda x, w, b: F.conv1d(x, w.expand(C, 2, TAPS), b, padding=TAPS - 1, groups=C // 2)[..., :T],
    "two results a channel": lambda x, w, b: F.conv1d(x, w.repeat(2, 1, 1), None, padding=TAPS - 1, groups=C)[..., :T],
    "no batch": lambda x, w, b: F.conv1d(x[0], w, b, padding=TAPS - 1, groups=C)[..., :T],
}


@pytest.mark.parametrize("spelling", FIRES)
def test_fires(spelling):
    y, report = rewritten(FIRES[spelling], x, weight, bias)
    report.assert_fused(causal_conv1d=1)
    torch.testing.assert_close(y, FIRES[spelling](x, weight, bias))


@pytest.mark.parametrize("spelling", LEFT)
def test_is_left_alone(spelling):
    y, report = rewritten(LEFT[spelling], x, weight, bias)
    assert "fused" not in statuses(report, "causal_conv1d")
    torch.testing.assert_close(y, LEFT[spelling](x, weight, bias))


def test_a_module():
    layer = Layer()
    y, report = rewritten(layer, x)
    report.assert_fused(causal_conv1d=1)
    torch.testing.assert_close(y, layer(x))


def test_results_behind_the_tokens_are_a_near_miss():
    _, report = rewritten(LEFT["what is behind the tokens, too"], x, weight, bias)
    assert "more is read than the first of its results" in reasons(report, "causal_conv1d")


def test_more_taps_are_declined():
    long = torch.randn(C, 1, 31)
    _, report = rewritten(lambda x, w: F.conv1d(x, w, padding=30, groups=C)[..., :T], x, long)
    assert "31 taps; the kernel keeps up to 4 tokens in registers" in reasons(report, "causal_conv1d")


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.view(B, C * T), lambda y: y.view(B * C, T), lambda y: y.transpose(1, 2).view(B, T, 3, C // 3),
        lambda y: y.contiguous().view(-1), lambda y: y.mT.split([C // 2, C // 2], -1)[1].tanh(), lambda y: y.to(y.dtype).mT,
    ],
)  # fmt: skip
def test_views_of_the_result(view):
    """A kernel writes channels innermost. Views that eager allows stay possible."""
    function = lambda x, w, b: view(F.silu(padded(x, w, b)))  # noqa: E731
    for operand in (x, x.mT.contiguous().mT):
        y, report = rewritten(function, operand, weight, bias)
        report.assert_fused(causal_conv1d=1)
        torch.testing.assert_close(y, function(operand, weight, bias))


def test_written_to_in_place():
    def function(x, w, b):
        y = F.silu(cut(x, w, b))
        y[:, 0] += 1
        return y.add_(x)

    y, report = rewritten(function, x, weight, bias)
    report.assert_fused(causal_conv1d=1)
    torch.testing.assert_close(y, function(x, weight, bias))


# What ``reshape`` and ``contiguous`` copy of a tensor with gaps, they don't copy of one without.
COPIES = {
    "contiguous": lambda y: (y.contiguous().add_(1), y * 2),
    "reshape": lambda y: (y.reshape(B, -1).mul_(3), y * 2),
    "flatten": lambda y: (y.flatten(1).zero_(), y.sum()),
    "relu in place": lambda y: F.relu(y.reshape(B, -1), inplace=True).view(y.shape) + y,
    "of a transposed one": lambda y: (y.mT.contiguous().add_(1), y.mT.reshape(B, -1).add_(1), y + 1),
    "strides": lambda y: torch.as_strided(y, (B, C, T - 1, 2), (*y.stride(), y.stride(2))).sum(-1),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_result_with_gaps_stay_copies(how):
    function = lambda x, w, b: COPIES[how](cut(x, w, b))  # noqa: E731
    y, report = rewritten(function, x, weight, bias)
    report.assert_fused(causal_conv1d=1)
    torch.testing.assert_close(y, function(x, weight, bias))


def test_copies_that_are_returned_have_memory_of_their_own():
    def function(x, w, b):
        y = cut(x, w, b)
        return y.reshape(-1), y.flatten(), y.contiguous()

    results, _ = rewritten(function, x, weight, bias)
    assert len({t.data_ptr() for t in results}) == 3


def test_under_autocast():
    """Parameters in float32, as a Trainer with bf16=True has them: autocast casts all three."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    found = []
    for compiled in (False, True):
        function = lambda x, w, b: F.silu(cut(x, w, b))  # noqa: E731
        with torch.autocast("cpu", dtype=torch.bfloat16), fx_fusion.recording() as report:
            y = (torch.compile(function, backend=rewriting_backend()) if compiled else function)(*leaves)
        found.append((y.dtype, y, *torch.autograd.grad(y.float().square().mean(), leaves)))
    report.assert_fused(causal_conv1d=1)
    assert found[0][0] == found[1][0] == torch.bfloat16
    for ours, eager in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=1e-3)


@pytest.mark.kernel
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_infinity_goes_as_far_as_there_are_taps(taps):
    w, given, dy = torch.ones(C, 1, taps), x.clone().requires_grad_(), torch.ones(B, C, T)
    given.data[0, 0, 5] = dy[0, 1, 9] = float("inf")
    found = []
    for function in (lambda x, w: cut(x, w, None, padding=taps - 1), None):
        if function is None:
            function = lambda x, w: causal_conv1d(x, w, None, False)  # noqa: E731
        y = function(given, w)
        found.append((y.isfinite(), torch.autograd.grad(y, given, dy)[0].isfinite()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not found[0][0][0, 0, 5 : 5 + taps].any()


def test_written_to_where_nothing_is_copied():
    """A result that needs no other strides is no view of another tensor."""
    one, padded_one = x[:, :, :1], lambda x, w, b: F.silu(padded(x, w, b)).add_(1)
    y, report = rewritten(padded_one, one, weight.clone().requires_grad_(), bias)
    report.assert_fused(causal_conv1d=1)
    torch.testing.assert_close(y, padded_one(one, weight, bias))


def test_room_for_a_result_is_no_other_results_room():
    """AOTAutograd merges equal calls of ``empty_strided``: several layers would share a result, which Inductor copies."""

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    names = set()
    with Called():
        y = kernels._fwd(torch.randn(0, C, T), weight, bias, True)
    assert y.stride() == (C * T, 1, C)
    assert torch.ops.aten.empty in names
    assert torch.ops.aten.empty_strided not in names


def test_other_lengths():
    function = lambda x, w, b: F.silu(F.conv1d(x, w, b, padding=TAPS - 1, groups=C)[..., : x.shape[-1]]).mT  # noqa: E731
    compiled = torch.compile(function, backend=rewriting_backend(), dynamic=True)
    with fx_fusion.recording() as report:
        for tokens in (T, 5, 40):
            given = torch.randn(B, C, tokens)
            torch.testing.assert_close(compiled(given, weight, bias), function(given, weight, bias))
    report.assert_fused(causal_conv1d=1)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "mamba2", "falcon_mamba"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_functions_of_transformers(family, activation):
    """Read what stands in for the causal_conv1d package, in whatever folder."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    module = importlib.import_module(module.__name__)
    if not hasattr(module, "causal_conv1d_fn"):
        pytest.skip("this transformers has no causal_conv1d_fn there")
    function = lambda x, w, b: module.causal_conv1d_fn(x, w.squeeze(1), b, activation=activation)  # noqa: E731
    y, report = rewritten(function, x, weight, bias)
    report.assert_fused(causal_conv1d=1)
    torch.testing.assert_close(y, function(x, weight, bias))
