"""Hold what rewrites take for granted about the inputs of a graph, checked at run time (``runtime.speculate``)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fx_fusion.graph.masks.assumed import Assumed


class Assumptions:
    """The assumptions of one graph's rewrites about its inputs.

    Args:
        gm: the graph; None for one whose inputs are not seen at run time (bodies of higher-order ops).
        allowed: whether anything may be assumed.
    """

    def __init__(self, gm: fx.GraphModule | None, *, allowed: bool):
        self.allowed = allowed and gm is not None
        placeholders = [] if gm is None else gm.graph.find_nodes(op="placeholder")
        self._places = {n: i for i, n in enumerate(placeholders)}
        self._used: dict[Assumed, int] = {}

    @staticmethod
    def none() -> Assumptions:
        """Nothing is assumed."""
        return Assumptions(None, allowed=False)

    def assume(self, inputs: Iterable[Assumed]) -> None:
        """From now on the graph is right only if these inputs are what they are taken for."""
        for assumed in inputs:
            self._used[assumed] = self._places[assumed.node]

    def checks(self) -> tuple[tuple[int, str], ...]:
        """The positions of those inputs among the arguments of the graph, and what they have to be."""
        return tuple((place, assumed.kind) for assumed, place in self._used.items())

    def sentences(self) -> tuple[str, ...]:
        """The assumptions for the report."""
        return tuple(map(str, self._used))
