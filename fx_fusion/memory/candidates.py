"""Saved values that the backward can have again from what it reads anyway.

A value is saved because a product, a convolution or attention reads it in the backward (silu(gate) * up, a norm's result, a
weight in bfloat16). It is *cheap* where elementwise ops, views and cheap kernels of ours lead to it from sources that the
backward reads too: then it costs its own traffic to have it again, and nothing else is saved for it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch import fx
from torch.fx.operator_schemas import normalize_function

from fx_fusion.memory.joint_graph import JointGraph, base, bytes_of
from fx_fusion.memory.norms import have_again, is_handed_out, norms
from fx_fusion.ops.launch import CHEAP_KERNELS, qualified_name
from fx_fusion.ops.layouts import in_memory
from fx_fusion.ops.library import CHEAP_OPS
from fx_fusion.torch_internals.partitioner import (
    compute_again,
    is_computed_again,
    is_decided,
    is_elementwise,
    is_empty,
    is_fusible,
    is_view,
)
from fx_fusion.torch_internals.traced_kernels import launched

_LONGEST = 24  # nodes that lead to a value
_SMALLEST = 2**16  # bytes: a page or two of the allocator


@dataclass(frozen=True)
class Candidate:
    """A value of the forward that the backward may compute again.

    Attributes:
        node: it.
        kind: what computes it.
        saved: bytes that need not be saved then.
        traffic: bytes that are read and written for it, besides what a kernel of the backward reads anyway.
        launches: kernels that are launched for it.
        sources: what the backward reads for it.
        moves: whether the backward reads another node in its place then.
        apply: makes the backward compute it.
    """

    node: fx.Node
    kind: str
    saved: float
    traffic: float
    launches: int
    apply: Callable[[], None]
    sources: frozenset[fx.Node] = frozenset()
    moves: bool = False


def candidates(joint: JointGraph) -> list[Candidate]:
    """Every value that is saved although it is cheap."""
    found = {c.node: c for c in (*_by_tags(joint), *_norms(joint))}  # a norm by its backward before another launch
    return [c for c in found.values() if c.saved >= _SMALLEST]


def _is_saved(joint: JointGraph, node: fx.Node) -> bool:
    """Return True if the forward computes a value that the partitioner will save."""
    if is_empty(node) or bytes_of(node) < _SMALLEST or all(user in joint.backward for user in node.users):
        return False
    # A part of the forward that a checkpoint of the user's computes again reads it there.
    kept = any(is_computed_again(u) for n in joint.with_views(node) for u in n.users if u not in joint.backward)
    return joint.read_as_it_is(node) and not joint.is_returned(node) and not kept


# -- elementwise ops and cheap kernels --------------------------------------------------------------------------------
def _is_cheap(node: fx.Node) -> bool:
    if node.op != "call_function" or is_decided(node):
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_cheap_kernel(node.args[0])
    return (is_elementwise(node) and not _reduces(node)) or is_cheap_kernel(node)


def _reduces(node: fx.Node) -> bool:
    """Return True if a node reads much more than it holds: a sum, rows of a table. Its result is saved for next to
    nothing."""
    return not is_view(node) and 4 * bytes_of(node) < sum(map(bytes_of, node.all_input_nodes))


def _by_tags(joint: JointGraph) -> Iterator[Candidate]:
    for node in joint.forward:
        if _is_cheap(node) and not is_view(node) and _is_saved(joint, node) and not _is_bias(joint, node):
            candidate = _from_what_is_there(joint, node)
            if candidate is not None:
                yield candidate


def _is_bias(joint: JointGraph, node: fx.Node) -> bool:
    """Return True if attention adds it to its scores: in the backward Inductor does not see to the dense rows that kernels
    need."""
    views = joint.with_views(node)
    return any(bias in views for reader in joint.readers(node) for bias in _biases(reader))


def _biases(reader: fx.Node) -> list[object]:
    if "attention" not in str(reader.target) or not callable(reader.target):
        return []
    given = normalize_function(reader.target, reader.args, reader.kwargs, normalize_to_only_use_kwargs=True)
    return [] if given is None else [given.kwargs.get(name) for name in ("attn_bias", "attn_mask")]


def _is_grouped(joint: JointGraph, node: fx.Node) -> bool:
    """Return True if a grouped product of the backward (experts) reads it. The dim that is cut into groups must not be
    innermost in memory: where the sizes of groups are no multiples of 16 bytes the kernel ends in an assertion. Computed
    again in one with its transposition, the value would lie so."""
    return any("grouped_mm" in str(reader.target) for reader in joint.readers(node))


def _in_memory(joint: JointGraph, node: fx.Node) -> None:
    """Let the backward read a value as the forward laid it out, not fused with a view of it."""
    with joint.graph.inserting_after(node):
        again = joint.graph.call_function(in_memory, (node,))
    again.meta = {name: value for name, value in node.meta.items() if name in ("val", "tensor_meta")}
    joint.read_instead(node, again)


def _from_what_is_there(joint: JointGraph, node: fx.Node) -> Candidate | None:
    members = [node]
    written, launches = bytes_of(node), 0
    read, besides = set[fx.Node](), set[fx.Node]()  # by the kernels for it; saved for them
    needed = [reader for reader in joint.readers(node) if not is_fusible(reader)]
    for member in members:  # which grow meanwhile
        launches += is_cheap_kernel(member)
        for source in member.all_input_nodes:
            if source in members:
                continue
            if joint.is_there(source):
                if is_cheap_kernel(member) or not _is_read_in_time(joint, source, needed):
                    read.add(base(source))
            elif joint.is_lost(source) or source.op == "placeholder":
                return None  # the caller may write to an input that eager does not save, before the backward
            elif _is_cheap(source):
                members.append(source)
                if len(members) > _LONGEST:
                    return None
            else:
                besides.add(source)
    saved = written - sum(map(bytes_of, besides))
    traffic = written + sum(map(bytes_of, read | besides))
    views = [view for view in joint.with_views(node)[1:] if joint.readers(view)]

    def apply() -> None:
        for n in (*members, *views):
            compute_again(n)
        if _is_grouped(joint, node):
            _in_memory(joint, node)

    there = {base(source) for member in members for source in member.all_input_nodes if source not in members}
    return Candidate(node, _kind(members), saved, traffic, launches, apply, frozenset(there))


def _is_read_in_time(joint: JointGraph, source: fx.Node, needed: Collection[fx.Node]) -> bool:
    """Return True if a kernel of Inductor's reads it in the backward anyway, and can run before ``needed``: it makes the
    value as well then. A kernel of ours, or another one of Inductor's, reads it once more."""
    results = (result for reader in joint.readers(base(source)) for result in joint.fused_with(reader))
    return any(not joint.needs(result, needed) for result in results)


