"""The fewest bytes that a fused function has to move, for the share of the copy rate that it reaches; the fewest operations
of its matrix products, where they and not the memory take the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fx_fusion.cost.table import evaluate
from fx_fusion.fusion.declaration import Fusion

_GATHERED = {"embedding": ("weight", "ids")}  # read where an index points at it: each such row once


def fewest_bytes(
    fusion: Fusion, sizes: Mapping[str, int], dtype: torch.dtype, inputs: Mapping[str, Any], outs: Iterable[torch.Tensor]
) -> dict[str, float]:
    """Return the fewest bytes by mode. Forward: each input is read once, each result written once. Backward: inputs and the
    gradients of results are read once, gradients of differentiable inputs written once. A fusion that declares its traffic
    moves that in both passes together: it knows what a backward need not read (rope), which gradients are one tensor
    (add_rms_norm), and what has to be read twice since a statistic is known only after the first time (cross_entropy,
    evonorm_b0)."""
    tensors = {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    written = sum(map(_bytes, outs))
    table, ids = _GATHERED.get(fusion.name, (None, None))
    read = sum(_bytes(t) for name, t in tensors.items() if name != table)
    again = 0  # what the same index points at
    if table:
        again = (tensors[ids].numel() - tensors[ids].unique().numel()) * _bytes(tensors[table][0])
        read += written - again
    forward = read + written
    both = 2 * forward + sum(_bytes(t) for t in tensors.values() if t.requires_grad)
    if fusion.traffic is not None:
        both = evaluate(fusion.traffic[0], {**sizes, "bytes": dtype.itemsize}) - again
    return {"forward": forward, "forward+backward": both}


def fewest_flops(fusion: str, sizes: Mapping[str, int]) -> float | None:
    """Floating-point operations, forward and backward, of the matrix products of a fusion; None where it has none. The
    logits are one product forward and two backward; attention is two and five, over the scores that its case shows."""
    if fusion in ("linear_cross_entropy", "linear_soft_cross_entropy", "token_log_probs"):
        return 6.0 * sizes["m"] * sizes["h"] * sizes["v"]
    if fusion not in _SCORES:
        return None
    return 14.0 * sizes["b"] * sizes["h"] * sizes["d"] * _SCORES[fusion](sizes["s"])


def _causal(s: int) -> int:
    return s * (s + 1) // 2


def _window(s: int) -> int:
    """A quarter of the positions back, as the case of the fusion has it."""
    width = max(1, s // 4)
    return _causal(width) + (s - width) * width


_SCORES: dict[str, Callable[[int], int]] = {
    "attention": _causal, "causal_mask": _causal, "repeat_kv": _causal, "block_sparse_attention": _window,
    "dense_mask": lambda s: s * s, "biased_attention": lambda s: s * s,
}  # fmt: skip


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
