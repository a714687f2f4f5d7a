"""Facts about how tokens are sent to experts: what sorts the pairs of a token and an expert, what undoes that, which rows
belong to no expert of this rank, and the grouped products of the rows of each expert."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.graph.view import View

_OF_FALLBACK = ("input", "weight", "offs")
_EXACT = (torch.float32, torch.float64, torch.int32, torch.int64)
_NEW = ("empty_like", "zeros_like", "ones_like", "zeros", "new_zeros")


@dataclass(frozen=True)
class Sorting:
    """A call that sorts ``keys``, (n) integers. Its result ``perm``, (n), is a permutation of the positions.

    ``call`` has the sorted keys as well; None for argsort."""

    keys: fx.Node
    perm: fx.Node
    call: fx.Node | None = None

    @property
    def sorted_keys(self) -> list[fx.Node]:
        """Return the nodes that hold the keys in order."""
        return [] if self.call is None else [user for user in self.call.users if _is_item(user, 0)]


def sorting_of(view: View, perm: Any) -> Sorting | None:
    """Return the sort that makes the permutation ``perm``, or None."""
    if not _is_vector(perm) or is_changed(view, perm):
        return None
    if (bound := view.arguments_of(perm, "argsort")) is not None:
        return Sorting(bound["input"], perm)
    if not _is_item(perm, 1) or (bound := view.arguments_of(perm.args[0], "sort")) is None:
        return None
    return Sorting(bound["input"], perm, perm.args[0])


def inverse_of(view: View, inverse: Any) -> Sorting | None:
    """Return the sort whose permutation ``inverse`` undoes, or None.

    It is ``argsort(perm)``, or a new tensor to whose positions ``perm`` an ``arange`` is written."""
    if not _is_vector(inverse):
        return None
    if (bound := view.arguments_of(inverse, "argsort")) is not None:
        return None if bound["descending"] or is_changed(view, inverse) else sorting_of(view, bound["input"])
    put = written_by_permutation(view, inverse)
    return put.sorting if put is not None and _counts(view, put.rows, inverse) else None


@dataclass(frozen=True)
class Put:
    """``new[perm] = rows``, all of a new tensor: the rows in the order before the sort."""

    rows: fx.Node
    sorting: Sorting
    write: fx.Node


def written_by_permutation(view: View, new: fx.Node) -> Put | None:
    """Return what a new tensor is written with at the positions of a permutation, once and before anybody reads it; or
    None."""
    writes = [write for write in view.effects.writes if new in view.effects.mutated(write)]
    if len(writes) != 1 or view.name(new) not in _NEW:
        return None
    write = writes[0]
    if write.target is not operator.setitem or not all(isinstance(n, fx.Node) and is_tensor(n) for n in write.args):
        return None
    if any(alias is not new and view.order[alias] < view.order[write] for alias in view.effects.aliases(new)):
        return None
    _, positions, rows = write.args
    sorting = sorting_of(view, positions)
    early = any(view.order[user] < view.order[write] for user in new.users)
    if sorting is None or early or not same_length(sorting.perm, new) or not same_shape(example(rows), example(new)):  # type: ignore[arg-type]
        return None
    alike = example(rows).dtype == example(new).dtype and view.effects.written_after(view.order[write], [new]) is None
    return Put(rows, sorting, write) if alike else None  # type: ignore[arg-type]


def _counts(view: View, numbers: Any, like: fx.Node) -> bool:
    """Return True for ``arange(n)``, as many as ``like`` has."""
    bound = view.arguments_of(numbers, "arange")
    if bound is None or not same_length(numbers, like) or is_changed(view, numbers):
        return False
    bounds = tuple(view.folded(b) for b in bound["bounds"])
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    return (start, step) == (0, 1)


@dataclass(frozen=True)
class Grouped:
    """``x[i] · weight[e]`` for the rows i of group e, which end at ``offsets[e]``.

    x: (rows, h); weight: (groups, h, n); offsets: (groups). Rows behind the last group are not computed. of_torch: False for
    the op that transformers has for other dtypes than torch's product takes."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    offsets: fx.Node
    of_torch: bool


def grouped_product(view: View, node: Any) -> Grouped | None:
    """Return the grouped product that ``node`` is, of torch or of transformers."""
    bound = view.arguments_of(node, "grouped_mm")
    if bound is not None and bound["bias"] is None:
        operands = [bound[name] for name in ("input", "other", "offs")]
    elif isinstance(node, fx.Node) and str(node.target).removesuffix(".default") == "transformers.grouped_mm_fallback":
        operands = [node.kwargs.get(n, node.args[i] if i < len(node.args) else None) for i, n in enumerate(_OF_FALLBACK)]
    else:
        return None
    if not all(isinstance(n, fx.Node) and is_tensor(n) for n in operands) or example(node).dim() != 2:
        return None
    x, weight, offsets = operands
    return Grouped(node, x, weight, offsets, of_torch=bound is not None) if example(x).dim() == 2 else None