def _kind(members: list[fx.Node]) -> str:
    shown = (n for n in reversed(members) if not is_view(n) and not is_empty(n) and n.target is not operator.getitem)
    names = [name_of(n) for n in shown]
    return ", ".join(dict.fromkeys(names[-3:]))


def is_cheap_kernel(node: fx.Node) -> bool:
    """Return True if a node is an op of ours that may run again, or a launch of its kernel that AOTAutograd traced."""
    if node.target in CHEAP_OPS:
        return True
    found = launched(node)
    # A norm behind an add is launched with the same kernel, and reads what is not saved.
    return found is not None and qualified_name(found[0]) in CHEAP_KERNELS and not found[1].get("HAS_RES", False)


def name_of(node: fx.Node) -> str:
    """Return what computes a node: an op, or the kernel of a launch."""
    if (found := launched(node)) is not None:
        *_, file, kernel = qualified_name(found[0]).split(".")
        return kernel.removesuffix("_kernel").removesuffix("_fwd") or file
    op = node.meta.get("original_aten") or node.target
    return str(getattr(op, "overloadpacket", op)).split(".", 1)[-1]


# -- norms --------------------------------------------------------------------------------------------------------------
def _norms(joint: JointGraph) -> Iterator[Candidate]:
    """Yield those behind an add, and those whose backward hands out the result."""
    for norm in norms(joint):
        if is_decided(norm.y) or not _is_saved(joint, norm.y):
            continue
        handed_out = is_handed_out(joint, norm)
        if handed_out or (norm.behind_add and all(map(joint.is_there, norm.operands))):
            size = bytes_of(norm.y)
            traffic, launches = (size, 0) if handed_out else (size + bytes_of(norm.h), 1)
            kind = "norm of a sum" if norm.behind_add else "norm"
            again = functools.partial(have_again, joint, norm)
            yield Candidate(norm.y, kind, size, traffic, launches, again, moves=True)
