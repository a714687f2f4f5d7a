"""An attention mask that hides exactly k > q -> ``is_causal=True``; one that hides nothing -> no mask.

With an explicit mask, scaled_dot_product_attention leaves its causal kernels (3.1-3.5 times slower on H200, forward and
backward, bfloat16). The mask is proved, not guessed: see ``fx_fusion.graph.masks``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.masks.prover import MaskProof
from fx_fusion.graph.terms import is_tensor
from fx_fusion.graph.walk import attention_calls
from fx_fusion.rewrite.editor import Editor


def attention_with_mask(query, key, value):
    q = torch.arange(query.shape[-2], device=query.device)
    k = torch.arange(key.shape[-2], device=query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=k[None, :] <= q[:, None])


def find(search: Search) -> Iterator[Match | NearMiss]:
    for node, bound in attention_calls(search.view):
        if bound["attn_mask"] is None or bound["is_causal"] is True:
            continue
        mask = bound["attn_mask"]
        proof = search.masks.prove(mask)
        if proof.structure is not None:
            continue  # structured masks are reported by block_sparse_attention
        if proof.kind not in ("causal", "none") or not is_tensor(mask):
            what = {"learned": "the mask is a learned bias", "input": "the mask is an input's"}.get(proof.kind)
            reason = f"{what or 'the mask is not proved'}: {proof.reason}"
            yield NearMiss("causal_mask", node, proof.node or node, reason)
            continue
        yield Match(
            fusion="causal_mask",
            outputs=(node,),
            nodes=frozenset(),
            inputs={n: bound[n] for n in ("query", "key", "value")},
            reading=proof,
            note=f"mask: {proof.kind} ({proof.reason})",
        )


def emit(editor: Editor, match: Match) -> None:
    proof: MaskProof = match.reading
    # Without the mask another kernel may answer, which lays its result out in another way.
    editor.change_call(match.root, restride=True, attn_mask=None, is_causal=proof.kind == "causal")
    editor.assume(proof.assumes)
    editor.erase(proof.nodes)


FUSION = Fusion(
    name="causal_mask",
    pattern=attention_with_mask,
    inputs={"query": "... b? h? s d", "key": "... i=b? g=h? t=s d", "value": "... j=b? k=h? t=s e=d"},
    find=find,
    emit=emit,
    before=("repeat_kv", "dense_mask"),
    on_cpu=True,
    cases=(
        case("odd", b=2, h=3, s=37, d=16, bench=False),
        case("llama_1b", b=8, h=32, s=2048, d=64),
        case("llama_8b", b=1, h=32, s=4096, d=128),
    ),
    source="is_causal of torch.nn.functional.scaled_dot_product_attention",
)
