"""Nested containers: the arguments of nodes and of functions.

Gone (``torch.utils._pytree``): importing fails, and the backend can't be used; all of torch.compile is built on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["map_nodes", "tree_leaves", "tree_map", "tree_map_only"]


def map_nodes(change: Callable[[fx.Node], Any], items: Any) -> Any:
    """``items`` with every node in it replaced by ``change(node)``, also where one is a bound of a slice."""

    def changed(item: Any) -> Any:
        if isinstance(item, slice):
            return slice(*map(changed, (item.start, item.stop, item.step)))
        return change(item) if isinstance(item, fx.Node) else item

    return tree_map(changed, items)
