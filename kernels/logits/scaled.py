"""A gradient that was computed before its upstream gradient was known, times that: nothing is moved where it is 1.

    y = round(x · factor)

A loss whose backward is called at once has an upstream gradient of 1. The kernel writes to x's own memory where nothing else
has it, as what a forward saved for its backward alone: then a factor of 1 costs a read of one number. Inductor knows where
that is so; outside of compiled graphs autograd does.

Shapes     x: any, contiguous; factor: one number.
Dtypes     x, y: bf16 | fp16 | fp32; factor: fp32.
Traffic    2·n elements in place where the factor is not 1; 2·n as a product of Inductor's; 4·n in a copy.
"""

import torch
import triton
import triton.language as tl

from fx_fusion.ops.launch import launch
from fx_fusion.ops.library import on_its_device, plain_op, register_autograd
from fx_fusion.ops.on_cpu import interpreting
from fx_fusion.torch_internals.dispatch import is_freed_after_this_backward
from fx_fusion.torch_internals.lowerings import scaled_in_place

_ROUNDINGS = 2**-21  # of a product of weights and gradients that was made in another order
_PROGRAMS, _BLOCK = 1056, 4096  # eight programs for each multiprocessor of an H200


@triton.jit
def scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    """Multiply the ``n`` elements of x by the factor, in place. Any number of programs."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, at < n)
            tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty), at < n)


def _scaled(x, factor):
    return (x.float() * factor).to(x.dtype)


def _scaled_in_a_copy(x, factor):
    return _in_place(x.clone(), factor) if x.is_cuda else _scaled(x, factor)


@on_its_device
def _in_place(x, factor):
    if not (x.is_cuda or interpreting()):
        return x if factor == 1 else x.copy_(_scaled(x, factor))
    if x.numel():
        launch(scale_kernel, (_PROGRAMS,), x, factor, x.numel(), BLOCK=_BLOCK)
    return x


def scaled_for_good(saved, factor):
    """``scaled`` of a tensor that the forward saved for the backward that runs, and that nothing else reads: overwritten and
    returned where no backward comes after this one."""
    return _in_place(saved, factor) if is_freed_after_this_backward(saved) else scaled(saved, factor)


def scaled_gradients(dx, dw, db, dx_factor, dw_factor):
    """``dx``, ``dw`` and ``db`` that a forward saved for the backward that runs, times the factors."""
    dx = scaled_for_good(dx, dx_factor) if type(dx) is torch.Tensor else dx.float() * dx_factor  # for Inductor to fuse
    return dx, scaled_for_good(dw, dw_factor), db * dx_factor


def factor_behind(dlosses, weights):
    """Return what ``dlosses``, vectors that are proportional to ``weights``, are the weights times of: 1 where a loss is
    called backward at once. Weights of 0 and those that are not finite say nothing; 0 where none says anything."""
    above = below = torch.zeros((), dtype=torch.float64, device=weights[0].device)
    for d, w in zip(dlosses, weights, strict=True):
        known = w.isfinite() & (w != 0)
        d, w = (torch.where(known, t, 0).double() for t in (d, w))
        above, below = above + (d * w).sum(), below + w.square().sum()
    factor = torch.where(below == 0, 0.0, above / below).float()
    return torch.where((factor - 1).abs() <= _ROUNDINGS, 1.0, factor)


def _lowering(x, factor):
    return scaled_in_place(x, factor, scale_kernel, _PROGRAMS, _BLOCK)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    x, factor = ctx.saved_tensors
    return scaled(dy, factor), (dy.float() * x.float()).sum().to(factor.dtype)


scaled = plain_op("scaled", "(Tensor x, Tensor factor) -> Tensor", _scaled_in_a_copy, _scaled, lowering=_lowering)
register_autograd("scaled", _backward, _setup_context, twice=True)
