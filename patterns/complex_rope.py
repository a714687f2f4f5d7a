"""Rotary position embedding written as a product of complex numbers (Llama 4, DeepSeek V2) -> kernels/rope.py.

Pairs of neighbouring numbers are read as complex numbers and multiplied by ``freqs``, cos + i sin of the angles. Inductor
leaves complex products to PyTorch's own kernels, in float32, with a copy before and after.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary, source_of
from fx_fusion.kernels.rope import rope
from fx_fusion.patterns.rope import keeps_layout
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.replace import insertion_point


def rotated_as_complex(q, freqs, out):
    pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    y = torch.view_as_real(pairs * freqs).flatten(3)
    return y.to(q.dtype) if out == "input" else y


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        if node.op == "call_function" and node.target is torch.view_as_real:
            try:
                yield _read(view, node)
            except NotThis as why:
                yield NearMiss("complex_rope", node, why.node or node, str(why))


def _read(view: View, real: fx.Node) -> Match:
    product = source_of(real)
    if product is None or view.name(product) != "mul":
        raise NotThis(product, "no product is read as real numbers")
    a, b = binary(view, product)
    pairs, freqs = (a, b) if _is_complex_view(a) else (b, a)
    if not _is_complex_view(pairs) or not is_tensor(freqs) or _is_complex_view(freqs):
        raise NotThis(product, f"{product.name} is no product of pairs of numbers and a table")
    if example(freqs).is_conj():
        raise NotThis(freqs, f"{freqs.name} is a conjugate that was not computed yet")
    split = source_of(pairs)
    x = source_of(split) if split is not None and view.name(split) in ("reshape", "view", "unflatten") else None
    if split is None or x is None or not is_tensor(x):
        raise NotThis(split, f"{pairs.name} does not read the last dim of a tensor as pairs")
    nodes = {real, product, pairs, split}
    if (below := view.transparent(x)) is not None and example(x).dtype == torch.float32:
        nodes.add(x)
        x = below
    joined = next(iter(real.users), None)
    if len(real.users) != 1 or joined is None or view.name(joined) not in ("flatten", "reshape", "view"):
        raise NotThis(real, f"{real.name} is not put together again")
    if not same_shape(example(joined), example(x)) or not same_shape(example(split)[..., 0, 0], example(x)[..., 0]):
        raise NotThis(joined, f"{joined.name} has another shape than {x.name}")
    nodes.add(joined)
    root, out, rounded = joined, "promoted", frozenset[fx.Node]()
    cast = next(iter(joined.users), None)
    narrower = example(x).dtype != torch.float32
    if len(joined.users) == 1 and narrower and view.transparent(cast) is joined and example(cast).dtype == example(x).dtype:
        root, out, rounded = cast, "input", frozenset([cast])
        nodes.add(cast)
    inputs, statics = {"q": x, "freqs": freqs}, {"out": out}
    return Match("complex_rope", (root,), frozenset(nodes), inputs, statics, rounded=rounded)


def _is_complex_view(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is torch.view_as_complex


def emit(editor: Editor, match: Match) -> None:
    root = match.root
    with editor.graph.inserting_before(insertion_point(match, editor)):
        tables = editor.call(torch.view_as_real, (match.inputs["freqs"],), like=root)
        cos, sin = (editor.method("select", (tables, -1, i), like=root) for i in range(2))
        arguments = (match.inputs["q"], None, cos, sin, "rotate_every_two", match.statics["out"], not keeps_layout(match))
        y = editor.item(editor.call(rope, arguments, like=root), 0, like=root)
        editor.check([root], [y])
    editor.replace(root, y)


def guard(q, freqs, out):
    if q.dim() != 4 or q.dtype.itemsize > 4:
        return f"q is {q.dtype} of shape {tuple(q.shape)}; the kernel takes (batch, heads, length, head dim) up to float32"
    if freqs.dtype != torch.complex64 or freqs.requires_grad:
        return f"the table is {freqs.dtype}, gradient {freqs.requires_grad}; the kernel takes complex64 without one"
    shape = (1,) * (4 - freqs.dim()) + tuple(freqs.shape)
    if freqs.dim() > 4 or not statically_known_true(2 * shape[3] == q.shape[3]):
        return f"the table has shape {tuple(freqs.shape)} for a head dim of {q.shape[-1]}"
    if not (statically_known_true(shape[1] == 1) or statically_known_true(shape[2] == 1)):
        return f"the table has shape {tuple(freqs.shape)}: an angle a head; the kernel shares angles between heads"
    return None


def why_keep(q, freqs, out):
    return too_small(q, symbolic=True)


FUSION = Fusion(
    name="complex_rope",
    pattern=rotated_as_complex,
    inputs={"q": "b h s d", "freqs": "b|1 h|1 s|1 c|1"},
    complex_inputs=("freqs",),
    variants=({"out": "input"}, {"out": "promoted"}),
    find=find,
    emit=emit,
    frozen=("freqs",),
    shared=("b", "h"),
    guard=guard,
    why_keep=why_keep,
    traffic=("4*b*h*s*d*bytes", "12*b*h*s*d*bytes"),
    cases=(
        case("odd", b=2, h=3, s=5, d=6, c=3, bench=False),
        case("llama_4", b=1, h=40, s=4096, d=128, c=64, order={"q": "b s h d"}),
    ),
    source="Su et al. 2021, arXiv:2104.09864, eq. 13",
)
