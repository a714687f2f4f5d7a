"""What rewrites take for granted about the inputs of a graph, checked at run time (``runtime.speculate``)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


class Assumptions:
    """The inputs of one graph that its rewrites take to be all ones.

    Args:
        gm: the graph; None for one whose inputs are not seen at run time (bodies of higher-order ops).
        allowed: whether anything may be assumed.
    """

    def __init__(self, gm: fx.GraphModule | None, *, allowed: bool):
        self.allowed = allowed and gm is not None
        placeholders = [] if gm is None else gm.graph.find_nodes(op="placeholder")
        self._places = {n: i for i, n in enumerate(placeholders)}
        self._used: dict[fx.Node, int] = {}

    @staticmethod
    def none() -> Assumptions:
        """Nothing is assumed."""
        return Assumptions(None, allowed=False)

    def assume(self, inputs: Iterable[fx.Node]) -> None:
        """From now on the graph is right only if these inputs are all ones."""
        for node in inputs:
            self._used[node] = self._places[node]

    def positions(self) -> tuple[int, ...]:
        """The positions of those inputs among the arguments of the graph."""
        return tuple(self._used.values())

    def sentences(self) -> tuple[str, ...]:
        """The assumptions for the report."""
        return tuple(f"{str(n.target).strip('_').removeprefix('L_')} is all ones" for n in self._used)
