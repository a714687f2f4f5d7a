"""Read what masks show, by their values: one reading for all graphs and layers that are given the same tensor.

To read the memory of a GPU, the host waits for all kernels before the mask, and the GPU then for the host's next kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from fx_fusion.graph.masks.assumed import ONES
from fx_fusion.graph.terms import example
from fx_fusion.torch_internals.dispatch import version_of

HABIT = 2  # calls in a row
_LARGEST = 2**28  # elements; masks of attention calls above are not read
_known = WeakIdKeyDictionary()  # of each mask its version then, and of which kinds it is, as far as was asked


def is_of_kind(mask: Tensor, kind: str) -> bool:
    """Return True if a mask is of a kind (``graph.masks.assumed``): padding all ones; a mask (batch, heads, queries, keys)
    of booleans true where it shows; one of numbers 0 there, and -inf or the lowest number of its dtype elsewhere.

    On a GPU the answer is remembered while the same tensor comes back unchanged; a write that PyTorch is not told of
    (through ``.data``) goes unnoticed. A tensor in CPU memory is read each time: that makes nobody wait, and its memory may
    belong to NumPy as well."""
    verdicts = _remembered(mask)
    if kind not in verdicts:
        verdicts[kind] = bool(_holds(mask, kind))
    return verdicts[kind]


def note_kind(mask: Tensor, kind: str) -> None:
    """Note that a mask hides nothing ("none"), or is "causal", as who made it knows; it is both where there is one key."""
    if mask.numel():
        _remembered(mask).update({"none": mask.shape[-1] == 1, "causal": mask.shape[-1] == 1, kind: True})


def read_anew(gm: fx.GraphModule, *, replayed: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A layer around a compiled graph, ``replayed`` as a CUDA graph or not, whose outputs may be masks: a replay writes into
    the same tensors, and PyTorch is not told. So each call of it ends what is known of them."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    places = [i for i, node in enumerate(output.args[0]) if _may_be_a_mask(node)] if replayed else []

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = compiled(*args)
            for i in places:
                _known.pop(results[i], None)
            return results

        return run if places else compiled

    return wrap


def _may_be_a_mask(node: Any) -> bool:
    """Return True if an output is one that a graph with attention may take for padding or a mask: without a gradient, of two
    dims or four."""
    mask = example(node) if isinstance(node, fx.Node) else None
    return isinstance(mask, Tensor) and mask.dim() in (2, 4) and not mask.requires_grad


class Padding:
    """The record of whether one argument's padding masks are all ones, call after call."""

    def __init__(self) -> None:
        self._in_a_row = 0  # masks that were not
        self._unread: Callable[[], bool] | None = None

    def is_absent(self, mask: Tensor) -> bool:
        """Return True if a mask is all ones. After two in a row that were not, False without a look: a graph for any padding
        is right for ones too. Such a mask is read while its call runs, and the next call looks again if it was all ones.
        (The next, not the first that finds the answer there: which version a call runs does not depend on the clock.)"""
        verdicts = _remembered(mask)
        if ONES in verdicts:
            return verdicts[ONES]
        unread, self._unread = self._unread, None  # another thread may be here too
        if unread is not None:
            self._note(unread())
        if self._in_a_row >= HABIT and reading_waits(mask):
            self._unread = read_later(_holds(mask, ONES))
            # Whoever brings the tensor again gets the same answer: activation checkpointing runs a graph twice.
            verdicts[ONES] = False
            return False
        return self._note(is_of_kind(mask, ONES))

    def _note(self, ones: bool) -> bool:
        self._in_a_row = 0 if ones else self._in_a_row + 1
        return ones


def reading_waits(mask: Tensor) -> bool:
    """Return True if the host waits for another device when it reads a tensor."""
    return mask.device.type != "cpu"


def read_later(answer: Tensor) -> Callable[[], bool]:
    """Returns what a tensor of one boolean holds, once that is asked for; the host waits then at the most."""
    copied, event = answer.to("cpu", non_blocking=True), None
    if answer.device.type != "cpu":
        module = torch.get_device_module(answer.device)
        event = module.Event()
        event.record(module.current_stream(answer.device))  # of the copy, whichever device is the current one

    def read() -> bool:
        if event is not None:
            event.synchronize()
        return bool(copied)

    return read


def _remembered(mask: Tensor) -> dict[str, bool]:
    """Return what is known of a mask, to be added to."""
    version, (at, verdicts) = version_of(mask), _known.get(mask, (None, {}))
    if at == version and version >= 0 and reading_waits(mask):
        return verdicts
    _known[mask] = version, (verdicts := {})
    return verdicts


@torch.no_grad()
def _holds(mask: Tensor, kind: str) -> Tensor:
    """A boolean on the mask's device."""
    if kind == ONES:
        return (mask if mask.dtype == torch.bool else mask == 1).all()
    if mask.dim() != 4 or mask.numel() == 0 or mask.numel() > _LARGEST:
        return torch.zeros((), dtype=torch.bool)
    of_keys = kind in ("keys", "causal_keys")
    if of_keys and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return torch.zeros((), dtype=torch.bool)
    shown = mask if mask.dtype == torch.bool else mask == 0
    expected = torch.ones((), dtype=torch.bool, device=mask.device)
    if kind in ("causal", "causal_keys"):
        expected = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if of_keys:
        expected = expected & shown.any(-2, keepdim=True)
    holds = (shown == expected).all()
    if mask.dtype != torch.bool:
        holds = holds & (shown | (mask <= torch.finfo(mask.dtype).min)).all()
    return holds
