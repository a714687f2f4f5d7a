"""lm_head, log-probabilities of given tokens and the entropy of every row -> kernels/token_log_probs.py.

Without the entropy it is ``linear_cross_entropy`` that takes the site; this is for both from the same logits, as policies
are trained with: -Σ p log p with p written as exp(log_softmax) or as softmax, or logsumexp - Σ p · logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.size_hints import elements
from fx_fusion.kernels.token_log_probs import token_log_probs, token_log_probs_of_part
from fx_fusion.patterns.log_probs_entropy import of_logits
from fx_fusion.patterns.sites.entropy import first_root, losses_with_entropy, replaced
from fx_fusion.patterns.sites.head import head_of, leave_to_linear_rows, operands, sources_of_logits, why_again, why_small
from fx_fusion.rewrite.deferral import deferrable_outputs
from fx_fusion.rewrite.editor import Editor


def log_probs_and_entropy(x, lm_head, bias, target, softcap, scale):
    return of_logits(F.linear(x, lm_head, bias), target, softcap, scale)


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for site, entropy, together in losses_with_entropy(view):
        head = head_of(view, together, "token_log_probs")
        if isinstance(head, NearMiss):
            yield head
            continue
        to_logits = [*head.above, *head.chain]
        deferred, following = deferrable_outputs(search, to_logits, {*together.nodes, *to_logits}, head.sources)
        yield Match(
            fusion="token_log_probs",
            outputs=(site.root, entropy.root),
            nodes=frozenset((*together.nodes, *head.chain, *following)),
            inputs={**head.inputs, "target": site.target},
            statics={"softcap": head.seen.softcap, "scale": head.seen.scale},
            deferred=deferred,
            unmade={"logits": head.seen.source},
            sharded=frozenset() if head.shards is None else frozenset(head.inputs),
            reading=(site, entropy, head),
        )


def emit(editor: Editor, match: Match) -> None:
    site, entropy, head = match.reading
    if head.shards is None:
        leave_to_linear_rows(editor, match)
    with editor.graph.inserting_before(first_root(editor, match)):
        arguments = (*operands(editor, head, site), head.seen.softcap, head.seen.scale)
        if head.shards is None:
            call = editor.call(token_log_probs.overload, arguments, like=site.root)
        else:
            call = editor.call(token_log_probs_of_part, (*arguments, *head.shards.part), like=site.root)
        sources = sources_of_logits(editor, head, match)
        replaced(editor, site, entropy, call)
    editor.defer(match.deferred, sources, like=head.seen.source)


def guard(x, lm_head, bias, target, softcap, scale):
    return wrong_dtype(x=x, lm_head=lm_head)


def why_keep(x, lm_head, bias, target, softcap, scale):
    return why_small(x, lm_head, elements(target)) or why_again(x, lm_head, bias)


FUSION = Fusion(
    name="token_log_probs",
    pattern=log_probs_and_entropy,
    inputs={"x": "m h", "lm_head": "v h", "bias": "(v)", "target": "m"},
    integers={"target": "v"},
    variants=({"softcap": 0.0, "scale": 1.0, "bias": None}, {"softcap": 0.0, "scale": 0.5}, {"softcap": 30.0, "scale": 1.0}),
    find=find,
    of_logits=True,
    emit=emit,
    kernel=token_log_probs,
    guard=guard,
    why_keep=why_keep,
    before=("linear_cross_entropy", "log_probs_entropy", "linear_rows", "cross_entropy"),
    on_cpu=True,
    cases=(
        case("one_class", m=3, h=4, v=1, bench=False),
        case("odd", m=37, h=19, v=781, bench=False),
        case("chunks", m=40, h=16, v=8500, bench=False),
        case("llama_1b", m=8192, h=2048, v=128256),
        case("llama_2", m=16384, h=4096, v=32000),
    ),
    source="Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax), in chunks as linear_cross_entropy",
)
