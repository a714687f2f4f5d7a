"""Attention with a learned bias -> FlexAttention that adds it to the scores: neither it nor its gradient for each sequence.

    F.scaled_dot_product_attention(query, key, value, attn_mask=bias [masked])

The kernel that takes a dense mask hands back a gradient for each score, which is then summed over the batch (T5: a bias of
relative positions for all sequences); where a mask hides some of it the bias is in memory for each sequence, too. On an
H200, forward and backward in bfloat16, FlexAttention takes 1.20 ms instead of 1.75 at 32 x 12 x 512 x 64, and 96 MiB instead
of 361; 1.55 instead of 2.58 at 4 x 12 x 2048 x 64. It is slower where rows are short: 1.05 times at 197, 1.8 at 49.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.masks.structure import FILLED
from fx_fusion.graph.size_hints import expected
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.walk import NotThis, attention_calls
from fx_fusion.kernels.block_sparse_attention import biased_attention
from fx_fusion.patterns import block_sparse_attention as under_a_mask
from fx_fusion.patterns.repeat_kv import without_repeats
from fx_fusion.patterns.sites.blocks import operands, read_mask, read_when_it_runs, too_few_scores
from fx_fusion.patterns.sites.learned_biases import without_masks
from fx_fusion.rewrite.editor import Editor, differs

_SHORTEST = 512  # queries and keys; blocks of 128 are filled badly by short rows


def attention_with_a_learned_bias(query, key, value, bias):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node, bound in attention_calls(view):
        mask = bound["attn_mask"]
        if not is_tensor(mask) or not example(mask).is_floating_point() or not example(mask).requires_grad:
            continue
        if bound["is_causal"] is True or search.masks.prove(mask).kind != "learned":
            continue
        try:
            bias, structure, proofs, nodes = without_masks(search, mask, example(node).dtype)
        except NotThis as why:
            yield NearMiss("biased_attention", node, why.node if isinstance(why.node, fx.Node) else mask, str(why))
            continue
        if bound["dropout_p"] != 0 or not isinstance(bound["scale"], (int, float, type(None))):
            why_not = "the scale is not a constant" if bound["dropout_p"] == 0 else "FlexAttention has no dropout"
            yield NearMiss("biased_attention", node, node, why_not)
            continue
        key, value, crossed = without_repeats(view, bound["key"], bound["value"])
        yield Match(
            fusion="biased_attention",
            outputs=(node,),
            nodes=frozenset([node]),
            inputs={"query": bound["query"], "key": key, "value": value, "bias": bias},
            others={f"label_{i}": label for i, label in enumerate(read_when_it_runs(structure))},
            crossed=frozenset((*crossed, *nodes)),
            reading=(structure, proofs, bound["scale"]),
            note=f"mask: {structure}" if proofs and str(structure) else "",
        )


def guard(query, key, value, bias):
    if query.dim() != 4 or key.dim() != 4:
        return under_a_mask.guard(query, key, value)
    wanted = (*query.shape[:3], key.shape[2])
    if _own_dims(bias, wanted) is None:
        return f"the bias is {tuple(bias.shape)}; the kernel takes ([{wanted[0]},] [{wanted[1]},] {wanted[2]}, {wanted[3]})"
    if bias.dim() == 4 and not statically_known_true(bias.shape[0] == 1):
        return "the bias is another one for each sequence, and would be copied in float32; measured is one for all"
    if not all(isinstance(n, int) for n in (*query.shape, *key.shape, *bias.shape)):
        return "sizes are symbolic: FlexAttention adds up the gradient of a bias in memory of static size"
    if torch.are_deterministic_algorithms_enabled():
        return "gradients of the bias are added up by atomics, and torch.use_deterministic_algorithms() is on"
    return under_a_mask.guard(query, key, value)


def _own_dims(bias: Tensor, scores: Sequence[Any]) -> int | None:
    """Return how many dims a bias has of its own, the last ones, 2 to 4, where scores have these sizes. None where it is
    spread over a dim behind one of its own."""
    own = list(bias.shape)
    while len(own) > 2 and statically_known_true(own[0] == 1):
        own.pop(0)
    whole = 2 <= len(own) <= 4 and all(statically_known_true(n == m) for n, m in zip(own, scores[-len(own) :], strict=True))
    return len(own) if whole else None


def why_keep(query, key, value, bias):
    if min(expected(query.shape[2]), expected(key.shape[2])) < _SHORTEST or expected(query.shape[3]) > 128:
        return f"not faster below {_SHORTEST} positions, nor measured above a head dim of 128 (on an H200)"
    return too_few_scores(query, key, 2**26)


def emit(editor: Editor, match: Match) -> None:
    structure, proofs, scale = match.reading
    root, learned = match.root, match.inputs["bias"]
    dims = _own_dims(example(learned), (*example(root).shape[:3], example(match.inputs["key"]).shape[2]))
    assert dims is not None, "the guard asked"

    def laid_out() -> fx.Node:
        wide = editor.cast(learned, torch.float32, like=root)  # or atomics would add up its gradient in 16 bits
        dense = editor.method("contiguous", (wide,), like=root)
        own = example(learned).shape[example(learned).dim() - dims :]
        return dense if dims == example(learned).dim() else editor.method("reshape", (dense, *own), like=root)

    with editor.graph.inserting_before(root):
        query, key, value = operands(editor, match)
        bias = editor.once_between_writes((learned, "dense"), root, laid_out)  # one copy for all layers
        filled = structure.hidden_rows == FILLED
        read, hidden = read_mask(editor, query, key, structure, root)
        scale = example(query).shape[-1] ** -0.5 if scale is None else scale
        call = editor.call(biased_attention, (query, key, value, *read, float(scale), bias, hidden, filled), like=root)
    before = example(root)
    if differs(before, example(call)) is not None:
        call = editor.restride(call, before, like=root)
    editor.replace(root, call)
    for proof in proofs:
        editor.assume(proof.assumes)
    editor.erase([root, *match.crossed, *(node for proof in proofs for node in proof.nodes)])


_HEADS_LAST = {"bias": "l q r n"}  # a lookup of (q, k, heads), permuted

FUSION = Fusion(
    name="biased_attention",
    instead="torch.nn.attention.flex_attention(query, key, value, score_mod)",
    pattern=attention_with_a_learned_bias,
    inputs={"query": "b h s d", "key": "b g=h t=s d", "value": "b g=h t=s e=d", "bias": "l=b|1 n=h|1 q=s r=s"},
    find=find,
    emit=emit,
    shared=("l",),
    guard=guard,
    why_keep=why_keep,
    before=("causal_mask", "repeat_kv", "dense_mask"),
    cases=(
        case("t5", b=32, h=12, s=512, d=64, order=_HEADS_LAST),
        case("t5_long", b=4, h=12, s=2048, d=64, order=_HEADS_LAST),
    ),
    source="Dong et al. 2024, arXiv:2412.05496; biases of relative positions: Raffel et al. 2019, arXiv:1910.10683",
)
