"""Gated linear units that write their results in e4m3: the bits are those of the two kernels that they stand for."""

import contextlib

import pytest
import torch

from fx_fusion.kernels.float8 import glu
from fx_fusion.kernels.float8.glu import quantize_glu, quantize_glu_bwd
from fx_fusion.kernels.float8.quantize import quantize_rows
from fx_fusion.kernels.lib.glu import ACTIVATIONS
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.ops.on_cpu import interpreting

pytestmark = pytest.mark.kernel
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1), (3, 130), (5, 1024), (2, 4096), (2, 16384 + 40)]
OPS = torch.ops.fx_fusion


def without_float8(dy, gate, up, kind):
    """y, dgate and dup of the ops that are used otherwise."""
    if kind == "silu":
        return OPS.swiglu(gate, up), *OPS.swiglu_bwd(dy, gate, up, [True, True])
    return OPS.geglu(gate, up, kind), *OPS.geglu_bwd(dy, gate, up, kind, [True, True])


def same(found, wanted):
    """Equal bits, NaNs alike; -0 is 0."""
    return torch.equal(found.double().nan_to_num(1e30), wanted.double().nan_to_num(1e30))


def check(dy, gate, up, kind, power_of_two):
    y, dgate, dup = without_float8(dy, gate, up, kind)
    rows = [quantize_rows(x, power_of_two) for x in (y, dgate, dup)]
    q, scale, stored = quantize_glu(gate, up, kind, power_of_two, True)
    assert same(q, rows[0][0])
    assert same(scale, rows[0][1])
    assert same(stored, y)
    found = quantize_glu_bwd(dy, gate, up, kind, power_of_two, [True, True, True])
    for one, other in zip(found, (*rows[1], *rows[2], dgate, dup, y), strict=True):
        assert same(one, other)
    beside = quantize_rows(torch.cat((dgate, dup), 1), power_of_two)
    q, scale, *nothing, found_dgate, found_dup, _ = quantize_glu_bwd(dy, gate, up, kind, power_of_two, [True] * 3, True)
    for one, other in zip((q, scale, found_dgate, found_dup), (*beside, dgate, dup), strict=True):
        assert same(one, other)
    assert [t.numel() for t in nothing] == [0, 0]


def operands(m, n, dtype):
    torch.manual_seed(0)
    return [torch.randn(m, n).mul(torch.logspace(-2, 1, n)).to(DEVICE, dtype) for _ in range(3)]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_as_two_kernels(kind, dtype, power_of_two):
    check(*operands(3, 130, dtype), kind, power_of_two)


@pytest.mark.parametrize("plan", [None, Plan(BLOCK=128, num_warps=4), Plan(BLOCK=2048, num_warps=8)])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_rows_of_every_length(m, n, plan):
    """In one pass, and computed twice."""
    with contextlib.ExitStack() as chosen:
        for planner in (glu.forward_plan, glu.backward_plan):
            chosen.enter_context(planner.instead(plan) if plan else contextlib.nullcontext())
        check(*operands(m, n, torch.bfloat16), "silu", False)


def test_rows_of_many_dims_and_halves_of_one_linear():
    both = operands(6, 2 * 96, torch.bfloat16)[0].view(2, 3, 192)
    gate, up = both.chunk(2, -1)
    dy = operands(6, 96, torch.bfloat16)[1].view(2, 3, 96)
    q, scale, y = quantize_glu(gate, up, "silu", False, True)
    assert (q.shape, scale.shape, y.shape) == ((6, 96), (6, 1), (6, 96))
    check(dy.flatten(0, 1), gate.flatten(0, 1), up.flatten(0, 1), "silu", False)


def test_what_is_not_wanted_is_empty():
    dy, gate, up = operands(3, 64, torch.bfloat16)
    assert quantize_glu(gate, up, "silu", False, False)[-1].numel() == 0
    for i in range(3):
        stored = [i == j for j in range(3)]
        assert [t.numel() > 0 for t in quantize_glu_bwd(dy, gate, up, "silu", False, stored)[4:]] == stored


def test_what_is_not_finite():
    """A row that holds a NaN or an infinity does not come out as numbers; zeros are zeros, the other rows are as they were."""
    dy, gate, up = operands(5, 64, torch.bfloat16)
    up[0, 3], up[1, 5], up[2] = float("nan"), float("inf"), 0.0
    if DEVICE == "cuda" or not interpreting():  # the interpreter knows no NaN in e4m3
        check(dy, gate, up, "silu", False)
    q, scale, _ = quantize_glu(gate, up, "silu", False, False)
    y = q.float() * scale
    assert (y[2] == 0).all()
    assert y[3:].isfinite().all()
