"""Masks that one graph makes for others are read behind that graph, if the one of the call before was asked for.

The host then waits for what is before the mask, not for what came between the mask and its first use too: under FSDP2 that
is a layer's parameters, which are still on their way while the layer is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.terms import example
from fx_fusion.runtime.mask_values import holds, makers, read_later, reading_waits
from fx_fusion.torch_internals.dispatch import version_of
from fx_fusion.torch_internals.fakes import FakeTensor


class Maker:
    """A graph whose outputs at one place may be masks: reads those ahead whose like was asked for."""

    def __init__(self) -> None:
        self._asked: set[str] = set()  # of the last mask
        self._ahead: dict[str, Callable[[], bool]] = {}
        self._version = -1

    def made(self, mask: Tensor) -> None:
        """Start to read a mask that was just made, if reading it will make somebody wait."""
        if isinstance(mask, FakeTensor) or not reading_waits(mask) or _is_captured(mask):
            return
        kinds, self._asked = self._asked, set()
        self._ahead = {kind: read_later(holds(mask, kind)) for kind in kinds}
        self._version = version_of(mask)
        makers[mask] = self

    def answer(self, mask: Tensor, kind: str) -> bool | None:
        """Whether the last mask is of a kind, if that was read ahead and the mask is as it was."""
        self._asked.add(kind)
        read = self._ahead.pop(kind, None)
        return read() if read is not None and version_of(mask) == self._version else None


def read_ahead(gm: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A layer around a compiled graph that starts to read the masks which it returns, for the graphs that get them."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    makers = {i: Maker() for i, node in enumerate(output.args[0]) if _may_be_a_mask(node)}

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = compiled(*args)
            for i, maker in makers.items():
                maker.made(results[i])
            return results

        return run if makers else compiled

    return wrap


def _may_be_a_mask(node: Any) -> bool:
    """Whether an output is made by its graph and lies as a mask of all heads does: (batch, 1, queries, keys)."""
    if not isinstance(node, fx.Node) or node.op == "placeholder" or not isinstance(mask := example(node), Tensor):
        return False
    return mask.dim() == 4 and statically_known_true(mask.shape[1] == 1) and not mask.requires_grad


def _is_captured(mask: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what is read then says nothing of its replays."""
    return mask.is_cuda and torch.cuda.is_current_stream_capturing()
