"""An attention bias whose rows are not dense in memory -> a dense copy, so that a fused kernel can take it.

scaled_dot_product_attention on CUDA has no fused kernel for a mask with strided rows: it multiplies in float32 and keeps
every score. A learned bias often is like that: a permuted lookup of (q, k, heads), as in T5 up to transformers 5.17, whose
step takes 0.68 of Inductor's time with the copy (H200, base, bfloat16).

The fused kernels and the one in float32 differ where a row is hidden entirely by a finite number: so the mask has to be
made of a learned bias and of masks that are proved to leave something of every row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.devices import device_type
from fx_fusion.graph.dtypes import computed_in
from fx_fusion.graph.masks.prover import MaskProof
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.walk import NotThis, attention_calls
from fx_fusion.patterns.sites.learned_biases import read_bias
from fx_fusion.rewrite.editor import Editor


def attention_with_a_bias(query, key, value, bias):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def find(search: Search) -> Iterator[Match | NearMiss]:
    for node, bound in attention_calls(search.view):
        mask = bound["attn_mask"]
        if not is_tensor(mask) or example(mask).dim() < 2 or not example(mask).is_floating_point():
            continue
        strided = statically_known_true(example(mask).stride(-1) > 1) and statically_known_true(example(mask).shape[-1] > 1)
        if not strided or search.masks.prove(mask).kind in ("causal", "none", "structured"):
            continue
        proofs: list[MaskProof] = []
        try:
            read_bias(search, mask, proofs)
        except NotThis as why:
            yield NearMiss("dense_mask", node, why.node if isinstance(why.node, fx.Node) else mask, str(why))
            continue
        yield Match(
            fusion="dense_mask",
            outputs=(node,),
            nodes=frozenset(),
            inputs={n: bound[n] for n in ("query", "key", "value")} | {"bias": mask},
            reading=proofs,
        )


def emit(editor: Editor, match: Match) -> None:
    root, mask, proofs = match.root, match.inputs["bias"], match.reading

    def copied() -> fx.Node:
        with editor.graph.inserting_before(root):
            cast = editor.cast(mask, example(root).dtype, like=root)  # as autocast would, at each call
            return editor.method("contiguous", (cast,), like=root)

    dense = editor.once_between_writes((mask, example(root).dtype), root, copied)  # one copy for all layers
    editor.change_call(root, restride=True, attn_mask=dense)
    for proof in proofs:
        editor.assume(proof.assumes)


def guard(query, key, value, bias):
    if computed_in(query).itemsize != 2 or computed_in(query) != computed_in(bias):
        return f"query is {query.dtype}, the bias {bias.dtype}; the fused kernels take one 16-bit dtype"
    return None


def why_keep(query, key, value, bias):
    return None if device_type(query) == "cuda" else "only CUDA's kernels ask for dense rows"


_HEADS_LAST = {"bias": "l q r n"}  # a lookup of (q, k, heads), permuted

FUSION = Fusion(
    name="dense_mask",
    pattern=attention_with_a_bias,
    inputs={
        "query": "... b? h? s d",
        "key": "... i=b? g=h? t=s d",
        "value": "... j=b? k=h? t=s e=d",
        "bias": "l=b|1 n=h|1 q=s|1 r=s|1",
    },
    find=find,
    emit=emit,
    shared=("l",),
    guard=guard,
    why_keep=why_keep,
    on_cpu=True,
    cases=(
        case("t5", b=16, h=12, s=512, d=64, order=_HEADS_LAST),
        case("t5_long", b=4, h=12, s=2048, d=64, order=_HEADS_LAST),
    ),
    source="the conditions of CUDA's attention kernels, torch 2.11 (ATen/native/transformers/sdp_utils_cpp.h)",
)
