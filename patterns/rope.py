"""Rotary position embedding -> kernels/rope.py: a match is one tensor; q and k that share cos and sin become one call.

Partial rotary embedding needs nothing: the slice of q that is rotated is the input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.graph.devices import device_type
from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.size_hints import too_small, trained
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.rope import four_dims, rope
from fx_fusion.patterns.rms_norm import pow_mean_rsqrt
from fx_fusion.patterns.sites.normed_rotations import fold_norms
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.parts import own, whole


def rotated(q, cos, sin, style, out, upcast):
    x = q.float() if upcast else q
    half = q.shape[-1] // 2
    if style == "rotate_half":
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    elif style == "reversed":
        turned = torch.cat([x[..., half:], -x[..., :half]], dim=-1)
    elif style == "swap_halves":  # x.roll(d // 2, -1), the signs in sin
        turned = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    elif style == "rotate_every_two":
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    else:
        return NotImplemented
    y = x * cos + turned * sin
    return y.to(q.dtype) if out == "input" else y


def rotated_back(q, cos, sin, style, out, upcast):
    """Rotate by the negative angle, written as a difference whose operands are positive."""
    if style != "reversed":
        return NotImplemented
    x = q.float() if upcast else q
    a, b = x.chunk(2, dim=-1)
    y = x * cos - torch.cat([-b, a], dim=-1) * sin
    return y.to(q.dtype) if out == "input" else y


def rotated_by_halves(q, cos, sin, style, out, upcast):
    """The members of the pairs on their own, put together by ``cat`` or ``stack``: cos and sin have half the columns."""
    x = q.float() if upcast else q
    if style in ("rotate_half", "reversed"):
        a, b = x.chunk(2, dim=-1)
    elif style in ("even_odd_to_halves", "rotate_every_two"):
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        return NotImplemented
    members = [a * cos - b * sin, b * cos + a * sin]
    if style == "reversed":
        members = [a * cos + b * sin, b * cos - a * sin]
    y = torch.stack(members, dim=-1).flatten(-2) if style == "rotate_every_two" else torch.cat(members, dim=-1)
    return y.to(q.dtype) if out == "input" else y


def normed_and_rotated(x, weight, cos, sin, eps, offset, round_first, across, style, out, contiguous):
    """Return the rotation of an RMSNorm of x, of each head or ``across`` all heads: kernels/rms_norm_rope.py."""
    heads_at_1 = four_dims(cos).shape[1] == 1
    tokens = (x.transpose(1, 2) if heads_at_1 else x).flatten(-2) if across else x
    q = pow_mean_rsqrt(tokens, weight, eps, offset, round_first)
    if across:
        q = q.unflatten(-1, (-1, x.shape[-1]))
        q = q.transpose(1, 2) if heads_at_1 else q
    half = cos.shape[-1] != x.shape[-1]
    return (rotated_by_halves if half else rotated)(q, cos, sin, style, out, out == "input")


def unread(view: View) -> Iterator[NearMiss]:
    """Pairs that are multiplied by 2 x 2 matrices (Flux): (.., 2, 2) times (.., 1, 2)."""
    for node in view.graph.nodes:
        term = view.term(node)
        parts = [inner_term(view, o, "mul") for o in term.operands if is_tensor(o)] if term.op == "add" else []
        if len(parts) != 2 or None in parts:
            continue
        factors = [p.operands for p in parts if p is not None and all(map(is_tensor, p.operands))]
        picked = [[view.arguments_of(f, "getitem") for f in fs] for fs in factors]
        if len(picked) != 2 or any(bound is None for pair in picked for bound in pair):
            continue
        sources = {bound["input"] for pair in picked for bound in pair if bound is not None and is_tensor(bound["input"])}
        pairs = [s for s in sources if example(s).dim() > 2 and example(s).shape[-2:] == (1, 2)]
        if len(sources) == 2 and pairs:
            reason = "pairs are multiplied by matrices of cos and sin; the kernel takes cos and sin themselves"
            yield NearMiss("rope", node, pairs[0], reason)


def guard(q, cos, sin, style, out, upcast):
    if q.dim() != 4 or q.shape[-1] % 2:
        return f"q has shape {tuple(q.shape)}; the kernel takes (batch, heads, length, even head dim)"
    if cos.dim() == 0 or sin.shape != cos.shape:
        return f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; the kernel takes tables of one shape"
    if cos.shape[-1] not in (q.shape[-1], q.shape[-1] // 2):
        return f"cos and sin have {cos.shape[-1]} columns for a head dim of {q.shape[-1]}"
    if cos.requires_grad or sin.requires_grad:
        return "cos or sin needs a gradient; the kernel has none for them"
    if q.dtype.itemsize > 4 or cos.dtype.itemsize > 4 or sin.dtype != cos.dtype:
        return f"q is {q.dtype}, cos {cos.dtype}, sin {sin.dtype}; the kernel takes up to float32 and one table dtype"
    shape = (1,) * (4 - cos.dim()) + tuple(cos.shape)
    if shape[1] != 1 and shape[2] != 1:
        return f"cos has shape {tuple(cos.shape)}: an angle a head; the kernel shares angles between heads"
    return None


def why_keep(q, cos, sin, style, out, upcast):
    if device_type(q) == "cuda" and not trained(q):
        return "without a gradient Inductor's is faster (0.047 ms against 0.054 at 8 x 32(8) x 2048 x 64 on an H200)"
    return too_small(q, symbolic=True)


def join(view: View, q: Match, k: Match) -> Match | None:
    """Neighbors that share cos, sin and variant as one match with both inputs, if nothing needs the first result before the
    second input exists."""
    if q.others or q.statics != k.statics or k.inputs["q"] is q.root:
        return None
    if not all(view.same_value(q.inputs[n], k.inputs[n]) for n in ("cos", "sin")):
        return None
    a, b = example(q.inputs["q"]), example(k.inputs["q"])
    alike = (a.dtype, a.requires_grad, _lies(a)) == (b.dtype, b.requires_grad, _lies(b))
    alike = alike and _lies(example(q.root)) == _lies(example(k.root))
    if not alike or not all(statically_known_true(a.shape[d] == b.shape[d]) for d in (0, 3)):
        return None
    first_use = min((view.order[u] for u in q.root.users), default=len(view.order))
    if view.order[k.inputs["q"]] >= first_use:
        return None
    return dataclasses.replace(
        q,
        outputs=(q.root, k.root),
        nodes=q.nodes | k.nodes,
        others={"k": k.inputs["q"]},
        parts={**q.parts, "k": q.parts["q"]} if q.parts else q.parts,
        crossed=q.crossed | k.crossed,
        rounded=q.rounded | k.rounded,
        terms=q.terms + k.terms,
    )


def _lies(tensor: torch.Tensor) -> Any:
    """Return how a DTensor lies over which ranks; nothing for another tensor."""
    return getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)


def emit(editor: Editor, match: Match) -> None:
    q_root, k_root = match.outputs[0], match.outputs[-1] if len(match.outputs) > 1 else None
    # Behind the last input and before the first use of a result.
    last = max(match.operands.values(), key=lambda n: editor.view.order[n])
    at = q_root if editor.view.order[last] < editor.view.order[q_root] else editor.now(last).next
    with editor.graph.inserting_before(at):
        q, k, cos, sin = (own(editor, match, name) for name in ("q", "k", "cos", "sin"))
        contiguous = not keeps_layout(match)
        call = editor.call(rope, (q, k, cos, sin, match.statics["style"], match.statics["out"], contiguous), like=q_root)
        results = [
            whole(editor, match, editor.item(call, i, like=root), root, lies_as="qk"[i], contiguous=contiguous)
            for i, root in enumerate(match.outputs)
        ]
        editor.check(match.outputs, results)
    editor.replace(q_root, results[0])
    if k_root is not None:
        editor.replace(k_root, results[1])


def finish(editor: Editor, match: Match, made: Sequence[fx.Node]) -> str | None:
    """Round once what autocast would cast, and normalize in the same kernel what an RMSNorm alone makes."""
    _round_once(editor, match, made)
    return fold_norms(editor, match, made)


def _round_once(editor: Editor, match: Match, made: Sequence[fx.Node]) -> None:
    """Store in 16 bits what autocast would cast to them: float32 tables make float32 of queries and keys in 16 bits, and
    attention reads them in 16 bits again. The rotation is in float32 either way, and rounded once. (The gradients of several
    readers would be added up in 16 bits.)"""
    for node in made:
        if node.target is not rope or node.args[_OUT] != "promoted":
            continue
        narrow = example(node.args[0]).dtype
        once = all(len(item.users) == 1 for item in node.users)
        readers = [user for item in node.users for user in item.users]
        if narrow.itemsize == 2 and once and all(_casts_to(editor.view, reader, narrow) for reader in readers):
            editor.change_results(node, (*node.args[:_OUT], "input", *node.args[_OUT + 1 :]), like=match.root)


def _casts_to(view: View, reader: fx.Node, narrow: torch.dtype) -> bool:
    """Return True if a node is a cast, or attention that autocast runs in this dtype."""
    casts = view.name(reader) in ("to", "half", "bfloat16", "scaled_dot_product_attention")
    return casts and is_tensor(reader) and example(reader).dtype == narrow


def keeps_layout(match: Match) -> bool:
    """Sums have the layout of q; a ``cat`` of halves is contiguous."""
    root, q = example(match.root), match.example("q")
    root = root.to_local() if match.parts else root
    return all(statically_known_true(a == b) for a, b in zip(root.stride(), torch.empty_like(q).stride(), strict=True))


def of_variant(inputs: dict[str, Any], statics: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with half the columns for the style whose pairs share an angle."""
    if statics["style"] != "even_odd_to_halves":
        return inputs
    half = inputs["q"].shape[-1] // 2
    return {**inputs, "cos": inputs["cos"][..., :half], "sin": inputs["sin"][..., :half]}


