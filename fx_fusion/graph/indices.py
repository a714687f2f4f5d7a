"""The one reader of ``x[index]``: what an index does to each dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

WHOLE = slice(None)


@dataclass(frozen=True)
class Index:
    """An index, an item for each dim of the indexed tensor and for each new axis, the ellipsis written out.

    ``items``: None for a new axis, a slice, an integer or a node that picks along a dim, a node that is a tensor of indices.
    ``rank``: of the indexed tensor.
    """

    items: tuple[Any, ...]
    rank: int

    @property
    def new_axes(self) -> list[int]:
        """The dims of the result that are new."""
        return [i for i, item in enumerate(self.items) if item is None]

    @property
    def dims(self) -> list[Any]:
        """The items without new axes: one for each dim of the indexed tensor."""
        return [item for item in self.items if item is not None]

    @property
    def cuts(self) -> list[tuple[int, slice]]:
        """The dims that a slice cuts, and the slices."""
        return [(dim, item) for dim, item in enumerate(self.dims) if isinstance(item, slice) and item != WHOLE]

    @property
    def picks(self) -> list[tuple[int, int]]:
        """Return the dims that an integer indexes, and the integers."""
        return [(dim, item) for dim, item in enumerate(self.dims) if _is_number(item)]

    @property
    def is_view(self) -> bool:
        """Return True if every item is a slice, an integer or a new axis."""
        return all(item is None or isinstance(item, slice) or _is_number(item) for item in self.items)

    @property
    def takes_rows(self) -> bool:
        """Return True if it takes rows by slices and integers, and all of the last dim."""
        return self.is_view and not self.new_axes and self.items[-1] == WHOLE

    @property
    def only_slices(self) -> bool:
        """Return True if every item is a slice or a new axis: then the result is a view, and no dim goes."""
        return all(item is None or isinstance(item, slice) for item in self.items)

    @property
    def tensors(self) -> list[fx.Node]:
        """The items that are nodes."""
        return [item for item in self.items if isinstance(item, fx.Node)]


def _is_number(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)  # x[True] is a new axis


def index_of(index: Any, rank: int) -> Index | None:
    """Read the index of a tensor of ``rank`` dims; None where it has more items than that, or two ellipses."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    at = [i for i, item in enumerate(items) if item is Ellipsis]
    if used > rank or len(at) > 1:
        return None
    rest = [WHOLE] * (rank - used)
    if at:
        items[at[0] : at[0] + 1] = rest
    else:
        items += rest
    return Index(tuple(items), rank)
