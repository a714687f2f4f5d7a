"""Properties of aten ops, and ops whose names begin with an underscore.

Gone (any of the ops): importing fails, and the backend can't be used; AOTAutograd's graphs are made of them.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
TO_COPY = aten._to_copy.default
SOFTMAXES = {aten._log_softmax.default: 1, aten._softmax.default: 1}
"""By the place of their dim among the arguments."""
RESHAPES = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))


def mutates(op: Any) -> bool:
    """Return True if an op writes to one of its operands."""
    return bool(op._schema.is_mutable)


def functional(op: Any) -> Any:
    """Return the op that returns what ``op`` writes (``masked_fill`` for ``masked_fill_``); None where there is none."""
    name, _, overload = op.name().removeprefix("aten::").partition(".")
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, overload or "default", None)


def draws(op: Any) -> bool:
    """Return True if an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def is_elementwise(op: Any) -> bool:
    """Return True if an op computes each element from elements at the same place."""
    return torch.Tag.pointwise in op.tags or op is TO_COPY


def is_overload(op: Any) -> bool:
    """Return True for an overload of an op (``torch.ops.aten.add.Tensor``)."""
    return isinstance(op, torch._ops.OpOverload)


def is_attention(op: Any) -> bool:
    """Return True for an op that computes ``scaled_dot_product_attention``, or its gradients, with one kernel."""
    return op.namespace == "aten" and op._opname.startswith("_scaled_dot_product_")


def is_convolution(op: Any) -> bool:
    """Return True for a convolution, or its gradients."""
    return op.namespace == "aten" and op._opname in ("convolution", "convolution_backward")