_OUT = 5  # where the op takes ``out``
# Cohere, GLM and GPT-J rotate neighbors.
_PAIRS = {"style": "rotate_every_two", "out": "input", "upcast": False}

FUSION = Fusion(
    name="rope",
    pattern=rotated,
    spellings=(rotated_by_halves, rotated_back),
    inputs={"q": "b h s d", "cos": "b|1 h|1 s|1 c|1", "sin": "b|1 h|1 s|1 c|1"},
    variants=tuple(
        {"style": style, "out": out, "upcast": upcast}
        for style in ("rotate_half", "rotate_every_two", "even_odd_to_halves", "reversed", "swap_halves")
        for out, upcast in (("input", False), ("promoted", False), ("input", True))
    ),
    guard=guard,
    unread=unread,
    why_keep=why_keep,
    join=join,
    parallel=("b", "h", "s"),
    emit=emit,
    finish=finish,
    frozen=("cos", "sin"),
    shared=("b", "h"),
    of_variant=of_variant,
    traffic=("4*b*h*s*d*bytes", "6*b*h*s*d*bytes"),
    before=("add_layer_norm", "add_rms_norm"),  # a norm would take its sum for a residual add (norms of rotated queries)
    cases=(
        case("odd", b=2, h=3, s=5, d=6, c=6, bench=False),
        case("llama_1b", b=8, h=32, s=2048, d=64, c=64),
        case("llama_8b", b=4, h=32, s=4096, d=128, c=128),
        case("pairs_128", b=2, h=32, s=8192, d=128, c=128, statics=_PAIRS, order={"q": "b s h d"}),
        case("pairs_64", b=8, h=16, s=2048, d=64, c=64, statics=_PAIRS, order={"q": "b s h d"}),
    ),
    source="Su et al. 2021, arXiv:2104.09864",
)
