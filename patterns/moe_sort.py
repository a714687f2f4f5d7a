"""The order of experts: a sort of the router's choices and the number of each -> kernels/moe_sort.py, a counting sort."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.routing import choices_of, groups_of
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.terms import example
from fx_fusion.kernels.moe_sort import MOST_EXPERTS, moe_sort
from fx_fusion.rewrite.editor import Editor


def ordered(scores, k):
    experts = scores.shape[1]
    ids = scores.topk(k, -1).indices.reshape(-1)
    keys, perm = torch.sort(ids, stable=True)
    counts = torch.histc(keys.float(), bins=experts, min=0, max=experts - 1)
    return torch.cumsum(counts, 0, dtype=torch.int32), perm


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        groups = groups_of(view, node)
        scores = None if groups is None else choices_of(view, groups.sorting.keys)
        if groups is None or scores is None or not statically_known_true(example(scores).shape[-1] == groups.count):
            continue
        call = groups.sorting.call
        assert call is not None
        yield Match(
            fusion="moe_sort",
            outputs=(node, *(user for user in call.users if not user.users.keys() <= groups.nodes)),
            nodes=frozenset({node, call, *call.users, *groups.nodes}),
            inputs={"scores": scores},
            statics={"k": None},
            rounded=groups.nodes,
            reading=groups,
        )


def emit(editor: Editor, match: Match) -> None:
    ids, (offsets, *items) = match.reading.sorting.keys, match.outputs
    first = min(match.outputs, key=editor.view.order.__getitem__)
    with editor.graph.inserting_before(first):
        results = editor.call(moe_sort, (ids, match.reading.count), like=offsets)
        keys, perm, ends = (editor.item(results, i, like=offsets) for i in range(3))
        new = [ends, *((keys, perm)[item.args[1]] for item in items)]
        editor.check(match.outputs, new)
    for output, node in zip(match.outputs, new, strict=True):
        editor.replace(output, node)


def guard(scores, k):
    if scores.shape[-1] > MOST_EXPERTS:
        return f"{scores.shape[-1]} experts; the kernel counts up to {MOST_EXPERTS}"
    return None


def why_keep(scores, k):
    return too_small(scores, symbolic=True)


FUSION = Fusion(
    name="moe_sort",
    instead="torch.sort(scores.topk(k, -1).indices.reshape(-1))",
    pattern=ordered,
    inputs={"scores": "t e"},
    frozen=("scores",),
    variants=({"k": 2},),
    find=find,
    emit=emit,
    guard=guard,
    why_keep=why_keep,
    traffic=("400*t", "4000*t"),  # of torch.sort and histc: what their 0.15 ms would move (H200, 8192 tokens)
    cases=(
        case("one_token", t=1, e=2, bench=False),
        case("odd", t=29, e=13, bench=False),
        case("blocks", t=700, e=3, bench=False),
        case("mixtral", t=8192, e=8, statics={"k": 2}),
        case("qwen3_moe", t=8192, e=128, statics={"k": 8}),
        case("deepseek_v3", t=8192, e=256, statics={"k": 8}),
    ),
    source="Cormen et al., Introduction to Algorithms",
)
