"""AOTAutograd's partitioner: what it saves for the backward, and how it is told to compute a value again instead."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

_MARK, _REGION = "recompute", "ac_graph_id"  # of torch.utils.checkpoint


@functools.cache
def _kinds() -> Any:
    """Gone: raises, and nothing is computed again that the partitioner would not by itself."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def is_tangent(node: fx.Node) -> bool:
    """Return True if a node of a joint graph is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def input_number(node: fx.Node) -> int | None:
    """The position of an input of a joint graph among those that AOTAutograd was given; for the local tensor of a DTensor,
    the DTensor's. Gone, or another node: None, and the memory of a parameter is taken for memory that the backward would
    need besides."""
    described = node.meta.get("desc") if node.op == "placeholder" else None
    while type(described).__name__ == "SubclassGetAttrAOTInput":
        described = getattr(described, "base", None)
    return getattr(described, "idx", None) if type(described).__name__ == "PlainAOTInput" else None


def is_view(node: fx.Node) -> bool:
    """Return True if a node is a view of its first argument."""
    return node.op == "call_function" and (_kinds().is_view(node) or node.target is torch.ops.aten._unsafe_view.default)


def is_alias(node: fx.Node) -> bool:
    """Return True if a node has the memory of its first argument: more ops than ``is_view`` knows (a diagonal, the parts of
    a split), by what their schemas say of their results."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_alias(node.args[0])
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return is_view(node) or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_reshape(node: fx.Node) -> bool:
    """Return True if a node is its first argument in another shape, element by element in the same order."""
    aten = torch.ops.aten
    views = aten.view, aten.reshape, aten._unsafe_view, aten.squeeze, aten.unsqueeze
    return getattr(node.target, "overloadpacket", None) in views and node.target is not aten.view.dtype


def is_cast(node: fx.Node) -> bool:
    """Return True if a node is its first argument in another dtype."""
    return node.target in (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def cast_to(node: fx.Node) -> torch.dtype | None:
    """The dtype to which a node casts its first argument, and does nothing else; None for another node."""
    if not is_cast(node):
        return None
    options = {**dict(zip(("dtype",), node.args[1:], strict=False)), **node.kwargs}
    dtype = options.pop("dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and all(value in (None, False) for value in options.values()) else None


def is_empty(node: fx.Node) -> bool:
    """Return True if a node is memory that something else fills."""
    aten = torch.ops.aten
    return getattr(node.target, "overloadpacket", None) in (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided)


def is_fusible(node: fx.Node) -> bool:
    """Return True if Inductor can compute what a node reads in the node's own kernel: no product, convolution, attention."""
    return node.op == "call_function" and _kinds().is_fusible(node)


def is_elementwise(node: fx.Node) -> bool:
    """Return True if a node is an elementwise op, a reduction, a view or a copy, which the partitioner may compute twice."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return _kinds().is_recomputable(node) and not _kinds().is_random(node)


def compute_again(node: fx.Node) -> None:
    """Have the backward compute a node again."""
    node.meta[_MARK] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta.setdefault(_REGION, 0)


def save(node: fx.Node) -> None:
    """Have the forward save what the backward reads of a node."""
    node.meta[_MARK] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def is_decided(node: fx.Node) -> bool:
    """Return True if it is said of a node already: by activation checkpointing, or here."""
    return node.meta.get(_MARK) is not None


def is_computed_again(node: fx.Node) -> bool:
    """Return True if activation checkpointing, or we, had a node computed again."""
    policy = torch.utils.checkpoint.CheckpointPolicy
    return node.meta.get(_MARK) in (policy.MUST_RECOMPUTE, policy.PREFER_RECOMPUTE)


def checkpoint_of(node: fx.Node) -> tuple[Any, Any] | None:
    """Return what activation checkpointing says of a node, and in which region; None outside of regions."""
    return (node.meta[_MARK], node.meta.get(_REGION)) if is_decided(node) else None


def set_checkpoint(node: fx.Node, said: tuple[Any, Any]) -> None:
    """Say of a node what ``checkpoint_of`` said of the one that it is for; where that is saved, the node is not."""
    policy = torch.utils.checkpoint.CheckpointPolicy
    saved = said[0] in (policy.MUST_SAVE, policy.PREFER_SAVE)
    node.meta[_MARK] = policy.MUST_RECOMPUTE if saved else said[0]
    if said[1] is not None:
        node.meta[_REGION] = said[1]


def has_a_budget(graph: fx.Graph) -> bool:
    """Return True if the user gave the partitioner a budget of memory, for all graphs or for a region that this one is of,
    under which it computes again what it deems cheap. Gone: False."""
    import torch._functorch.config as config
    import torch.fx.traceback as traceback

    of_region = getattr(traceback, "_get_memory_budget_annotation", lambda node: None)  # from torch 2.13 on
    asked = (isinstance(n.meta.get("memory_budget"), float) or of_region(n) is not None for n in graph.nodes)
    return getattr(config, "activation_memory_budget", 1.0) != 1.0 or any(asked)