@dataclass(frozen=True)
class Groups:
    """The numbers of sorted keys in each group, summed up: ``cumsum(histc(sorted keys, count), 0)``.

    nodes: those between the sort and the sum."""

    sorting: Sorting
    count: int
    nodes: frozenset[fx.Node]


def groups_of(view: View, offsets: Any) -> Groups | None:
    """Return what ``offsets``, (groups), counts, or None."""
    total = view.arguments_of(offsets, "cumsum")
    counts = None if total is None or is_changed(view, offsets) else view.arguments_of(total["input"], "histc")
    if total is None or counts is None:
        return None
    count, least, most = (view.folded(counts[name]) for name in ("bins", "min", "max"))
    if not isinstance(count, int) or count < 2 or (least, most) != (0, count - 1):  # histc puts all into a single bin
        return None
    nodes, keys = [total["input"], counts["input"]], counts["input"]
    if view.name(keys) in ("float", "double", "int", "to"):
        if example(keys).dtype not in _EXACT:
            return None
        keys = keys.args[0]
    else:
        nodes.pop()
    if not _is_item(keys, 0) or not _is_vector(keys) or is_written_before(view, keys, total["input"]):
        return None
    call = keys.args[0]
    bound, perm = view.arguments_of(call, "sort"), next((user for user in call.users if _is_item(user, 1)), None)
    if bound is None or bound["descending"] or perm is None:
        return None
    return Groups(Sorting(bound["input"], perm, call), count, frozenset(nodes))


def is_behind_the_groups(view: View, mask: Any) -> bool:
    """Return True if ``mask``, (rows, 1), is of the last rows: ``(sorted keys >= number)[:, None]``."""
    column = view.arguments_of(mask, "unsqueeze")
    compared = None if column is None or column["dim"] not in (1, -1) else view.arguments_of(column["input"], "ge")
    if column is None or compared is None or is_changed(view, mask) or is_changed(view, column["input"]):
        return False
    keys = compared["input"]
    if not _is_item(keys, 0) or not _is_vector(keys) or not isinstance(view.folded(compared["other"]), int):
        return False
    bound = view.arguments_of(keys.args[0], "sort")
    return bound is not None and not bound["descending"] and not is_written_before(view, keys, column["input"])


def choices_of(view: View, ids: fx.Node) -> fx.Node | None:
    """Return the scores, (..., experts), whose largest ``ids`` are the positions of, all in one dim; None for other ids."""
    chosen, crossed = reshaped_from(view, ids)
    if not _is_item(chosen, 1) or any(is_changed(view, n) for n in (chosen, *crossed)):
        return None
    bound = view.arguments_of(chosen.args[0], "topk")
    rank = None if bound is None else example(bound["input"]).dim()
    return bound["input"] if bound is not None and bound["dim"] in (-1, rank - 1) else None  # type: ignore[operator]


def reshaped_from(view: View, node: Any) -> tuple[Any, set[fx.Node]]:
    """Return what a node is reshaped from, and the nodes that reshape it."""
    crossed = set()
    while isinstance(node, fx.Node) and view.name(node) in ("view", "reshape", "flatten", "contiguous"):
        crossed.add(node)
        node = node.args[0]
    return node, crossed


def same_length(a: fx.Node, b: fx.Node) -> bool:
    """Return True if two tensors have as many rows."""
    return statically_known_true(example(a).shape[0] == example(b).shape[0])


def _is_vector(node: Any) -> bool:
    known = example(node) if isinstance(node, fx.Node) and is_tensor(node) else None
    return known is not None and known.dim() == 1 and known.dtype in (torch.int64, torch.int32)


def _is_item(node: Any, i: int) -> bool:
    """Return True for result ``i`` of a call with several."""
    taken = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == i
    return taken and isinstance(node.args[0], fx.Node) and isinstance(example(node.args[0]), tuple)  # type: ignore[union-attr]


def is_changed(view: View, node: fx.Node) -> bool:
    """Return True if anything is written to a tensor after it was made."""
    return view.effects.written_after(view.order[node], [node]) is not None


def is_written_before(view: View, node: fx.Node, reader: fx.Node, *, but: Collection[fx.Node] = ()) -> bool:
    """Return True if anything but these calls is written to a tensor before ``reader`` reads it."""
    return view.effects.writes_between(view.order[node], view.order[reader], [node], but=but) is not None
