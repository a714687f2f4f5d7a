"""From matches to sites: who gets a node that several fusions want, and what is said about the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fx_fusion.canonicalize import View
from fx_fusion.conv_layout import goes_channels_last, laid_out_of
from fx_fusion.effects import entered
from fx_fusion.fusion import Fusion
from fx_fusion.legality import why_not
from fx_fusion.match import Attempt, Match, NearMiss
from fx_fusion.options import Options
from fx_fusion.pattern import patterns_of
from fx_fusion.registry import all_fusions, fusion_named
from fx_fusion.report import Site, location_of, module_of, shapes_of
from fx_fusion.rewrite import Editor, rewrite
from fx_fusion.select import why_keep


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
    for fusion in all_fusions():
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
            for match in attempt.matches():
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


def choose(
    candidates: Iterable[Candidate], view: View, options: Options
) -> tuple[list[tuple[Fusion, Match]], list[Site], set[fx.Node]]:
    """Legal matches that pay, no node in two of them; the sites of the others that nobody else took; and every node
    that some site speaks for."""
    channels_last = goes_channels_last(view.graph)
    taken: set[fx.Node] = set()
    chosen: list[tuple[Fusion, Match]] = []
    sites: list[Site] = []
    later: list[tuple[Candidate, str, str]] = []
    for candidate in candidates:
        match = candidate.match
        if channels_last:
            match = dataclasses.replace(match, channels_last=laid_out_of(candidate.fusion, match))
        if taken.intersection((*match.nodes, match.root)):
            continue
        if candidate.reason is not None:
            later.append((candidate, "declined", candidate.reason))
            continue
        with entered(view.effects.region[match.root]):
            keep = why_keep(candidate.fusion, match, view, options)
        if keep is not None:
            later.append((candidate, "kept", keep))
            continue
        taken.update(match.nodes)
        chosen.append((candidate.fusion, match))
    # A larger pattern that was refused is no news where a smaller one took its place; what a finder saw always is.
    for candidate, status, reason in later:
        if candidate.fusion.find is not None or not taken.intersection(candidate.match.nodes):
            sites.append(site(candidate.match, status, reason))
            taken.update(candidate.match.nodes)
    order = view.order
    return sorted(chosen, key=lambda pair: order[pair[1].root]), sites, taken


def replace(fusion: Fusion, match: Match, editor: Editor, fuel: Fuel) -> Site:
    """Rewrite one match; its site."""
    described = {k: getattr(site(match, "", ""), k) for k in ("module", "location", "shapes")}
    if not fuel.take():
        return Site(match.fusion, "kept", "FX_FUSION_FUEL is used up", **described)
    reason = rewrite(fusion, match, editor)
    status = "fused" if reason is None else "declined"
    return Site(match.fusion, status, _noted(reason, match), **described)


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
        if miss.root in taken and fusion_named(miss.fusion).find is None:
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
