"""Short causal convolution of each channel, with or without SiLU -> kernels/causal_conv1d.py.

In the state-space and linear-attention models: Mamba, Mamba-2 and their hybrids, Qwen3.5, Kimi linear, LFM2. cuDNN has no
kernel for it, and the general one of torch takes 20 times as long as the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.indices import WHOLE, index_of
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.causal_conv1d import MOST_TAPS, causal_conv1d
from fx_fusion.patterns.sites.gaps import replace_part
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.replace import insertion_point


def convolved(x, weight, bias, silu):
    y = F.conv1d(x, weight, bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]]
    return F.silu(y) if silu else y


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        bound = view.arguments_of(node, "conv1d")
        if bound is None or not _is_of_each_channel(bound):
            continue
        x, taps, padding = bound["input"], example(bound["weight"]).shape[2], _one(bound["padding"])
        nodes, last = {node}, node
        if padding == taps - 1:
            last = _cut_to(view, node, example(x).shape[2])
            if last is None:
                yield NearMiss("causal_conv1d", node, node, "more is read than the first of its results, one for each token")
                continue
            nodes.add(last)
        elif padding == 0 and (padded := _padded(view, x, taps)) is not None:
            nodes.add(x)
            x = padded
        else:
            continue
        activated = view.only_reader(last, "silu")
        yield Match(
            fusion="causal_conv1d",
            outputs=(activated or last,),
            nodes=frozenset(nodes if activated is None else {*nodes, activated}),
            inputs={"x": x, "weight": bound["weight"], "bias": bound["bias"]},
            statics={"silu": activated is not None},
        )


def _is_of_each_channel(bound: Any) -> bool:
    x, weight = bound["input"], bound["weight"]
    if not is_tensor(x) or not is_tensor(weight) or example(x).dim() != 3:
        return False
    one_each = example(weight).shape[1] == 1 and bound["groups"] == example(weight).shape[0] == example(x).shape[1]
    return one_each and _one(bound["stride"]) == _one(bound["dilation"]) == 1 and example(weight).shape[2] > 1


def _one(number: Any) -> Any:
    """Return the number that a convolution of one dim is given, perhaps as a tuple."""
    return number[0] if isinstance(number, tuple) and len(number) == 1 else number


def _cut_to(view: View, node: fx.Node, tokens: Any) -> fx.Node | None:
    """Return the only reader of a convolution, if it takes the first ``tokens`` results."""
    if len(node.users) != 1:
        return None
    cut = next(iter(node.users))
    bound = view.arguments_of(cut, "getitem", "narrow")
    if bound is None or bound["input"] is not node or not statically_known_true(example(cut).shape[-1] == tokens):
        return None
    if "index" not in bound:
        return cut if bound["dim"] in (2, -1) and bound["start"] == 0 else None
    index = index_of(bound["index"], 3)
    if index is None or not index.only_slices or index.new_axes or index.items[:2] != (WHOLE, WHOLE):
        return None
    return cut if index.items[2].start in (None, 0) and index.items[2].step in (None, 1) else None


def _padded(view: View, x: fx.Node, taps: int) -> fx.Node | None:
    """Return what is padded with zeros in front of the first token alone; None for another operand."""
    bound = view.arguments_of(x, "pad")
    if bound is None or len(x.users) != 1 or bound["mode"] != "constant" or bound["value"] not in (None, 0, 0.0):
        return None
    sizes = tuple(bound["pad"])
    return bound["input"] if sizes[:2] == (taps - 1, 0) and not any(sizes[2:]) else None


def emit(editor: Editor, match: Match) -> None:
    root = match.root
    with editor.graph.inserting_before(insertion_point(match, editor)):
        given = (match.inputs[name] for name in ("x", "weight", "bias"))
        operands = [n if n is None else editor.cast(n, example(root).dtype, like=root) for n in given]  # as autocast does
        y = editor.call(causal_conv1d.overload, (*operands, match.statics["silu"]), like=root)
    replace_part(editor, root, y, 2, example(match.inputs["weight"]).shape[2] - 1)


def finish(editor: Editor, match: Match, made: Sequence[fx.Node]) -> str | None:
    """Leave out the copy that lays tokens innermost, as the library does, where ops of ours alone read it."""
    convolved = next(node for node in made if node.target is causal_conv1d.overload)
    copies = [node for node in made if node.op == "call_method" and node.target == "permute" and node.users]
    if len(copies) == 2 and len(convolved.users) == 1 and editor.without_copy(copies[1], convolved, like=match.root):
        editor.erase(reversed(made))
    return None


def guard(x, weight, bias, silu):
    if weight.shape[2] > MOST_TAPS:
        return f"{weight.shape[2]} taps; the kernel keeps up to {MOST_TAPS} tokens in registers"
    return wrong_dtype(x=x, weight=weight, bias=bias)


def why_keep(x, weight, bias, silu):
    return too_small(x)


FUSION = Fusion(
    name="causal_conv1d",
    instead="F.conv1d(x, weight, bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]]",
    pattern=convolved,
    inputs={"x": "b c t", "weight": "c 1 k", "bias": "c"},
    variants=tuple({"silu": silu, **rest} for silu in (True, False) for rest in ({}, {"bias": None})),
    kernel=causal_conv1d,
    find=find,
    emit=emit,
    finish=finish,
    guard=guard,
    why_keep=why_keep,
    traffic=("5*b*c*t*bytes", "80*b*c*t*bytes"),  # of the library: what its 1.3 to 3.1 ms would move (H200)
    before=("swish", "swiglu"),
    cases=(
        case("one_token", b=2, c=3, t=1, k=4, bench=False),
        case("odd", b=3, c=37, t=29, k=3, bench=False),
        case("strips", b=2, c=70, t=83, k=4, bench=False, order={"x": "b t c"}),
        case("two_taps", b=1, c=16, t=40, k=2, bench=False, order={"x": "b t c"}),
        case("qwen3_5", b=4, c=8192, t=2048, k=4, order={"x": "b t c"}),
        case("lfm2", b=8, c=2048, t=2048, k=3, statics={"silu": False, "bias": None}, order={"x": "b t c"}),
        case("mamba2", b=4, c=5376, t=2048, k=4, order={"x": "b t c"}),
    ),
    source="Gu and Dao 2023, arXiv:2312.00752",
)
