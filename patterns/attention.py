"""Attention written out -> ``F.scaled_dot_product_attention``: no scores in memory.

    matmul(q, kᵀ) · scale [+ bias] [masked] -> softmax [in float32] -> [dropout] -> matmul(·, v)

Read from the softmax, down to the first product and up to the second: the steps between are too many, and too freely
ordered, for one function an order. A mask that is proved causal becomes ``is_causal`` (on Hopper torch then takes
cuDNN's kernel), one that hides nothing is dropped, a learned bias is handed on. A mask that is not proved stays with the
written-out form: where it hides a whole row, that form and the fused kernels differ.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import computed_in, keeps_values
from fx_fusion.graph.effects import entered
from fx_fusion.graph.forms import inner_term
from fx_fusion.graph.masks.prover import MaskProof
from fx_fusion.graph.terms import example, is_tensor, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary
from fx_fusion.patterns.sites.products import NAMES as PRODUCTS
from fx_fusion.patterns.sites.products import Product, permuted, product_of, rows_of_keys
from fx_fusion.rewrite.editor import Editor, Mismatch


def masked_softmax_attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril().logical_not()
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


@dataclass
class _Scores:
    """What lies between the first product and the softmax."""

    q: Any = None
    keys: Any = None  # (.., d, keys) but for ``product.right_order``
    product: Product | None = None
    scale: float = 1.0
    proofs: list[MaskProof] = field(default_factory=list)
    biases: list[fx.Node] = field(default_factory=list)
    nodes: set[fx.Node] = field(default_factory=set)
    dropout: float = 0.0
    values: Product | None = None  # of probabilities and values


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


def unread(view: View) -> Iterator[NearMiss]:
    """A softmax of scores in other words."""
    for node in view.graph.nodes:
        term = view.term(node)
        if term.op != "div" or not all(map(is_tensor, term.operands)):
            continue
        power, total = inner_term(view, term.operands[0], "exp"), inner_term(view, term.operands[1], "sum")
        if power is None or total is None or not view.same_source(total.operands[0], term.operands[0]):
            continue
        if is_tensor(power.operands[0]) and _has_product(view, power.operands[0]):
            reason = "exp(x) / sum(exp(x)) overflows where softmax(x) does not; write softmax"
            yield NearMiss("attention", node, node, reason)


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
    values = product_of(view, user)
    if values is None or values.left is not probabilities or values.left_order is not None or values.added is not None:
        raise NotThis(user, f"expected a product of {probabilities.name} and values, found {view.name(user) or user.name}")
    v = values.right
    if values.alpha != 1:
        raise NotThis(user, f"{user.name} scales its result by {values.alpha}")
    if any(dtype not in (seen[0], example(v).dtype) for dtype in seen):
        raise NotThis(probabilities, f"the probabilities are rounded on the way to {probabilities.name}")
    if (write := view.effects.written_after(view.order[user], [user])) is not None:
        raise NotThis(write, f"{write.name} changes the result in place; fused attention keeps it for its backward")
    q, keys, first = scores.q, scores.keys, scores.product
    assert first is not None
    rank = example(q).dim()
    if rank not in (3, 4) or example(keys).dim() != rank or example(v).dim() != rank:
        raise NotThis(user, "expected queries, keys and values of one rank, 3 or 4")
    orders = first.left_order, first.right_order, values.right_order
    heads = [
        [example(t).shape[d] for d in (order or range(rank))[:-2]] for t, order in zip((q, keys, v), orders, strict=True)
    ]  # fmt: skip
    if not all(_broadcasts(other, heads[0]) for other in heads[1:]):
        raise NotThis(user, "batch and heads of queries, keys and values differ")
    scores.dropout, scores.values = dropout, values
    # Inputs lie as the kernel takes them; what has its dims in another order, or one head for all, does not.
    as_they_are = [order is None and same_sizes(heads[0], own) for order, own in zip(orders, heads, strict=True)]
    inputs: dict[str, fx.Node] = {}
    others = {f"bias_{i}": b for i, b in enumerate(scores.biases)}
    for name, node, as_it_is in (("q", q, as_they_are[0]), ("v", v, as_they_are[2])):
        (inputs if as_it_is else others)[name if as_it_is else f"{name}_otherwise"] = node
    if as_they_are[1] and view.term(keys).op == "transpose" and view.term(keys).attrs == (-2, -1):
        inputs["k"] = view.term(keys).operands[0]
    else:
        others["keys"] = keys
    dtypes = [example(t).dtype for t in (q, keys, v)]
    if len(inputs) < 3 and len(set(dtypes)) > 1:  # the guard sees those that lie as a kernel takes them
        raise NotThis(keys, f"q, k and v are {', '.join(map(str, dtypes))}; attention takes one dtype")
    everything = frozenset((*nodes, user))
    return Match(
        "attention", (user,), everything, inputs, others=others, rounded=frozenset(rounded), reading=scores
    )  # fmt: skip


def _read_scores(search: Search, node: Any, scores: _Scores) -> None:
    """From the softmax down to the first product, one step at a time."""
    view = search.view
    while True:
        if not isinstance(node, fx.Node) or not is_tensor(node):
            raise NotThis(node, "not a softmax of scores")
        scores.nodes.add(node)
        product = product_of(view, node)
        if product is not None:
            if product.out_order is not None:
                raise NotThis(node, f"{node.name} has queries and keys in other than its last two dims")
            if product.alpha <= 0:
                raise NotThis(node, f"{node.name} scales the scores by {product.alpha}")
            scores.q, scores.keys, scores.product = product.left, product.right, product
            if product.added is not None:
                _add_bias(search, node, product.added, scores)
            scores.scale *= product.alpha
            return
        below, name = view.transparent(node), view.name(node)
        if below is not None:
            if not keeps_values(example(below).dtype, example(node).dtype):
                raise NotThis(node, f"{node.name} rounds the scores to {example(node).dtype}")
            node = below
        elif name in ("mul", "div"):
            node = _scaled(view, node, name, scores)
        elif name == "sub":
            node = _without_maximum(view, node, scores)
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


def _broadcasts(sizes: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether batch and heads are those of the queries, or 1."""
    return all(statically_known_true(a == b) or statically_known_true(a == 1) for a, b in zip(sizes, wanted, strict=True))


