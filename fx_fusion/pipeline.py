"""The column that every graph goes down: find, check, join, select, replace.

A ``Candidate`` is a place where a fusion may fit. It goes through the steps and collects its fate: what it matched, whether
that is legal, whether it pays, whether its replacement fits. What the report says of it, a ``Site``, is made of that.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fx_fusion.candidate import Candidate, described, sites
from fx_fusion.cost import select as cost
from fx_fusion.fusion import registry
from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.legality import why_not
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.matcher import Attempt
from fx_fusion.fusion.pattern import Pattern, patterns_of
from fx_fusion.fusion.placements import in_parts
from fx_fusion.fusion.search import Search
from fx_fusion.graph.effects import entered
from fx_fusion.graph.places import location_of, module_of
from fx_fusion.graph.statistics import is_statistic
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.inductor.channels_last import goes_channels_last, laid_out_of
from fx_fusion.options import Options
from fx_fusion.report.site import Site
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.replace import replace
from fx_fusion.torch_internals import bisector
from fx_fusion.torch_internals.nodes import is_erased

LAST_REPLACEMENT = "fx_fusion: the last replacement that FX_FUSION_FUEL allows: "


@dataclass
class Fuel:
    """The number of replacements that are still allowed (``FX_FUSION_FUEL``): bisect a wrong loss in log2 steps."""

    left: int | None

    def take(self) -> bool:
        """Return True if one more replacement is allowed."""
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


def rewrite(search: Search, options: Options, editor: Editor, fuel: Fuel, graph: int) -> list[Site]:
    """Rewrite one graph in place; the sites of it, numbered as graph ``graph``."""
    view = search.view
    candidates = list(find(search))
    check(candidates, view)
    candidates = join(candidates, view)
    channels_last = goes_channels_last(view.graph)
    taken: set[fx.Node] = set()  # nodes that some site speaks for
    waiting = [c for c in candidates if c.status in ("legal", "declined")]
    while waiting:
        chosen, waiting = select(waiting, taken, view, options, channels_last)
        # One whose replacement turns out not to fit gives its nodes back, and who waited for them is asked again.
        if replace_all(chosen, taken, editor, fuel):
            break
    finish(candidates, editor)
    return list(sites(candidates, waiting, taken, view, graph))


# -- find ----------------------------------------------------------------------------------------------------------
def find(search: Search) -> Iterator[Candidate]:
    """Candidates of all fusions, in the order in which fusions are tried."""
    for node in search.view.graph.nodes:  # from the first on: the last of a long chain alone would be read too deep
        search.view.term(node)
    for fusion in registry.all_fusions():
        for miss in () if fusion.unread is None else fusion.unread(search.view):
            yield Candidate(fusion, miss.root, status="near", reason=described(miss), miss=miss, unread=True)
        if fusion.find is None:
            yield from _by_pattern(fusion, search.view)
            continue
        for result in fusion.find(search):
            if isinstance(result, Match):
                yield Candidate(fusion, result.root, (result,))
            else:
                yield Candidate(fusion, result.root, status="near", reason=described(result), miss=result)


class _Ways:
    """The matches of some patterns at one root, and the attempt that came furthest."""

    def __init__(self, view: View, patterns: Iterable[Pattern], root: fx.Node):
        self.view, self.patterns, self.root = view, patterns, root
        self.near: NearMiss | None = None

    def __iter__(self) -> Iterator[Match]:
        for pattern in self.patterns:
            attempt = Attempt(self.view, pattern, self.root)
            yield from attempt.matches()
            if self.near is None or attempt.near.matched > self.near.matched:
                self.near = attempt.near


def _by_pattern(fusion: Fusion, view: View) -> Iterator[Candidate]:
    patterns = patterns_of(fusion)
    root_ops = {p.terms[p.root].op for p in patterns}
    for node in reversed(view.graph.nodes):  # what contains a smaller match of its own comes first
        if view.term(node).op in root_ops:
            yield Candidate(fusion, node, _Ways(view, patterns, node))


# -- check ---------------------------------------------------------------------------------------------------------
def check(candidates: Iterable[Candidate], view: View) -> None:
    """Take the first legal way of each candidate; where there is none, say why not."""
    for candidate in candidates:
        for match in candidate.ways:
            match = in_parts(candidate.fusion, match)
            reason = why_not(candidate.fusion, match, view)
            if reason is None:
                candidate.match = match
                candidate.decide("legal")
                break
            if candidate.match is None:
                candidate.match = match
                candidate.decide("declined", reason)
        near = getattr(candidate.ways, "near", None)
        if candidate.match is None and near is not None and _is_news(near, view):
            candidate.miss = near
            candidate.decide("near", described(near))
        if candidate.match is not None:
            candidate.root = candidate.match.root


def _is_news(near: NearMiss, view: View) -> bool:
    """Return True if a near miss may be what its fusion is about."""
    return near.matched > 1 and _is_half(near) and not _is_root_of_no_rows(near, view)


def _is_root_of_no_rows(near: NearMiss, view: View) -> bool:
    """Return True if a near miss stopped under a root of one number, or of no statistic: an optimizer's, and no norm."""
    node = near.node
    sums = (user for user in node.users if view.name(user) == "add")
    above = {*node.users, *(user for total in sums for user in total.users)}
    if not is_tensor(node) or not any(view.name(user) in ("sqrt", "rsqrt") for user in above):
        return False
    return example(node).dim() == 0 or not is_statistic(node, view.name, _computed)


