"""Attention written out, with a window, a softcap or a sink -> FlexAttention: no scores in memory, no hidden block computed.

    matmul(q, kᵀ) · scale -> [softcap · tanh(· / softcap)] -> [masked] -> [cat(·, sink)]
        -> softmax -> [without the sink's] -> matmul(·, v)

Models with softcaps (Gemma 2) and sinks (gpt-oss and those after it) write attention out, since scaled_dot_product_attention
has neither; with a window or padding alone that is ``attn_implementation="eager"``. A query that sees nothing has equal
probabilities for all keys where a finite number hides them, as there; beside a sink, which takes them all, zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.masks.structure import CAUSAL, FILLED, Structure
from fx_fusion.graph.size_hints import expected, trained
from fx_fusion.graph.terms import example
from fx_fusion.kernels.block_sparse_attention import block_sparse_attention, block_sparse_attention_and_lse
from fx_fusion.patterns import block_sparse_attention as under_a_mask
from fx_fusion.patterns.repeat_kv import without_repeats
from fx_fusion.patterns.sites.blocks import operands, read_mask, read_when_it_runs, too_few_scores
from fx_fusion.patterns.sites.scores import Scores
from fx_fusion.patterns.sites.softmax_attention import times, written_out
from fx_fusion.rewrite.editor import Editor, differs
from fx_fusion.rewrite.replace import insertion_point


def capped_attention_in_a_window(query, key, value):
    length, softcap = query.shape[-2], 50.0
    q = torch.arange(length, device=query.device)[:, None]
    k = torch.arange(length, device=key.device)[None, :]
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~((k <= q) & (k > q - max(1, length // 4))), float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for found in written_out(search):
        if isinstance(found, NearMiss) or found.reading.plain:  # of attention
            continue
        scores: Scores = found.reading
        what = _described(scores)
        if why := _beyond(found, scores):
            yield NearMiss("flex_attention", found.root, found.root, f"{why} ({what})")
            continue
        key, value, repeats = without_repeats(view, found.inputs["k"], found.inputs["v"])
        inputs = {"query": found.inputs["q"], "key": key, "value": value}
        crossed = frozenset([scores.keys, *found.crossed, *repeats])
        others = {} if scores.sink is None else {"sink": scores.sink}
        others.update({f"factor_{i}": factor for i, (_, factor) in enumerate(scores.factors)})
        data = read_when_it_runs(_shown(scores))
        others.update({f"label_{i}": node for i, node in enumerate(data)})
        outputs = found.outputs if scores.lse is None else (found.root, scores.lse)
        yield dataclasses.replace(
            found, fusion="flex_attention", outputs=outputs, nodes=found.nodes | {*outputs}, inputs=inputs, others=others,
            crossed=crossed, keep=_keep(scores, inputs), note=f"with {what}",
        )  # fmt: skip


def _beyond(found: Match, scores: Scores) -> str | None:
    """Return what FlexAttention could not do as it is called here."""
    if scores.dropout:
        return "FlexAttention has no dropout"
    if scores.lse is not None and _shown(scores).hidden_rows:
        return "the mask may hide a row entirely, and the logsumexp of its scores is read"
    if scores.biases:
        return f"{scores.biases[0][0].name}, a learned bias, is added to the scores"
    assert scores.values is not None
    if set(found.inputs) != {"q", "k", "v"} or scores.values.out_order is not None:
        return "queries, keys and values lie in another order than (batch, heads, length, head dim)"
    return None


def _keep(scores: Scores, inputs: Mapping[str, fx.Node]) -> str | None:
    """Return why Inductor keeps attention whose mask hides little: 0.78 of its speed at 4 x 8 x 4096 x 256 under padding."""
    query, key, value = map(example, inputs.values())
    shown = _shown(scores)
    if expected(query.shape[-1]) <= 128 or shown.low is not None or shown.high is not None or not trained(query, key, value):
        return None
    return "at a head dim above 128 FlexAttention is faster only under a causal mask or a window (on an H200)"


def _shown(scores: Scores) -> Structure:
    return (scores.structure or Structure()) & (CAUSAL if scores.causal else Structure())


def _described(scores: Scores) -> str:
    parts = [] if scores.structure is None else [f"a mask: {scores.structure}"]
    parts += [] if scores.softcap is None else [f"a softcap of {scores.softcap:g}"]
    parts += [] if scores.sink is None else ["a sink"]
    parts += [] if scores.lse is None else ["the logsumexp of its scores"]
    return ", ".join(parts)


def why_keep(query, key, value):
    # An H200, forward and backward, written out under Inductor: at a head dim of 64 1.73 times as fast at 2^22 scores and
    # 7 at 2^28 (a sink, causal); at 128 0.98 at 2^25, 2.5 at 2^29; at 256 0.90 at 2^27, 1.09 at 2^29 (a softcap, causal).
    # A forward alone at 256: 2.1 times as fast at 2^27, 5.5 in a window of a fourth. Under padding alone, three layers: 1.03
    # to 1.6 at 64, 0.98 to 1.04 at 128 with a tenth of the memory, 0.78 at 256 (``_keep``).
    wide = 2**29 if trained(query, key, value) else 2**27
    return too_few_scores(query, key, 2**22 if query.shape[3] <= 64 else 2**26 if query.shape[3] <= 128 else wide)


def emit(editor: Editor, match: Match) -> None:
    scores: Scores = match.reading
    root, structure = match.root, _shown(scores)
    with editor.graph.inserting_before(insertion_point(match, editor)):
        query, key, value = operands(editor, match)
        query = times(editor, query, scores.factors, root)
        mask, hidden = read_mask(editor, query, key, structure, root)
        sink = None if scores.sink is None else editor.now(scores.sink)
        given = query, key, value, *mask, float(scores.scale), scores.softcap
        if len(match.outputs) == 1:
            filled = structure.hidden_rows == FILLED
            results = [editor.call(block_sparse_attention, (*given, sink, hidden, filled), like=root)]
        else:
            both = editor.call(block_sparse_attention_and_lse, given, like=root)
            out, lse = (editor.item(both, i, like=node) for i, node in enumerate(match.outputs))
            lse = editor.cast(lse, example(match.outputs[1]).dtype, like=match.outputs[1])
            kept = example(match.outputs[1]).dim() == example(lse).dim() + 1
            results = [out, editor.method("unsqueeze", (lse, -1), like=match.outputs[1]) if kept else lse]
        if differs(example(root), example(results[0])) is not None:
            results[0] = editor.restride(results[0], example(root), like=root)
        editor.check(match.outputs, results)
    for proof in scores.proofs:
        editor.assume(proof.assumes)
    for output, result in zip(match.outputs, results, strict=True):
        editor.replace(output, result)
    editor.erase([*match.nodes, *match.crossed, *(node for proof in scores.proofs for node in proof.nodes)])


FUSION = Fusion(
    name="flex_attention",
    instead="torch.nn.attention.flex_attention(query, key, value, score_mod, block_mask)",
    pattern=capped_attention_in_a_window,
    inputs={"query": "b h s d", "key": "b g=h t=s d", "value": "b g=h t=s e=d"},
    find=find,
    emit=emit,
    guard=under_a_mask.guard,
    why_keep=why_keep,
    before=("attention", "repeat_kv"),
    cases=(
        case("gemma2", b=4, h=8, s=2048, d=256),
        case("gpt_oss", b=2, h=64, s=2048, d=64),
    ),
    source="Dong et al. 2024, arXiv:2412.05496; softcap: Gemma 2, arXiv:2408.00118; sinks: gpt-oss, arXiv:2508.10925",
)
