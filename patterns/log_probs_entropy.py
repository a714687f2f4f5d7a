"""Log-probabilities of given tokens and the entropy of every row, of logits that exist -> kernels/log_probs_entropy.py.

``token_log_probs`` takes them with their lm_head and needs no memory for logits, but computes these again for the
gradient; this reads them once each way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.kernels.log_probs_entropy import log_probs_entropy
from fx_fusion.patterns import cross_entropy
from fx_fusion.patterns.sites.entropy import first_root, losses_with_entropy, replaced
from fx_fusion.patterns.sites.loss import read_logits, slice_below
from fx_fusion.patterns.sites.rows import rows_of
from fx_fusion.rewrite.editor import Editor


def of_logits(logits, target, softcap, scale):
    z = logits.float() * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    log_p = torch.log_softmax(z, dim=-1)
    # As torch.distributions.Categorical: a class whose logit is -inf has no part in the entropy.
    finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * finite).sum(-1)


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for site, entropy, together in losses_with_entropy(view):
        seen = read_logits(view, together, to_linear=False)
        if (slice_of := slice_below(view, seen)) is not None:
            yield NearMiss("log_probs_entropy", site.root, seen.source, slice_of)
            continue
        yield Match(
            fusion="log_probs_entropy",
            outputs=(site.root, entropy.root),
            nodes=frozenset((*together.nodes, *seen.nodes)),
            inputs={"logits": seen.source, "target": site.target},
            statics={"softcap": seen.softcap, "scale": seen.scale},
            reading=(site, entropy),
        )


def emit(editor: Editor, match: Match) -> None:
    site, entropy = match.reading
    with editor.graph.inserting_before(first_root(editor, match)):
        rows = rows_of(editor, match.inputs["logits"], site)
        arguments = (*rows, match.statics["softcap"], match.statics["scale"])
        replaced(editor, site, entropy, editor.call(log_probs_entropy.overload, arguments, like=site.root))


def guard(logits, target, softcap, scale):
    return cross_entropy.guard(logits, target, None, 0, 0.0, softcap, scale)


def why_keep(logits, target, softcap, scale):
    return cross_entropy.why_keep(logits, target, None, 0, 0.0, softcap, scale)


FUSION = Fusion(
    name="log_probs_entropy",
    pattern=of_logits,
    inputs={"logits": "m v", "target": "m"},
    integers={"target": "v"},
    variants=({"softcap": 0.0, "scale": 1.0}, {"softcap": 30.0, "scale": 0.5}),
    find=find,
    of_logits=True,
    emit=emit,
    kernel=log_probs_entropy,
    guard=guard,
    why_keep=why_keep,
    traffic=("3*m*v*bytes", "6*m*v*bytes"),
    before=("cross_entropy",),
    cases=(
        case("one_class", m=3, v=1, bench=False),
        case("odd", m=5, v=781, bench=False),
        case("long", m=3, v=20001, bench=False),
        case("llama_3", m=8192, v=128256),
        case("llama_2", m=16384, v=32000),
    ),
    source="Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax), with the entropy as one more sum",
)
