"""Hold what finders look through: a view, proofs about its masks, and what may be assumed and deferred there."""

from __future__ import annotations

from fx_fusion.graph.masks.prover import MaskProver
from fx_fusion.graph.view import View


class Search:
    """One graph that fusions are looked for in.

    Args:
        view: of the graph.
        may_assume: whether a padding mask that it gets may be taken for all ones (checked at run time).
        masks: what may be assumed of masks of attention calls that it gets (``graph.masks.assumed``).
        may_defer: whether outputs of it may be computed when they are read.
        outer: the search through the graph around this one, for a checkpointed body.
    """

    def __init__(
        self, view: View, *, may_assume: bool = False, masks: str | None = None, may_defer: bool = False,
        outer: Search | None = None,
    ):  # fmt: skip
        self.view, self.may_defer, self.outer = view, may_defer, outer
        self.masks: MaskProver = MaskProver(
            view, may_assume=may_assume, masks=masks, outer=None if outer is None else outer.masks
        )
