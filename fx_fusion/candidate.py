"""A place where a fusion may fit: its way through the pipeline, and what the report says of it in the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from fx_fusion.cost.estimate import Estimate
from fx_fusion.fusion import registry
from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.graph.places import frames_of, location_of, module_of
from fx_fusion.graph.size_hints import bytes_of
from fx_fusion.graph.terms import example
from fx_fusion.graph.view import View
from fx_fusion.report.site import Site, shapes_of


@dataclass(eq=False)
class Candidate:
    """A place where a fusion may fit.

    Attributes:
        ways: the matches there, to be tried in this order.
        match: the one that was chosen: the first legal one, or the first of all.
        status: ``legal`` until it is decided, then that of its site; empty where nothing is said of it.
        reason: why it is not fused.
        miss: how near it came, if that is all.
        refused: whether it was decided before it had the nodes: another candidate may still take them.
        unread: whether no finder or pattern came near, and the fusion says so itself.
        names: of its nodes, before some of them went to nodes that replaced them.
        made: the nodes that replaced its own.
        tail: the names of nodes behind it up to a number, if its gradients are right for that number alone.
        estimate: what it takes, and what Inductor does.
    """

    fusion: Fusion
    root: fx.Node
    ways: Iterable[Match] = ()
    match: Match | None = None
    status: str = ""
    reason: str = ""
    miss: NearMiss | None = None
    refused: bool = False
    unread: bool = False
    names: tuple[str, ...] = ()
    made: tuple[fx.Node, ...] = ()
    tail: tuple[str, ...] = ()
    estimate: Estimate | None = None

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """The nodes that it would take."""
        return frozenset() if self.match is None else self.match.nodes

    def decide(self, status: str, reason: str = "", *, refused: bool = False) -> None:
        """Settle what becomes of it."""
        self.status, self.reason, self.refused = status, reason, refused

    def site(self, graph: int) -> Site:
        """Return what the report says of it."""
        shapes = {} if self.match is None else shapes_of(self.match.operands)
        note = "" if self.match is None else self.match.note
        reason = "; ".join(part for part in (self.reason, note) if part)
        nodes = self.names or tuple(n.name for n in self.nodes) or (self.root.name,)
        made = tuple(n.name for n in self.made)
        unmade = self.match.unmade if self.match is not None and self.status == "fused" else {}
        return Site(
            self.fusion.name, self.status, reason, module_of(self.root), location_of(self.root), shapes, graph,
            nodes, made, frames_of(self.root), {} if self.estimate is None else self.estimate.facts(),
            {name: bytes_of(example(node)) for name, node in unmade.items()}, *_stop(self), self.tail,
        )  # fmt: skip


def _stop(candidate: Candidate) -> tuple[str, str, tuple[int, int]]:
    """Return where a near miss stopped, for its site."""
    miss = candidate.miss
    if miss is None or candidate.status != "near":
        return "", "", (0, 0)
    return miss.node.name, "".join(frames_of(miss.node)[-1:]), (miss.matched, miss.total)


def described(miss: NearMiss) -> str:
    """Return what the report says of a near miss."""
    stopped = location_of(miss.node)
    elsewhere = bool(stopped) and stopped != location_of(miss.root)
    where = f"at {miss.node.name} ({stopped})" if elsewhere else f"at {miss.node.name}"
    far = f"{miss.matched} of {miss.total} ops match " if miss.total else ""
    return f"{far}{where}: {miss.reason}"


def sites(
    candidates: Iterable[Candidate], waiting: Iterable[Candidate], taken: set[fx.Node], view: View, graph: int
) -> Iterator[Site]:  # fmt: skip
    """One site for each candidate that has something to say: what had nodes, in the order of the graph, then the rest."""
    silent = set(waiting)
    decided = [c for c in candidates if c.match is not None and c not in silent]
    had_the_nodes = [c for c in decided if not c.refused]
    yield from (c.site(graph) for c in sorted(had_the_nodes, key=lambda c: view.order[c.root]))
    for candidate in decided:
        # A larger pattern that was refused is no news where a smaller one took its place; what a finder saw always is.
        if candidate.refused and (candidate.fusion.find is not None or not taken.intersection(candidate.nodes)):
            taken.update(candidate.nodes)
            yield candidate.site(graph)
    yield from (c.site(graph) for c in _nearest(candidates, taken))


def _nearest(candidates: Iterable[Candidate], taken: set[fx.Node]) -> Iterator[Candidate]:
    """Near misses that are news. Of patterns that stopped at one node, the one that came furthest; all that finders saw."""
    order = {fusion: i for i, fusion in enumerate(registry.all_fusions())}
    owner: dict[fx.Node, int] = {}  # the fusion that replaces a node
    for candidate in candidates:
        if candidate.status == "fused":
            owner.update(dict.fromkeys(candidate.nodes, order[candidate.fusion]))
    best: dict[tuple[fx.Node, fx.Node | None], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.unread):
        if candidate.status != "near" or candidate.miss is None:
            continue
        root, fusion = candidate.root, candidate.fusion
        by_larger = owner.get(root, len(order)) < order[fusion]
        if by_larger or (root in taken and (candidate.unread or fusion.find is None)):
            continue
        if candidate.unread and any(root is known.root for known in best.values()):
            continue
        miss = candidate.miss
        place = miss.node, None if fusion.find is None and not candidate.unread else root
        known = best.get(place)
        if known is None or known.miss is None or miss.matched * known.miss.total > known.miss.matched * miss.total:
            best[place] = candidate
    yield from best.values()