def _computed(node: fx.Node) -> list[fx.Node]:
    return [operand for operand in node.all_input_nodes if operand.op not in ("placeholder", "get_attr")]


def _is_half(near: NearMiss) -> bool:
    """Return True if half of a pattern's ops fit, rounded down where they are few: less than that is anybody's
    arithmetic."""
    return near.matched >= (near.total // 2 if near.total < 6 else near.total / 2)


# -- join ----------------------------------------------------------------------------------------------------------
def join(candidates: Iterable[Candidate], view: View) -> list[Candidate]:
    """The candidates with legal neighbors of a fusion made one where it says how, and the result is legal; those that are
    legal before the others of their fusion."""
    joined: list[Candidate] = []
    by_fusion: dict[Fusion, list[Candidate]] = {}
    for candidate in candidates:
        by_fusion.setdefault(candidate.fusion, []).append(candidate)
    for fusion, members in by_fusion.items():
        legal = [c for c in members if c.status == "legal"]
        rest = [c for c in members if c.status != "legal"]
        if fusion.join is not None:
            legal = _joined(fusion, sorted(legal, key=lambda c: view.order[c.root]), view)
        joined += [*legal, *rest]
    return joined


def _joined(fusion: Fusion, members: Iterable[Candidate], view: View) -> list[Candidate]:
    joined: list[Candidate] = []
    assert fusion.join is not None
    for candidate in members:
        assert candidate.match is not None
        before = joined[-1] if joined else None
        both = fusion.join(view, before.match, candidate.match) if before is not None and before.match is not None else None
        if before is not None and both is not None and why_not(fusion, both, view) is None:
            before.match, before.root = both, both.root
        else:
            joined.append(candidate)
    return joined


# -- select --------------------------------------------------------------------------------------------------------
def select(
    candidates: Sequence[Candidate], taken: set[fx.Node], view: View, options: Options, channels_last: bool
) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates to replace, no node in two of them; and those whose nodes another one has."""
    chosen: list[Candidate] = []
    waiting: list[Candidate] = []
    claimed = Counter(node for c in candidates if c.status == "legal" and c.match is not None for node in c.match.nodes)
    for candidate in candidates:
        match = candidate.match
        assert match is not None
        if taken.intersection((*match.nodes, match.root)):
            waiting.append(candidate)
            continue
        if candidate.status == "declined":
            candidate.refused = True
            continue
        if channels_last:
            match = dataclasses.replace(match, channels_last=laid_out_of(candidate.fusion, match))
        with entered(view.effects.region[match.root]):
            choice = cost.choose(candidate.fusion, match, view, options, claimed)
        candidate.estimate = choice.estimate
        note = "; ".join(part for part in (match.note, choice.note) if part)
        candidate.match = dataclasses.replace(match, note=note)
        if choice.keep is not None:
            candidate.decide("kept", choice.keep, refused=True)
            claimed.subtract(match.nodes)
            continue
        taken.update(match.nodes)
        chosen.append(candidate)
    return chosen, waiting


# -- replace -------------------------------------------------------------------------------------------------------
def replace_all(candidates: Iterable[Candidate], taken: set[fx.Node], editor: Editor, fuel: Fuel) -> bool:
    """Replace what was selected, in the order of the graph; whether every replacement fits."""
    order = editor.view.order
    all_fit = True
    for candidate in sorted(candidates, key=lambda c: order[c.root]):
        assert candidate.match is not None
        place = f"{candidate.fusion.name} in {module_of(candidate.root)} ({location_of(candidate.root)})"
        if bisector.is_switched_off(place.__str__):
            candidate.decide("kept", "left out by torch's compiler bisector")
            continue
        if not fuel.take():
            candidate.decide("kept", "FX_FUSION_FUEL is used up")
            continue
        candidate.names = tuple(n.name for n in sorted(candidate.nodes, key=order.__getitem__))
        known = len(editor.made)
        if (reason := replace(candidate.fusion, candidate.match, editor)) is None:
            candidate.decide("fused")
            candidate.made = tuple(editor.made[known:])
            candidate.tail = editor.tails.get(candidate.match.root, ())
            if fuel.left == 0:
                print(f"{LAST_REPLACEMENT}{place}", file=sys.stderr)
        else:
            candidate.decide("declined", reason)
            taken.difference_update(candidate.nodes)
            all_fit = False
    return all_fit


# -- finish --------------------------------------------------------------------------------------------------------
def finish(candidates: Iterable[Candidate], editor: Editor) -> None:
    """Let fusions look at who reads what they made, now that everything is replaced."""
    for candidate in candidates:
        if candidate.status == "fused" and candidate.fusion.finish is not None:
            assert candidate.match is not None
            note = candidate.fusion.finish(editor, candidate.match, [n for n in candidate.made if not is_erased(n)])
            if note:
                notes = filter(None, (candidate.match.note, note))
                candidate.match = dataclasses.replace(candidate.match, note="; ".join(notes))
