"""From matches to sites: who gets a node that several fusions want, and what is said about the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fx_fusion.cost import select
from fx_fusion.fusion import registry
from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.legality import why_not
from fx_fusion.fusion.matcher import Attempt, Match, NearMiss
from fx_fusion.fusion.pattern import patterns_of
from fx_fusion.graph.effects import entered
from fx_fusion.graph.view import View
from fx_fusion.inductor.channels_last import goes_channels_last, laid_out_of
from fx_fusion.options import Options
from fx_fusion.report.report import Site, location_of, module_of, shapes_of
from fx_fusion.rewrite.editor import Editor, rewrite


@dataclass
class Fuel:
    """How many replacements are still allowed (``FX_FUSION_FUEL``): bisect a wrong loss in log2 steps."""

    left: int | None

    def take(self) -> bool:
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


@dataclass(frozen=True)
class Candidate:
    """A match, and why it is not legal, if it is not."""

    fusion: Fusion
    match: Match
    reason: str | None


def find_matches(view: View) -> tuple[list[Candidate], list[NearMiss]]:
    """All candidates of all fusions, larger fusions first, and the attempts that came close."""
    found: list[Candidate] = []
    near: list[NearMiss] = []
    for fusion in registry.all_fusions():
        if fusion.find is not None:
            matches = list(fusion.find(view))
            found += [Candidate(fusion, m, why_not(fusion, m, view)) for m in matches if isinstance(m, Match)]
            near += [m for m in matches if isinstance(m, NearMiss)]
            continue
        legal, refused = _by_pattern(fusion, view, near)
        if fusion.pair is not None:
            legal = fusion.pair(view, legal)
        found += [Candidate(fusion, m, None) for m in legal]
        found += refused
    return found, near


def _by_pattern(fusion: Fusion, view: View, near: list[NearMiss]) -> tuple[list[Match], list[Candidate]]:
    patterns = patterns_of(fusion)
    root_ops = {p.terms[p.root].op for p in patterns}
    legal, refused = [], []
    for node in reversed(view.graph.nodes):
        if view.term(node).op not in root_ops:
            continue
        best: Candidate | None = None
        missed: NearMiss | None = None
        for pattern in patterns:
            attempt = Attempt(view, pattern, node)
            for found in attempt.matches():
                match = found if fusion.read is None else fusion.read(found)
                if match is None:
                    continue
                reason = why_not(fusion, match, view)
                if reason is None:
                    legal.append(match)
                    break
                best = best or Candidate(fusion, match, reason)
            else:
                if missed is None or attempt.near.matched > missed.matched:
                    missed = attempt.near
                continue
            break
        else:
            if best is not None:
                refused.append(best)
            elif missed is not None and 2 * missed.matched >= missed.total and missed.matched > 1:
                near.append(missed)
    return legal, refused  # roots from the end of the graph: what contains a smaller match of its own comes first


class Placement:
    """Who gets the nodes of a graph: candidates are taken in their order, legal ones that pay are rewritten. One whose
    replacement turns out not to fit gives its nodes back, and who waited for them is asked again."""

    def __init__(self, view: View, options: Options, editor: Editor, fuel: Fuel):
        self.view, self.options, self.editor, self.fuel = view, options, editor, fuel
        self.taken: set[fx.Node] = set()  # nodes that some site speaks for
        self.sites: list[Site] = []
        self._channels_last = goes_channels_last(view.graph)
        self._later: list[tuple[Candidate, str, str]] = []  # refused: reported unless another takes the place

    def place(self, candidates: Iterable[Candidate]) -> None:
        """Rewrite what is legal and pays, and make the sites of all candidates."""
        waiting = list(candidates)
        while waiting:
            chosen, waiting = self.choose(waiting)
            order = self.view.order
            fitted = [self._replace(c) for c in sorted(chosen, key=lambda c: order[c.match.root])]
            if all(fitted):
                break
        # A larger pattern that was refused is no news where a smaller one took its place; what a finder saw always is.
        for candidate, status, reason in self._later:
            if candidate.fusion.find is not None or not self.taken.intersection(candidate.match.nodes):
                self.sites.append(site(candidate.match, status, reason))
                self.taken.update(candidate.match.nodes)

    def choose(self, candidates: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Candidates to rewrite, no node in two of them; and those whose nodes another one has."""
        chosen, waiting = [], []
        for candidate in candidates:
            match = candidate.match
            if self._channels_last:
                match = dataclasses.replace(match, channels_last=laid_out_of(candidate.fusion, match))
            if self.taken.intersection((*match.nodes, match.root)):
                waiting.append(candidate)
                continue
            if candidate.reason is not None:
                self._later.append((candidate, "declined", candidate.reason))
                continue
            with entered(self.view.effects.region[match.root]):
                choice = select.choose(candidate.fusion, match, self.view, self.options)
            match = dataclasses.replace(match, note="; ".join(part for part in (match.note, choice.note) if part))
            candidate = dataclasses.replace(candidate, match=match)
            if choice.keep is not None:
                self._later.append((candidate, "kept", choice.keep))
                continue
            self.taken.update(match.nodes)
            chosen.append(candidate)
        return chosen, waiting

    def _replace(self, candidate: Candidate) -> bool:
        """Rewrite one match and make its site; whether its replacement fits."""
        made = site(candidate.match, "fused", "")  # before the rewrite changes what its nodes say
        if not self.fuel.take():
            made = dataclasses.replace(made, status="kept", reason=_noted("FX_FUSION_FUEL is used up", candidate.match))
        elif (reason := rewrite(candidate.fusion, candidate.match, self.editor)) is not None:
            self.sites.append(dataclasses.replace(made, status="declined", reason=_noted(reason, candidate.match)))
            self.taken.difference_update(candidate.match.nodes)
            return False
        self.sites.append(made)
        return True


def near_sites(near: Iterable[NearMiss], taken: set[fx.Node]) -> list[Site]:
    """Near misses as sites, the best one of each fusion and root; none where another site speaks for the root."""
    best: dict[tuple[str, fx.Node], NearMiss] = {}
    for miss in near:
        known = best.get((miss.fusion, miss.root))
        if known is None or miss.matched > known.matched:
            best[miss.fusion, miss.root] = miss
    sites = []
    for miss in best.values():
        at = module_of(miss.root), location_of(miss.root)
        if miss.root in taken and registry.fusion_named(miss.fusion).find is None:
            continue
        stopped = location_of(miss.node)
        where = f" at {miss.node.name} ({stopped})" if stopped and stopped != at[1] else f" at {miss.node.name}"
        reason = f"{miss.matched} of {miss.total} ops match{where}: {miss.reason}"
        sites.append(Site(miss.fusion, "near", reason, *at))
    return sites


def site(match: Match, status: str, reason: str) -> Site:
    root = match.root
    return Site(
        match.fusion, status, _noted(reason, match), module_of(root), location_of(root), shapes_of(dict(match.inputs))
    )


def _noted(reason: str | None, match: Match) -> str:
    return "; ".join(part for part in (reason, match.note) if part)
