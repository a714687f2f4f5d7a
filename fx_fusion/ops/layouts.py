"""Where Inductor lays out a graph channels last while the graph says channels first: two ops that leave the choice to it.

A kernel whose launch is traced is bound to the strides it was traced with. In a graph that Inductor lays out channels last
(``conv_layout``) a norm of images is therefore traced channels last, between

    channels_last(x)    the values of x, channels last. Inductor: x itself where it lies so, else a copy.
    any_layout(y)       the values of y, contiguous as far as the graph knows. Inductor: y as it lies.

Inductor may hand on one buffer under two names here, which AOTAutograd takes for two tensors: it must not be told that the
backward may overwrite what it is given (``without_donated_buffers``). Gradients are channels last and stay so: nobody relies
on their strides. Without these ops such a kernel cost a copy before
and one behind it: timm's resnetv2_50d_evos ran at 0.70 of Inductor's speed (H200).

Shapes     x: (n, c, ...), at least three dims. Any dtype.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, fx

from fx_fusion.ops.fused_op import plain_op, register_autograd


def is_channels_last(x: Tensor) -> bool:
    """Whether channels are innermost and the rest dense behind them (any number of spatial dims)."""
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def to_channels_last(x: Tensor) -> Tensor:
    """A copy of x with channels innermost."""
    return x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


def _any_layout(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _lower_channels_last(x: Any) -> Any:
    from torch._inductor.ir import ExternKernel, as_storage_and_layout
    from torch._inductor.virtualized import V

    rank = len(x.get_size())
    order = [rank - 1, 0, *range(rank - 2, 0, -1)]
    laid_out = ExternKernel.require_stride_order(x, order)
    kept = any(user.op == "output" for user in V.current_node.users)
    if kept and as_storage_and_layout(laid_out)[0].get_name() in V.graph.graph_inputs:
        # Saved for the backward, and the caller may write to it meanwhile.
        return ExternKernel.require_stride_order(ExternKernel.copy_input(x), order)
    return laid_out


channels_last = plain_op(
    "channels_last", "(Tensor x) -> Tensor", to_channels_last, to_channels_last, lowering=_lower_channels_last
)
any_layout = plain_op("any_layout", "(Tensor x) -> Tensor", _any_layout, _any_layout, lowering=lambda x: x)
# A copy that no pass takes for one that can be left out.
copied = plain_op("copied", "(Tensor x) -> Tensor", torch.clone, torch.clone)
LAYOUT_OPS = frozenset((channels_last, any_layout))
register_autograd("copied", lambda ctx, dy: dy, lambda ctx, inputs, output: None, twice=True)
register_autograd("channels_last", lambda ctx, dy: dy, lambda ctx, inputs, output: None, twice=True)
register_autograd("any_layout", lambda ctx, dy: channels_last(dy), lambda ctx, inputs, output: None, twice=True)


def without_donated_buffers(gm: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """What a graph with these ops, bodies included, is compiled under."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    if not any(node.target in LAYOUT_OPS for graph in graphs for node in graph.nodes if node.op == "call_function"):
        return contextlib.nullcontext()
    return torch._functorch.config.patch(donated_buffer=False)
