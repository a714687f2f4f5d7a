"""Keys and values repeated for grouped-query attention -> ``enable_gqa=True``: no copy of K and V.

The kernels behind ``enable_gqa`` on a GPU exist for bfloat16 and float16; in float32 the call would fall to the unfused
path, so there the copy stays. So it does under a mask that is not proved, and where FlashAttention is switched off or is not
made for the GPU, unless torch's own selection of kernels says that a fused one takes such a call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph import signatures
from fx_fusion.graph.devices import device_type, planned_gpu
from fx_fusion.graph.dtypes import computed_in
from fx_fusion.graph.terms import example, is_tensor, same_sizes
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import attention_calls, source_of
from fx_fusion.rewrite.editor import Editor, Mismatch
from fx_fusion.torch_internals.attention import takes_grouped_heads


def attention_with_repeated_kv(query, key, value):
    n = query.shape[1] // key.shape[1]
    key, value = (
        x[:, :, None, :, :].expand(x.shape[0], x.shape[1], n, x.shape[2], x.shape[3]).reshape(
            x.shape[0], x.shape[1] * n, x.shape[2], x.shape[3]
        )
        for x in (key, value)
    )  # fmt: skip
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node, bound in attention_calls(view):
        if bound["enable_gqa"] is True:
            continue
        key, value = (repeated(view, bound[name]) for name in ("key", "value"))
        if key is None and value is None:
            continue
        same_heads = statically_known_true(example(bound["query"]).shape[1] == example(bound["key"]).shape[1])
        if key is None or value is None or not statically_known_true(key[1] == value[1]) or not same_heads:
            reason = "key and value are not repeated alike, or not to the heads of the query"
            yield NearMiss("repeat_kv", node, node, reason)
            continue
        yield Match(
            fusion="repeat_kv",
            outputs=(node,),
            nodes=frozenset(),
            inputs={"query": bound["query"], "key": key[0], "value": value[0]},
            crossed=frozenset((*chain(view, bound["key"]), *chain(view, bound["value"]))),
        )


def repeated(view: View, node: fx.Node) -> tuple[fx.Node, int] | None:
    """``(x, n)`` if ``node`` is x with each head n times in a row, and has its gradient."""
    if not is_tensor(node) or example(node).dim() != 4 or view.hides_gradient(node):
        return None
    name = view.name(node)
    if name == "repeat_interleave":
        bound = view.arguments(node)
        if bound and isinstance(bound["repeats"], int) and bound["dim"] in (1, -3):
            return bound["input"], bound["repeats"]
        return None
    if name in ("repeat", "expand"):
        return _of_one_head(node)
    if name not in ("reshape", "view", "flatten"):
        return None
    expanded = source_of(node)
    if expanded is None or view.name(expanded) != "expand" or example(expanded).dim() != 5:
        return None
    if view.hides_gradient(expanded) or view.hides_gradient(expanded.args[0]):
        return None
    inner = view.term(expanded.args[0])
    if inner.op != "unsqueeze" or inner.attrs != (-3,) or not is_tensor(inner.operands[0]):
        return None
    (b, h, n, s, d), shape = example(expanded).shape, example(node).shape
    return (inner.operands[0], n) if same_sizes((b, h * n, s, d), shape) else None


def without_repeats(view: View, key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node, frozenset[fx.Node]]:
    """Keys and values with few heads where both are repeated alike, else as they are; and the nodes that repeat."""
    few = [repeated(view, node) for node in (key, value)]
    if few[0] is None or few[1] is None or not statically_known_true(few[0][1] == few[1][1]):
        return key, value, frozenset()
    return few[0][0], few[1][0], frozenset((*chain(view, key), *chain(view, value)))


def unread(view: View) -> Iterator[NearMiss]:
    """Heads that are picked one by one, or all of them repeated in a row."""
    for node, bound in attention_calls(view):
        tiled = next((bound[name] for name in ("key", "value") if _is_tiled(view, bound[name])), None)
        if tiled is not None:
            reason = f"{tiled.name} repeats all heads in a row, grouped heads each one; use repeat_interleave"
            yield NearMiss("repeat_kv", node, tiled, reason)
            continue
        picked = view.arguments_of(bound["key"], "getitem", "index_select")
        index = None if picked is None else picked["index"]
        chosen = index if isinstance(index, tuple) else (index,)
        if any(is_tensor(i) for i in chosen):
            reason = f"{bound['key'].name} picks heads by a tensor of indices; use repeat_interleave, or enable_gqa=True"
            yield NearMiss("repeat_kv", node, bound["key"], reason)


def _is_tiled(view: View, node: fx.Node) -> bool:
    """Return True if a node is ``x.repeat(1, n, 1, 1)`` of several heads."""
    bound = view.arguments_of(node, "repeat")
    if bound is None or not is_tensor(bound["input"]) or example(node).dim() != 4 or example(bound["input"]).dim() != 4:
        return False
    (_, h, s, d), (_, heads, t, e) = example(bound["input"]).shape, example(node).shape
    return not statically_known_true(h == heads) and same_sizes((s, d), (t, e))


def _of_one_head(node: fx.Node) -> tuple[fx.Node, int] | None:
    """One head of keys for all (multi-query attention), ``x.expand(-1, n, -1, -1)`` or ``x.repeat(1, n, 1, 1)``."""
    x = source_of(node)
    if x is None or not is_tensor(x) or example(x).dim() != 4:
        return None
    (b, h, s, d), (c, n, t, e) = example(x).shape, example(node).shape
    one = statically_known_true(h == 1) and isinstance(n, int) and same_sizes((b, s, d), (c, t, e))
    return (x, n) if one else None


def chain(view: View, node: fx.Node) -> list[fx.Node]:
    """The nodes that repeat, from the repeated tensor down to (not including) the one with few heads."""
    chain = [node]
    while view.name(chain[-1]) in ("reshape", "view", "flatten", "expand", "repeat"):
        below = source_of(chain[-1])
        if below is None:
            break
        chain.append(below)
    return chain


def emit(editor: Editor, match: Match) -> None:
    call = signatures.bind("scaled_dot_product_attention", match.root)  # as it is now: causal_mask may have changed it
    assert call is not None
    mask = call["attn_mask"]
    if on_a_gpu(example(match.root)) and not (mask is None and flash_runs(example(match.root))):
        query, key, value = (example(match.inputs[name]) for name in ("query", "key", "value"))
        options = call["dropout_p"], call["is_causal"], call["scale"]
        dtype = example(match.root).dtype  # under autocast the operands may have another
        # Kernels of a GPU that is not here can't be asked.
        if planned_gpu() or not takes_grouped_heads(query, key, value, example(mask), *options, dtype):
            reason = "FlashAttention does not run here" if mask is None else "the mask stays"
            raise Mismatch(f"{reason}, and no fused kernel of this device is known to take grouped heads then")
    editor.change_call(match.root, key=match.inputs["key"], value=match.inputs["value"], enable_gqa=True)
    editor.erase(match.crossed)


def on_a_gpu(tensor: torch.Tensor) -> bool:
    """Return True if kernels with grouped heads are few. (CPU's takes any mask.)"""
    return device_type(tensor) == "cuda"


def flash_runs(tensor: torch.Tensor) -> bool:
    """Return True if FlashAttention, which takes grouped heads without a mask, is made for the GPU and is not switched
    off."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    return bool(planned_gpu()) or torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def guard(query, key, value):
    if device_type(query) == "cpu":
        return None
    if (dtype := computed_in(query)) not in (torch.bfloat16, torch.float16):
        return f"attention in {dtype} has no fused kernel with grouped heads"
    if query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
        return f"head dims {query.shape[-1]} and {value.shape[-1]} have no fused kernel with grouped heads"
    return None


FUSION = Fusion(
    name="repeat_kv",
    pattern=attention_with_repeated_kv,
    inputs={"query": "b h s d", "key": "b g t=s d", "value": "b g t=s e=d"},
    find=find,
    unread=unread,
    emit=emit,
    guard=guard,
    before=("dense_mask",),
    on_cpu=True,
    cases=(
        case("odd", b=2, h=6, g=3, s=37, d=16, bench=False),
        case("llama_1b", b=8, h=32, g=8, s=2048, d=64),
        case("llama_8b", b=1, h=32, g=8, s=4096, d=128),
    ),
    source="Ainslie et al. 2023, arXiv:2305.13245",
)
