"""Which kinds a mask of an attention call is of, by its values: one reading for all layers that are given it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fx_fusion.torch_internals.dispatch import version_of

Kinds = frozenset[str]
_LARGEST = 2**28  # elements; masks above are not read
_known = WeakIdKeyDictionary()  # of each mask its version then, and its kinds


def kinds_of(mask: Tensor) -> Kinds:
    """Which of ``graph.masks.assumed.KINDS`` a mask (batch, heads, queries, keys) is of; remembered on a GPU, where reading
    costs a synchronisation, while the same tensor comes back unchanged.

    A mask of booleans shows where it is true; one of numbers where it adds 0, if it adds -inf or the lowest number of its
    dtype elsewhere."""
    version, known = version_of(mask), _known.get(mask)
    if known is not None and known[0] == version and version >= 0 and mask.device.type != "cpu":
        return known[1]
    with torch.no_grad():
        kinds = _read(mask)
    _known[mask] = (version, kinds)
    return kinds


def _read(mask: Tensor) -> Kinds:
    if mask.dim() != 4 or mask.numel() == 0 or mask.numel() > _LARGEST:
        return frozenset()
    valid = torch.ones((), dtype=torch.bool, device=mask.device)
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask == 0
        valid = (shown | (mask <= torch.finfo(mask.dtype).min)).all()
    earlier = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    keys = shown.any(-2, keepdim=True)
    masks = {"none": True, "causal": earlier}
    if mask.dtype == torch.bool and mask.shape[1] == 1:
        masks |= {"keys": keys, "causal_keys": earlier & keys}
    holds = [(shown if expected is True else shown == expected).all() for expected in masks.values()]
    verdicts = torch.stack([valid, *holds]).tolist()  # one synchronisation
    return frozenset(kind for kind, held in zip(masks, verdicts[1:], strict=True) if held and verdicts[0])
