"""The kernels of Liger, where it is installed: the same work as a fusion's pattern, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def liger(fusion: str) -> Callable[..., Any] | None:
    """A function of the fusion's parameters that calls Liger's kernel."""
    try:
        import liger_kernel.transformers.functional as lf
    except ImportError:
        return None
    functions: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda x, weight, eps, offset, round_first: lf.liger_rms_norm(
            x, weight, eps, offset, "llama" if round_first else "gemma", False
        ),
        "layer_norm": lambda x, weight, bias, eps, round_first: lf.liger_layer_norm(x, weight, bias, eps),
        "swiglu": lambda gate, up: lf.liger_swiglu(gate, up),
        "geglu": lambda gate, up, kind: lf.liger_geglu(gate, up),
        "cross_entropy": lambda logits, target, weight, ignore_index, **rest: lf.liger_cross_entropy(
            logits, target, reduction="none"
        ),
        "linear_cross_entropy": lambda x, lm_head, bias, target, weight, reduction, ignore_index, **rest: (
            lf.liger_fused_linear_cross_entropy(x, lm_head, target, bias, weight, ignore_index, reduction=reduction)
        ),
        "rope of q and k": lambda q, k, cos, sin: lf.liger_rope(q, k, cos, sin),
        "group_norm": lambda x, groups, weight, bias, eps: lf.liger_group_norm(x, weight, bias, x.shape[1], groups, eps),
    }
    return functions.get(fusion)
