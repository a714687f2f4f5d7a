"""Attention written out -> ``F.scaled_dot_product_attention``: no scores in memory.

    matmul(q, kᵀ) · scale [+ bias] [masked] -> softmax [in float32] -> [dropout] -> matmul(·, v)

Read from the softmax, down to the first product and up to the second: the steps between are too many, and too freely
ordered, for one function an order. A mask that is proved causal becomes ``is_causal`` (on Hopper torch then takes
cuDNN's kernel), one that hides nothing is dropped, a learned bias is handed on. A mask that is not proved stays with the
written-out form: where it hides a whole row, that form and the fused kernels differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import computed_in, keeps_values
from fx_fusion.graph.effects import entered
from fx_fusion.graph.masks.prover import MaskProof
from fx_fusion.graph.terms import example, is_tensor, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.rewrite.editor import Editor, Mismatch

_PRODUCTS = ("matmul", "bmm")


def masked_softmax_attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril().logical_not()
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


@dataclass
class _Scores:
    """What lies between the first product and the softmax."""

    q: Any = None
    keys: Any = None
    scale: float = 1.0
    proofs: list[MaskProof] = field(default_factory=list)
    biases: list[fx.Node] = field(default_factory=list)
    nodes: set[fx.Node] = field(default_factory=set)
    dropout: float = 0.0


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        bound = view.arguments_of(node, "softmax")
        if bound is None or not is_tensor(node) or not is_tensor(bound["input"]) or not _has_product(view, bound["input"]):
            continue
        scores = _Scores(nodes={node})
        try:
            _read_scores(search, bound["input"], scores)
            yield _read(view, node, bound, scores)
        except NotThis as why:
            yield NearMiss("attention", node, why.node if isinstance(why.node, fx.Node) else node, str(why))


def _read(view: View, softmax: fx.Node, bound: Mapping[str, Any], scores: _Scores) -> Match:
    if bound["dim"] not in (-1, example(softmax).dim() - 1):
        raise NotThis(softmax, f"the softmax is over dim {bound['dim']}, not over keys")
    if not keeps_values(example(bound["input"]).dtype, example(softmax).dtype):
        raise NotThis(softmax, f"the softmax rounds the scores to {example(softmax).dtype}")
    probabilities, dropout, nodes, rounded = softmax, 0.0, scores.nodes, set()
    seen = [example(softmax).dtype]
    while True:
        user = next(iter(probabilities.users), None)
        if len(probabilities.users) != 1 or user is None:
            raise NotThis(probabilities, f"{probabilities.name} is used {len(probabilities.users)} times")
        if view.name(user) == "dropout" and view.transparent(user) is None:
            args = view.arguments(user)
            if args is None or dropout or args["inplace"] or not isinstance(args["p"], float):
                raise NotThis(user, "an unusual dropout")
            dropout = args["p"]
        elif view.transparent(user) is not probabilities:
            break
        nodes.add(user)
        rounded.add(user)
        seen.append(example(user).dtype)
        probabilities = user
    p, v = _factors(view, user)
    if p is not probabilities or not is_tensor(v):
        raise NotThis(user, f"expected a product of {probabilities.name} and values, found {view.name(user) or user.name}")
    if any(dtype not in (seen[0], example(v).dtype) for dtype in seen):
        raise NotThis(probabilities, f"the probabilities are rounded on the way to {probabilities.name}")
    if (write := view.effects.written_after(view.order[user], [user])) is not None:
        raise NotThis(write, f"{write.name} changes the result in place; fused attention keeps it for its backward")
    q, keys = scores.q, scores.keys
    rank = example(q).dim()
    if rank not in (3, 4) or example(keys).dim() != rank or example(v).dim() != rank:
        raise NotThis(user, "expected queries, keys and values of one rank, 3 or 4")
    heads = [example(t).shape[:-2] for t in (q, keys, v)]
    if not all(same_sizes(heads[0], other) for other in heads[1:]):
        raise NotThis(user, "batch and heads of queries, keys and values differ")
    scores.dropout, inputs, others = dropout, {"q": q, "v": v}, {f"bias_{i}": b for i, b in enumerate(scores.biases)}
    if view.term(keys).op == "transpose" and view.term(keys).attrs == (-2, -1):
        inputs["k"] = view.term(keys).operands[0]
    else:
        others["keys"] = keys
        if example(keys).dtype != example(q).dtype:
            raise NotThis(keys, f"queries are {example(q).dtype}, keys {example(keys).dtype}; attention takes one dtype")
    everything = frozenset((*nodes, user))
    return Match(
        "attention", (user,), everything, inputs, others=others, rounded=frozenset(rounded), reading=scores
    )  # fmt: skip


def _factors(view: View, node: fx.Node) -> tuple[Any, Any]:
    """The two operands of a matrix product; ``(None, None)`` of anything else."""
    bound = view.arguments_of(node, *_PRODUCTS)
    return (None, None) if bound is None else (bound["input"], bound["other" if "other" in bound else "mat2"])


def _read_scores(search: Search, node: Any, scores: _Scores) -> None:
    """From the softmax down to the first product, one step at a time."""
    view = search.view
    while True:
        if not isinstance(node, fx.Node) or not is_tensor(node):
            raise NotThis(node, "not a softmax of scores")
        scores.nodes.add(node)
        scores.q, scores.keys = _factors(view, node)
        if is_tensor(scores.q) and is_tensor(scores.keys):
            return
        below, name = view.transparent(node), view.name(node)
        if below is not None:
            if not keeps_values(example(below).dtype, example(node).dtype):
                raise NotThis(node, f"{node.name} rounds the scores to {example(node).dtype}")
            node = below
        elif name in ("mul", "div"):
            node = _scaled(view, node, name, scores)
        elif name == "add":
            node = _with_mask(search, node, scores)
        elif name == "masked_fill":
            bound = view.arguments(node)
            if bound is None:
                raise NotThis(node, f"{node.name} is called in an unusual way")
            _fill(search, node, bound["mask"], True, bound["value"], scores)
            node = bound["input"]
        elif name == "where" and (chosen := view.arguments(node)) is not None:
            _fill(search, node, chosen["condition"], False, chosen["other"], scores)
            node = chosen["input"]
        else:
            raise NotThis(node, f"{name or node.name} is between the product and the softmax")


def _has_product(view: View, node: fx.Node, depth: int = 8) -> bool:
    """Whether a matrix product is within a few steps: what tells attention from any other softmax."""
    if view.name(node) in _PRODUCTS:
        return True
    return depth > 0 and any(is_tensor(n) and _has_product(view, n, depth - 1) for n in node.all_input_nodes)


def _scaled(view: View, node: fx.Node, name: str, scores: _Scores) -> fx.Node:
    a, b = binary(view, node)
    tensor, number = (a, b) if is_tensor(a) else (b, a)
    if not isinstance(number, (int, float)) or not is_tensor(tensor) or (name == "div" and number is a) or not number > 0:
        raise NotThis(node, f"{node.name} scales the scores by something that is not a positive constant")
    scores.scale *= number if name == "mul" else 1 / number
    return tensor


def _with_mask(search: Search, node: fx.Node, scores: _Scores) -> fx.Node:
    view = search.view
    a, b = binary(view, node)
    if isinstance(b, (int, float)) and b == 0:
        return a
    if not is_tensor(a) or not is_tensor(b):
        raise NotThis(node, f"{node.name} adds {b if is_tensor(a) else a} to the scores")
    for inside, mask in ((a, b), (b, a)):
        if _has_product(view, mask) or not _has_product(view, inside):
            continue
        if not example(mask).dtype.is_floating_point:
            raise NotThis(node, f"{node.name} adds {example(mask).dtype} numbers to the scores")
        proof = search.masks.prove(mask)
        if proof.kind in ("causal", "none"):
            scores.proofs.append(proof)
        elif not example(mask).requires_grad:
            # A row that is hidden entirely is uniform in eager (or NaN); a fused kernel makes something else of it.
            raise NotThis(proof.node or mask, f"the mask is not proved: {proof.reason}")
        elif scores.scale != 1 or example(mask).dim() < 2:
            raise NotThis(node, f"the bias {mask.name} is scaled with the scores, or has fewer than two dims")
        else:
            scores.biases.append(mask)
        return inside
    raise NotThis(node, f"{node.name} combines scores in another way than by an additive mask")


def _fill(search: Search, node: fx.Node, mask: Any, hides: bool, fill: Any, scores: _Scores) -> None:
    view = search.view
    fill = view.folded(fill)
    if isinstance(fill, fx.Node) and fill.target is torch.tensor:
        fill = fill.args[0] if fill.args else None
    elif (full := view.arguments_of(fill, "full")) is not None:
        fill = full["fill_value"]
    if not is_tensor(mask) or example(mask).dtype != torch.bool or not isinstance(fill, (int, float)):
        raise NotThis(node, f"{node.name} fills with a value that is not a constant, or by a mask that is not boolean")
    lowest = torch.finfo(example(node).dtype).min
    if not (fill * scores.scale <= max(lowest / 2, -1e30)):
        raise NotThis(node, f"{node.name} hides with {fill}, which a score may come near to")
    proof = search.masks.prove(mask, hides=hides)
    if proof.kind not in ("causal", "none"):
        raise NotThis(proof.node or mask, f"the mask is not proved: {proof.reason}")
    scores.proofs.append(proof)


def emit(editor: Editor, match: Match) -> None:
    root, scores = match.root, match.reading
    causal = any(proof.kind == "causal" for proof in scores.proofs)
    with editor.graph.inserting_before(root):
        q, v = editor.now(match.inputs["q"]), editor.now(match.inputs["v"])
        transposed = match.inputs.get("k")
        k = editor.method("transpose", (scores.keys, -1, -2), like=root) if transposed is None else editor.now(transposed)
        bias = None
        for added in scores.biases:
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
        if example(call).stride() != example(root).stride():
            call = editor.method("contiguous", (call,), like=root)
        editor.check([root], [call])
    for proof in scores.proofs:
        editor.assume(proof.assumes)
    editor.replace(root, call)
    editor.erase([*match.nodes, *(node for proof in scores.proofs for node in proof.nodes)])


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
    if q.dtype.itemsize > 4:
        return f"q is {q.dtype}; the fused kernels take float32, bfloat16 and float16"
    return None


FUSION = Fusion(
    name="attention",
    pattern=masked_softmax_attention,
    inputs={"q": "b? h s d", "k": "b? h t=s d", "v": "b? h t=s e=d"},
    find=find,
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
