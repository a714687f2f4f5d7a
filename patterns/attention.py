"""Attention written out -> ``F.scaled_dot_product_attention``: no scores in memory.

    matmul(q, kᵀ) · scale [+ bias] [masked] -> softmax [in float32] -> [dropout] -> matmul(·, v)

A mask that is proved causal becomes ``is_causal`` (on Hopper torch then takes
cuDNN's kernel), one that hides nothing is dropped, a bias is handed on that is learned, or finite everywhere by how it is
made (ALiBi). A mask that is not proved stays with the written-out form; padding and windows are ``flex_attention``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import computed_in
from fx_fusion.graph.effects import entered
from fx_fusion.graph.terms import example, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.patterns.sites.products import permuted, rows_of_keys
from fx_fusion.patterns.sites.read_scores import is_shifted
from fx_fusion.patterns.sites.scores import has_product
from fx_fusion.patterns.sites.softmax_attention import normalized_exponentials, times, written_out
from fx_fusion.rewrite.editor import Editor, Mismatch


def masked_softmax_attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril().logical_not()
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def find(search: Search) -> Iterator[Match | NearMiss]:
    for found in written_out(search):
        if isinstance(found, NearMiss) or found.reading.plain:  # the rest: flex_attention
            yield found


def unread(view: View) -> Iterator[NearMiss]:
    """A softmax of scores in other words."""
    for node in view.graph.nodes:
        found = normalized_exponentials(view, node)
        if found is None or is_shifted(view, found[0]) or not has_product(view, found[0]):
            continue
        yield NearMiss("attention", node, node, "exp(x) / sum(exp(x)) overflows where softmax(x) does not; write softmax")


def emit(editor: Editor, match: Match) -> None:
    root, scores = match.root, match.reading
    causal = scores.causal
    with editor.graph.inserting_before(root):
        q = permuted(editor, scores.q, scores.product.left_order, root)
        v = permuted(editor, scores.values.right, scores.values.right_order, root)
        if "k" in match.inputs:
            k = editor.now(match.inputs["k"])
        else:
            k = permuted(editor, scores.keys, rows_of_keys(scores.product), root)
        k = _for_all_heads(editor, k, example(q).shape[:-2], root)
        v = _for_all_heads(editor, v, example(scores.values.left).shape[:-2], root)
        q = times(editor, q, scores.factors, root)
        q, k, v = (_grouped(editor, t, scores.heads, root) for t in (q, k, v))
        bias = None
        for added, level in scores.biases:
            added = _bias_of_heads(editor, added, level, scores.heads, root)
            bias = added if bias is None else editor.call(torch.add, (bias, added), like=root)
        if bias is not None and causal:  # one mask, not two
            bias, causal = _with_causal(editor, bias, q, k, root), False
        with entered(editor.view.effects.region[root]):
            dtype = computed_in(example(q))
        if bias is not None and example(bias).dtype != dtype:
            raise Mismatch(f"the bias is {example(bias).dtype}, attention is computed in {dtype}")
        three = example(q).dim() == 3
        if three:
            q, k, v = (editor.method("unsqueeze", (t, 0), like=root) for t in (q, k, v))
        call = editor.call(
            F.scaled_dot_product_attention, (q, k, v),
            {"attn_mask": bias, "dropout_p": scores.dropout, "is_causal": causal, "scale": float(scores.scale)}, like=root,
        )  # fmt: skip
        if three:
            call = editor.method("squeeze", (call, 0), like=root)
        if scores.heads is not None:
            others = example(scores.values.left).shape[1:-2]
            call = editor.method("reshape", (call, -1, *others, *example(call).shape[-2:]), like=root)
        call = permuted(editor, call, scores.values.out_order, root)
        if example(call).stride() != example(root).stride():
            call = editor.restride(call, example(root), like=root)
        editor.check([root], [call])
    for proof in (*scores.proofs, *scores.proofs_in_biases):
        editor.assume(proof.assumes)
    editor.replace(root, call)
    editor.erase([*match.nodes, *(node for proof in scores.proofs for node in proof.nodes)])


def _grouped(editor: Editor, node: Any, heads: Any, like: fx.Node) -> Any:
    """(rest, heads, length, dim), of batch and heads in any number of dims; as it is where ``heads`` is None."""
    if heads is None:
        return node
    return editor.method("reshape", (node, -1, heads, *example(node).shape[-2:]), like=like)


def _bias_of_heads(editor: Editor, bias: fx.Node, level: fx.Node, heads: Any, like: fx.Node) -> Any:
    """A bias of scores that are grouped as ``level`` is, for scores (rest, heads, queries, keys)."""
    if heads is None:
        return bias
    rank = example(level).dim()
    if rank > 4:
        raise Mismatch(f"the bias {bias.name} is added to scores of {rank} dims")
    for_all = example(bias).dim() < 3 or statically_known_true(example(bias).shape[0] == 1)
    return bias if rank == 4 or for_all else _grouped(editor, bias, heads, like)


def _for_all_heads(editor: Editor, node: Any, wanted: Sequence[Any], like: fx.Node) -> Any:
    """Keys or values with the batch and the heads of queries or probabilities."""
    if same_sizes(example(node).shape[:-2], wanted):
        return node
    return editor.method("expand", (node, *wanted, -1, -1), like=like)


def _with_causal(editor: Editor, bias: fx.Node, q: fx.Node, k: fx.Node, root: fx.Node) -> fx.Node:
    rows, cols = example(q).shape[-2], example(k).shape[-2]
    dtype, device = example(bias).dtype, example(bias).device
    ones = editor.call(torch.ones, ((rows, cols),), {"dtype": torch.bool, "device": device}, like=root)
    visible = editor.method("tril", (ones,), like=root)
    low = editor.call(torch.full, ((), float("-inf")), {"dtype": dtype, "device": device}, like=root)
    return editor.call(torch.where, (visible, bias, low), like=root)


def guard(q, k, v):
    dtypes = [t.dtype for t in (q, k, v) if t is not None]
    if len(set(dtypes)) > 1:
        return f"q, k and v are {', '.join(map(str, dtypes))}; attention takes one dtype"
    if dtypes and dtypes[0].itemsize > 4:
        return f"q is {dtypes[0]}; the fused kernels take float32, bfloat16 and float16"
    return None


FUSION = Fusion(
    name="attention",
    instead="F.scaled_dot_product_attention(query, key, value, attn_mask)",
    pattern=masked_softmax_attention,
    inputs={"q": "b? h s d", "k": "b? h t=s d", "v": "b? h t=s e=d"},
    find=find,
    unread=unread,
    emit=emit,
    guard=guard,
    on_cpu=True,
    cases=(
        case("odd", b=2, h=3, s=37, d=16, bench=False),
        case("llama_7b", b=4, h=32, s=2048, d=128),
        case("gpt2", b=8, h=12, s=1024, d=64),
    ),
    source="Dao et al. 2022, arXiv:2205.14135, behind torch.nn.functional.scaled_dot_product_attention",
)
