"""Norms of a joint graph whose results are multiplied in float8: their kernels write them so.

RMSNorm and LayerNorm, behind an add or not: the forward writes y in float8, the backward dx, which is the gradient of the
linear before it. y itself is written where something else reads it, dx always: it is the residual's gradient too. So it is
where AOTAutograd traced the launches of both kernels, for rows of known size that fit in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from fx_fusion.kernels.float8.quantize import quantize_rows_kernel
from fx_fusion.kernels.norms.row_norm_kernels import row_norm_bwd_kernel, row_norm_fwd_kernel
from fx_fusion.memory.joint_graph import JointGraph, erase_unread, users
from fx_fusion.ops.launch import qualified_name
from fx_fusion.torch_internals.partitioner import checkpoint_of, is_empty, is_view
from fx_fusion.torch_internals.traced_kernels import change_launch, launched, writes_to

_ROWS, _FORWARD = qualified_name(quantize_rows_kernel), qualified_name(row_norm_fwd_kernel)
_RESULTS = {_FORWARD: "y_ptr", qualified_name(row_norm_bwd_kernel): "dx_ptr"}


def quantize_in_norms(graph: fx.Graph) -> int:
    """Let norms write in float8 what a kernel behind them would quantize; returns how many. After it is decided what the
    backward computes again: it may have y from elsewhere then."""
    count = 0
    joint = JointGraph(graph)
    for node in list(graph.nodes):
        found = launched(node)
        if found is not None and qualified_name(found[0]) == _ROWS:
            count += _quantize_in_norm(joint, node, found[1])
    return count


def _quantize_in_norm(joint: JointGraph, rows: fx.Node, given: Mapping[str, Any]) -> bool:
    """Let the norm that makes what ``rows`` quantizes do so, if one makes it."""
    result = _as_it_lies(given["x_ptr"])
    norm = result.args[0] if result.target is operator.getitem else None
    found = launched(norm) if isinstance(norm, fx.Node) else None
    if found is None or result.args[1] != _RESULTS.get(qualified_name(found[0])) or not _fits(joint, result, norm, rows):
        return False
    assert isinstance(norm, fx.Node)
    erase_unread(joint.graph, _unread_views(result))  # by linears whose products read this one's rows
    q, scale = given["q_ptr"], given["scale_ptr"]
    for node in (q, scale):
        norm.prepend(node)
    changed = {"q_ptr": q, "scale_ptr": scale, "STORE_Q": True, "POWER_OF_TWO": given["POWER_OF_TWO"]}
    written = [*writes_to(norm), "q_ptr", "scale_ptr"]
    x = found[1].get("x_ptr")
    if x is not None and all(user is rows for user in users(result)):
        changed["STORE_Y"] = False
        memory, dtype = found[1]["y_ptr"], result.meta["val"].dtype  # which is all that the kernel asks of y's memory then
        like_y = [n for n in (found[1]["w_ptr"], x) if n is not memory and n.meta["val"].dtype == dtype]
        if like_y:
            changed = {name: found[1]["stats_ptr"] for name, value in found[1].items() if value is memory} | changed
            changed["y_ptr"] = like_y[0]
            written.remove("y_ptr")
    change_launch(norm, changed, written)
    place = norm
    for node in [n for n in rows.users if n.target is operator.getitem]:
        place.append(node)
        node.args, place = (norm, node.args[1]), node
    erase_unread(joint.graph, [rows])
    return True


def _unread_views(node: fx.Node) -> Iterator[fx.Node]:
    """The views of a node, and views of these, that nothing reads."""
    for user in node.users:
        if is_view(user):
            yield from _unread_views(user) if user.users else (user,)


def _as_it_lies(node: fx.Node) -> fx.Node:
    """Return what a node is views of, of known sizes, that change no element's place in memory."""
    while is_view(node):
        of = node.all_input_nodes[0]
        value, other = node.meta["val"], of.meta["val"]
        if not all(isinstance(size, int) for size in (*value.shape, *other.shape)):
            break
        if not (value.is_contiguous() and other.is_contiguous()) or value.numel() != other.numel():
            break
        node = of
    return node


def _fits(joint: JointGraph, result: fx.Node, norm: Any, rows: fx.Node) -> bool:
    """Return True if a norm can quantize its result in the place of ``rows``: whole rows of it, as they lie, where it
    quantizes nothing yet, in the same half of the graph, and activation checkpointing says the same of both."""
    given, of = launched(norm)[1], launched(rows)[1]  # type: ignore[index]
    x, value = of["x_ptr"].meta["val"], result.meta["val"]
    static = all(isinstance(size, int) for size in (*x.shape, *value.shape))
    memory = [of[name] for name in ("q_ptr", "scale_ptr")]
    return (
        static and value.is_contiguous() and value.dtype == x.dtype and x.shape[-1] == value.shape[-1] == given["n"]
        and not given.get("WIDE") and not given["STORE_Q"] and (norm in joint.backward) == (rows in joint.backward)
        and checkpoint_of(norm) == checkpoint_of(rows)
        and all(is_empty(node) and not node.all_input_nodes for node in memory)
    )  # fmt: skip
