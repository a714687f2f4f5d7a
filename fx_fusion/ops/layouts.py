"""Leave layouts to Inductor, in two ops, where it lays out a graph channels last and the graph says channels first.

A kernel whose launch is traced is bound to the strides it was traced with. In a graph that Inductor lays out channels last
(``conv_layout``) a norm of images is therefore traced channels last, between

    channels_last(x)    the values of x, channels last. Inductor: x itself where it lies so, else a copy.
    any_layout(y)       the values of y, contiguous as far as the graph knows. Inductor: y as it lies.

The lowering may alias its input. AOTAutograd assumes distinct buffers, so buffer donation to the backward is disabled for
these graphs (``without_donated_buffers``). Gradients are channels last and stay so: nobody relies on their strides. Without
these ops such a kernel costs a copy before it and one behind: timm's resnetv2_50d_evos ran at 0.70 of Inductor's speed
(H200).

Shapes     x: (n, c, ...), at least three dims. Any dtype.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.ops.launch import is_traced
from fx_fusion.ops.library import plain_op, register_autograd
from fx_fusion.torch_internals.inductor import without_donated_buffers as no_donations
from fx_fusion.torch_internals.lowerings import lower_channels_last, lower_in_memory


def is_channels_last(x: Tensor) -> bool:
    """Return True if channels are innermost and the rest dense behind them (any number of spatial dims)."""
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def to_channels_last(x: Tensor) -> Tensor:
    """A copy of x with channels innermost."""
    return x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


def _any_layout(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


channels_last = plain_op(
    "channels_last", "(Tensor x) -> Tensor", to_channels_last, to_channels_last, lowering=lower_channels_last
)
any_layout = plain_op("any_layout", "(Tensor x) -> Tensor", _any_layout, _any_layout, lowering=lambda x: x)
# A copy that no pass takes for one that can be left out.
copied = plain_op("copied", "(Tensor x) -> Tensor", torch.clone, torch.clone)
# The values of x, in memory as the graph lays x out: what Inductor fuses with a view of it may lie otherwise. Inductor: x.
in_memory = plain_op("in_memory", "(Tensor x) -> Tensor", torch.clone, torch.clone, lowering=lower_in_memory)
LAYOUT_OPS = frozenset((channels_last, any_layout))
register_autograd("copied", lambda ctx, dy: dy, lambda ctx, inputs, output: None, twice=True)
register_autograd("in_memory", lambda ctx, dy: dy, lambda ctx, inputs, output: None, twice=True)
register_autograd("channels_last", lambda ctx, dy: dy, lambda ctx, inputs, output: None, twice=True)
register_autograd("any_layout", lambda ctx, dy: channels_last(dy), lambda ctx, inputs, output: None, twice=True)


def stored_once(x: Tensor) -> Tensor:
    """x, which several launches read: of a trace, in memory. Inductor would store what it computes once for each of them."""
    return in_memory(x) if is_traced() else x


def without_donated_buffers(gm: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Return what a graph with these ops, bodies included, is compiled under."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    if not any(node.target in LAYOUT_OPS for graph in graphs for node in graph.nodes if node.op == "call_function"):
        return contextlib.nullcontext()
    return no_donations()
