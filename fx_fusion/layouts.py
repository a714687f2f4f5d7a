"""Where Inductor lays out a graph channels last while the graph says channels first: two ops that leave the choice to it.

A kernel whose launch is traced is bound to the strides it was traced with. In a graph that Inductor lays out channels last
(``conv_layout``) a norm of images is therefore traced channels last, between

    channels_last(x)    the values of x, channels last. Inductor: x itself where it lies so, else a copy.
    any_layout(y)       the values of y, contiguous as far as the graph knows. Inductor: y as it lies.

Gradients are channels last and stay so: nobody relies on their strides. Without these ops such a kernel cost a copy before
and one behind it: timm's resnetv2_50d_evos ran at 0.70 of Inductor's speed (H200).

Shapes     x: (n, c, ...), at least three dims. Any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fx_fusion.op import plain_op, register_autograd


def is_channels_last(x: Tensor) -> bool:
    """Whether channels are innermost and the rest dense behind them (any number of spatial dims)."""
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def to_channels_last(x: Tensor) -> Tensor:
    """A copy of x with channels innermost."""
    return x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


def _any_layout(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _lower_channels_last(x: Any) -> Any:
    from torch._inductor.ir import ExternKernel

    rank = len(x.get_size())
    return ExternKernel.require_stride_order(x, [rank - 1, 0, *range(rank - 2, 0, -1)])


channels_last = plain_op(
    "channels_last", "(Tensor x) -> Tensor", to_channels_last, to_channels_last, lowering=_lower_channels_last
)
any_layout = plain_op("any_layout", "(Tensor x) -> Tensor", _any_layout, _any_layout, lowering=lambda x: x)
register_autograd("channels_last", lambda ctx, dy: dy, lambda ctx, inputs, output: None)
register_autograd("any_layout", lambda ctx, dy: channels_last(dy), lambda ctx, inputs, output: None)
