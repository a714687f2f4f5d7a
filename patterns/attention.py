"""Attention written out -> ``F.scaled_dot_product_attention``: no scores in memory.

    matmul(q, kᵀ) · scale [+ bias] [masked] -> softmax [in float32] -> [dropout] -> matmul(·, v)

Read from the softmax, down to the first product and up to the second: the steps between are too many, and too freely
ordered, for one function an order. A mask that is proved causal becomes ``is_causal`` (on Hopper torch then takes
cuDNN's kernel); any other is handed on as an additive mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion import signatures
from fx_fusion.canonicalize import View, is_scalar, is_tensor, value
from fx_fusion.fusion import Fusion, case
from fx_fusion.masks import MaskProof, MaskProver
from fx_fusion.match import Match, NearMiss
from fx_fusion.rewrite import Editor

_PRODUCTS = ("matmul", "bmm")


def masked_softmax_attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril().logical_not()
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


@dataclass
class _Scores:
    """What lies between the first product and the softmax."""

    product: fx.Node | None = None
    scale: float = 1.0
    proofs: list[MaskProof] = field(default_factory=list)
    added: list[fx.Node] = field(default_factory=list)  # additive masks that are not proved
    filled: list[tuple[fx.Node, bool, Any]] = field(default_factory=list)  # boolean mask, whether it hides, the value
    nodes: set[fx.Node] = field(default_factory=set)


class _NotThis(Exception):
    def __init__(self, node: fx.Node, reason: str):
        super().__init__(reason)
        self.node = node


def find(view: View) -> Iterator[Match | NearMiss]:
    prover = MaskProver(view, may_assume=view.assumptions is not None and view.assumptions.allowed)
    for node in view.graph.nodes:
        if view.name(node) != "softmax" or not is_tensor(node):
            continue
        scores = _Scores(nodes={node})
        try:
            _read_scores(view, prover, node, scores)
            yield _read(view, node, scores)
        except _NotThis as why:
            if scores.product is not None:
                yield NearMiss("attention", node, why.node, 2, 3, str(why))


def _read(view: View, softmax: fx.Node, scores: _Scores) -> Match:
    bound = signatures.bind("softmax", softmax.args, dict(softmax.kwargs))
    assert bound is not None
    assert scores.product is not None
    if bound["dim"] not in (-1, value(softmax).dim() - 1):
        raise _NotThis(softmax, f"the softmax is over dim {bound['dim']}, not over keys")
    probabilities, dropout, nodes = softmax, 0.0, scores.nodes
    while True:
        user = next(iter(probabilities.users), None)
        if len(probabilities.users) != 1 or user is None:
            raise _NotThis(probabilities, f"{probabilities.name} is used {len(probabilities.users)} times")
        if view.name(user) == "dropout" and view.transparent(user) is None:
            args = signatures.bind("dropout", user.args, dict(user.kwargs))
            if args is None or dropout or args["inplace"] or not isinstance(args["p"], float):
                raise _NotThis(user, "an unusual dropout")
            dropout = args["p"]
        elif view.transparent(user) is not probabilities:
            break
        nodes.add(user)
        probabilities = user
    if view.name(user) not in _PRODUCTS or user.args[0] is not probabilities:
        raise _NotThis(user, f"expected a product of {probabilities.name} and values, found {view.name(user) or user.name}")
    q, keys = scores.product.args[:2]
    v, k = user.args[1], keys
    if view.term(keys).op == "transpose" and view.term(keys).attrs == (-2, -1):
        k = view.term(keys).operands[0]
    rank = value(q).dim()
    if rank not in (3, 4) or value(keys).dim() != rank or value(v).dim() != rank:
        raise _NotThis(scores.product, "expected queries, keys and values of one rank, 3 or 4")
    heads = [value(t).shape[:-2] for t in (q, keys, v)]
    if not all(statically_known_true(a == b) for other in heads[1:] for a, b in zip(heads[0], other, strict=True)):
        raise _NotThis(scores.product, "batch and heads of queries, keys and values differ")
    nodes |= {scores.product, user}
    for mask, _, fill in scores.filled:
        if fill == float("-inf"):
            raise _NotThis(mask, f"{mask.name} is not proved to leave something in every row: a row of -inf is NaN")
    inputs = {"q": q, "k": k, "v": v}

    def emit(editor: Editor, match: Match) -> None:
        _emit(editor, match, scores, transposed=k is not keys, dropout=dropout)

    return Match("attention", (user,), frozenset(nodes), inputs, emit=emit)


def _read_scores(view: View, prover: MaskProver, softmax: fx.Node, scores: _Scores) -> None:
    """From the softmax down to the first product, one step at a time."""
    node = softmax.args[0] if softmax.args else softmax.kwargs.get("input")
    while True:
        if not isinstance(node, fx.Node) or not is_tensor(node):
            raise _NotThis(softmax, "not a softmax of scores")
        name, below = view.name(node), view.transparent(node)
        if name in _PRODUCTS:
            scores.product = node
            return
        if below is not None:
            scores.nodes.add(node)
            node = below
            continue
        scores.product = scores.product or _product_below(view, node)
        scores.nodes.add(node)
        if name in ("mul", "div") and len(node.args) == 2:
            node = _scaled(view, node, name, scores)
        elif name in ("add", "sub") and len(node.args) == 2:
            node = _with_mask(view, prover, node, name, scores)
        elif name == "masked_fill":
            mask, fill = node.args[1:3] if len(node.args) > 2 else (None, None)
            _fill(view, prover, node, mask, True, fill, scores)
            node = node.args[0]
        elif node.target is torch.where and len(node.args) == 3:
            mask, inside, outside = node.args
            _fill(view, prover, node, mask, False, outside, scores)
            node = inside
        else:
            raise _NotThis(node, f"{name or node.name} is between the product and the softmax")


def _product_below(view: View, node: fx.Node, depth: int = 6) -> fx.Node | None:
    """A product within a few steps: what tells attention from any other softmax, for near misses."""
    for operand in node.all_input_nodes if depth else ():
        if view.name(operand) in _PRODUCTS:
            return operand
        if is_tensor(operand) and (found := _product_below(view, operand, depth - 1)) is not None:
            return found
    return None


def _scaled(view: View, node: fx.Node, name: str, scores: _Scores) -> fx.Node:
    a, b = (view.constant(x) for x in node.args)
    tensor, number = (a, b) if is_tensor(a) else (b, a)
    if not isinstance(number, (int, float)) or not is_tensor(tensor) or (name == "div" and number is a) or number <= 0:
        raise _NotThis(node, f"{node.name} scales the scores by something that is not a positive constant")
    scores.scale *= number if name == "mul" else 1 / number
    return tensor


def _with_mask(view: View, prover: MaskProver, node: fx.Node, name: str, scores: _Scores) -> fx.Node:
    a, b = (view.constant(x) for x in node.args)
    if is_scalar(b) and b == 0:
        return a
    if not is_tensor(a) or not is_tensor(b):
        raise _NotThis(node, f"{node.name} adds {b if is_tensor(a) else a} to the scores")
    order = [(a, b)] if name == "sub" else [(a, b), (b, a)]
    for inside, mask in order:
        if name == "add" and not _has_product(view, mask) and _has_product(view, inside):
            proof = prover.prove(mask)
            if proof.kind == "unknown":
                if scores.scale != 1:
                    raise _NotThis(node, f"the mask {mask.name}, which is not proved, is scaled with the scores")
                scores.added.append(mask)
            else:
                scores.proofs.append(proof)
            return inside
    raise _NotThis(node, f"{node.name} combines scores in another way than by an additive mask")


def _has_product(view: View, node: fx.Node) -> bool:
    return view.name(node) in _PRODUCTS or _product_below(view, node) is not None


def _fill(
    view: View, prover: MaskProver, node: fx.Node, mask: Any, hides: bool, fill: Any, scores: _Scores
) -> None:  # fmt: skip
    fill = view.constant(fill)
    if isinstance(fill, fx.Node) and fill.target in (torch.tensor, torch.full):
        fill = fill.args[0 if fill.target is torch.tensor else 1]
    if not is_tensor(mask) or value(mask).dtype != torch.bool or not isinstance(fill, (int, float)):
        raise _NotThis(node, f"{node.name} fills with a value that is not a constant, or by a mask that is not boolean")
    lowest = torch.finfo(value(node).dtype).min
    if fill > lowest / 2 and fill > -1e30:
        raise _NotThis(node, f"{node.name} hides with {fill}, which a score may come near to")
    proof = prover.prove(mask, hides=hides)
    if proof.kind == "unknown":
        scores.filled.append((mask, hides, fill))
    else:
        scores.proofs.append(proof)


def _emit(editor: Editor, match: Match, scores: _Scores, *, transposed: bool, dropout: float) -> None:
    root = match.root
    causal = any(proof.kind == "causal" for proof in scores.proofs)
    with editor.graph.inserting_before(root):
        q, k, v = (editor.now(match.inputs[n]) for n in ("q", "k", "v"))
        if not transposed:
            k = editor.method("transpose", (k, -1, -2), like=root)
        masks = [editor.now(m) for m in scores.added]
        for mask, hides, fill in scores.filled:
            zero, low = (editor.call(torch.full, ((), x), {"dtype": value(q).dtype, "device": value(q).device}, like=root)
                         for x in (0.0, fill))  # fmt: skip
            masks.append(editor.call(torch.where, (mask, low, zero) if hides else (mask, zero, low), like=root))
        bias = masks[0] if masks else None
        for mask in masks[1:]:
            bias = editor.call(torch.add, (bias, mask), like=root)
        if bias is not None and causal:  # one mask, not two
            bias = _with_causal(editor, bias, q, k, root)
            causal = False
        if bias is not None:
            bias = editor.cast(bias, _compute_dtype(value(q)), like=root)
        three = value(q).dim() == 3
        if three:
            q, k, v = (editor.method("unsqueeze", (t, 0), like=root) for t in (q, k, v))
        call = editor.call(
            F.scaled_dot_product_attention, (q, k, v),
            {"attn_mask": bias, "dropout_p": dropout, "is_causal": causal, "scale": float(scores.scale)}, like=root,
        )  # fmt: skip
        if three:
            call = editor.method("squeeze", (call, 0), like=root)
        if value(call).stride() != value(root).stride():
            call = editor.method("contiguous", (call,), like=root)
        editor.check([root], [call])
    for proof in scores.proofs:
        editor.view.assumptions.assume(proof.assumes)
    editor.replace(root, call)
    editor.erase([*match.nodes, *(node for proof in scores.proofs for node in proof.nodes)])


def _with_causal(editor: Editor, bias: fx.Node, q: fx.Node, k: fx.Node, root: fx.Node) -> fx.Node:
    rows, cols = value(q).shape[-2], value(k).shape[-2]
    dtype, device = value(bias).dtype, value(bias).device
    ones = editor.call(torch.ones, ((rows, cols),), {"dtype": torch.bool, "device": device}, like=root)
    visible = editor.method("tril", (ones,), like=root)
    low = editor.call(torch.full, ((), float("-inf")), {"dtype": dtype, "device": device}, like=root)
    return editor.call(torch.where, (visible, bias, low), like=root)


def _compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def guard(q, k, v):
    if not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; attention takes one dtype"
    if q.dtype.itemsize > 4:
        return f"q is {q.dtype}; the fused kernels take float32, bfloat16 and float16"
    return None


FUSION = Fusion(
    name="attention",
    pattern=masked_softmax_attention,
    inputs={"q": "b h s d", "k": "b h s d", "v": "b h s d"},
    find=find,
    guard=guard,
    priority=60,
    on_cpu=True,
    cases=(
        case("odd", b=2, h=3, s=37, d=16, bench=False),
        case("llama_7b", b=4, h=32, s=2048, d=128),
        case("gpt2", b=8, h=12, s=1024, d=64),
    ),
    source="Dao et al. 2022, arXiv:2205.14135, behind torch.nn.functional.scaled_dot_product_attention",
)
