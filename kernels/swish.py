"""Swish (SiLU).

    y  = x σ                          σ = sigmoid(x)
    dx = dy σ (1 + x (1 − σ))

Shapes     x, y: any; results contiguous.
Dtypes     bf16 | fp16 | fp32; arithmetic in fp32, one rounding per store.
Saved      x.
Traffic    forward 2 elements an element, backward 3.
Source     Ramachandran et al. 2017, arXiv:1710.05941.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.divisibility import multiple, unit_of
from fx_fusion.kernels.lib.glu import SILU, activation
from fx_fusion.kernels.lib.integers import cdiv
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.ops.fused_op import fused_op
from fx_fusion.ops.launch import launch


@triton.jit
def _swish_fwd_kernel(x_ptr, y_ptr, numel, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    numel = multiple(numel, UNIT)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < numel, 0.0)
    y, _ = activation(x.to(tl.float32), SILU, x.dtype == tl.float32)
    tl.store(y_ptr + i, y.to(x.dtype), i < numel)


@triton.jit
def _swish_bwd_kernel(dy_ptr, x_ptr, dx_ptr, numel, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    numel = multiple(numel, UNIT)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < numel, 0.0)
    _, slope = activation(x.to(tl.float32), SILU, x.dtype == tl.float32)
    dy = tl.load(dy_ptr + i, i < numel, 0.0).to(tl.float32)
    tl.store(dx_ptr + i, (dy * slope).to(x.dtype), i < numel)


@planner
def swish_plan(numel: int) -> Plan:
    """Choose BLOCK, the elements of a program: 2048 for any ``numel``, as the kernels are bound by memory."""
    return Plan(BLOCK=2048)


def _fwd(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        plan = swish_plan(x.numel())
        launch(_swish_fwd_kernel, (cdiv(x.numel(), plan.BLOCK),), x, y, x.numel(), UNIT=unit_of(x.numel()), **plan.meta())
    return y


def _bwd(dy, x, needs):
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        plan = swish_plan(x.numel())
        grid = (cdiv(x.numel(), plan.BLOCK),)
        launch(_swish_bwd_kernel, grid, dy, x, dx, x.numel(), UNIT=unit_of(x.numel()), **plan.meta())
    return dx


swish = fused_op(
    "swish",
    ("(Tensor x) -> Tensor y", _fwd),
    ("(Tensor dy, Tensor x, bool[] needs) -> Tensor dx", _bwd),
    fake=lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    grads=("x",),
    cheap=True,
)