def _has_product(view: View, node: fx.Node, depth: int = 8) -> bool:
    """Whether a matrix product is within a few steps: what tells attention from any other softmax."""
    if view.name(node) in PRODUCTS:
        return True
    return depth > 0 and any(is_tensor(n) and _has_product(view, n, depth - 1) for n in node.all_input_nodes)


def _scaled(view: View, node: fx.Node, name: str, scores: _Scores) -> fx.Node:
    a, b = (_number(view, operand) for operand in binary(view, node))
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
        _add_bias(search, node, mask, scores)
        return inside
    raise NotThis(node, f"{node.name} combines scores in another way than by an additive mask")


def _add_bias(search: Search, node: fx.Node, mask: fx.Node, scores: _Scores) -> None:
    """What ``node`` adds to the scores: a mask that is proved, or a learned bias."""
    if not is_tensor(mask) or not example(mask).dtype.is_floating_point:
        raise NotThis(node, f"{node.name} adds {example(mask).dtype if is_tensor(mask) else mask} numbers to the scores")
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


def _without_maximum(view: View, node: fx.Node, scores: _Scores) -> fx.Node:
    """Below ``scores - max(scores)``, which a softmax is the same without."""
    term = view.term(node)
    inside, largest = term.operands if term.op == "sub" and len(term.operands) == 2 else (None, None)
    found = _maximum(view, largest) if is_tensor(inside) else None
    if found is None or found[0] is not inside:
        raise NotThis(node, f"{node.name} is between the product and the softmax")
    scores.nodes.update(found[1])
    return inside  # type: ignore[return-value]


def _maximum(view: View, node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """What a node is the maximum of, over keys, and the nodes that make it."""
    nodes = [node]
    if isinstance(node, fx.Node) and (node.target, node.args[1:]) in ((operator.getitem, (0,)), (getattr, ("values",))):
        node = node.args[0]  # torch.max gives where it is, too
    bound = view.arguments_of(node, "amax", "max")
    if bound is None or not is_tensor(bound["input"]) or not bound["keepdim"]:
        return None
    dims = bound["dim"] if isinstance(bound["dim"], (tuple, list)) else (bound["dim"],)
    over_keys = tuple(dims) in ((-1,), (example(bound["input"]).dim() - 1,))
    return (bound["input"], list(dict.fromkeys([*nodes, node]))) if over_keys else None


def _number(view: View, item: Any) -> Any:
    """A number that the graph makes a tensor of, ``torch.tensor(64.0).sqrt()``, as it is; anything else unchanged."""
    if not is_tensor(item) or example(item).dim() != 0 or not example(item).dtype.is_floating_point:
        return item
    if item.target is torch.tensor and item.args and isinstance(item.args[0], (int, float)):
        return torch.tensor(item.args[0], dtype=example(item).dtype).item()
    if (full := view.arguments_of(item, "full")) is not None and isinstance(view.folded(full["fill_value"]), (int, float)):
        return torch.tensor(view.folded(full["fill_value"]), dtype=example(item).dtype).item()
    below = view.arguments_of(item, "sqrt", "rsqrt")
    number = None if below is None else _number(view, below["input"])
    if not isinstance(number, (int, float)):
        return item
    return getattr(torch, str(view.name(item)))(torch.tensor(number, dtype=example(item).dtype)).item()


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
        q = permuted(editor, scores.q, scores.product.left_order, root)
        v = permuted(editor, scores.values.right, scores.values.right_order, root)
        if "k" in match.inputs:
            k = editor.now(match.inputs["k"])
        else:
            k = permuted(editor, scores.keys, rows_of_keys(scores.product), root)
        k, v = (_for_all_heads(editor, t, q, root) for t in (k, v))
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
        call = permuted(editor, call, scores.values.out_order, root)
        if example(call).stride() != example(root).stride():
            call = editor.restride(call, example(root), like=root)
        editor.check([root], [call])
    for proof in scores.proofs:
        editor.assume(proof.assumes)
    editor.replace(root, call)
    editor.erase([*match.nodes, *(node for proof in scores.proofs for node in proof.nodes)])


def _for_all_heads(editor: Editor, node: Any, q: Any, like: fx.Node) -> Any:
    """Keys or values with the batch and the heads of the queries."""
    wanted = example(q).shape[:-2]
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
