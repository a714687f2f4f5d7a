"""Which kinds a mask of an attention call is of, by its values: one reading for all layers that are given it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fx_fusion.torch_internals.dispatch import version_of

_LARGEST = 2**28  # elements; masks above are not read
_known = WeakIdKeyDictionary()  # of each mask its version then, and of which kinds it is, as far as was asked


def is_of_kind(mask: Tensor, kind: str) -> bool:
    """Whether a mask (batch, heads, queries, keys) is of a kind (``graph.masks.assumed.KINDS``). Remembered on a GPU, where
    reading costs a synchronisation, while the same tensor comes back unchanged.

    A mask of booleans shows where it is true; one of numbers where it adds 0, if it adds -inf or the lowest number of its
    dtype elsewhere."""
    version, (at, verdicts) = version_of(mask), _known.get(mask, (None, {}))
    remembered = at == version and version >= 0 and mask.device.type != "cpu"
    if not remembered:
        verdicts = {}
    if kind not in verdicts:
        with torch.no_grad():
            verdicts[kind] = _holds(mask, kind)
        _known[mask] = (version, verdicts)
    return verdicts[kind]


def _holds(mask: Tensor, kind: str) -> bool:
    if mask.dim() != 4 or mask.numel() == 0 or mask.numel() > _LARGEST:
        return False
    of_keys = kind in ("keys", "causal_keys")
    if of_keys and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return False
    shown = mask if mask.dtype == torch.bool else mask == 0
    expected = torch.ones((), dtype=torch.bool, device=mask.device)
    if kind in ("causal", "causal_keys"):
        expected = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if of_keys:
        expected = expected & shown.any(-2, keepdim=True)
    holds = (shown == expected).all()
    if mask.dtype != torch.bool:
        holds = holds & (shown | (mask <= torch.finfo(mask.dtype).min)).all()
    return bool(holds)
