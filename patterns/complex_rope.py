"""Rotary position embedding written as a product of complex numbers (Llama 4, DeepSeek V2) -> kernels/rope.py.

Pairs of numbers, neighbors or half a row apart, are read as complex numbers and multiplied by ``freqs``, cos + i sin of the
angles. Inductor leaves complex products to PyTorch's own kernels, in float32, with a copy before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.graph.dtypes import keeps_values
from fx_fusion.graph.size_hints import too_small
from fx_fusion.graph.terms import example, is_tensor, same_shape
from fx_fusion.graph.view import View
from fx_fusion.graph.walk import NotThis, binary, source_of
from fx_fusion.kernels.rope import rope
from fx_fusion.patterns.rope import keeps_layout
from fx_fusion.patterns.sites.normed_rotations import fold_norms
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.replace import insertion_point


def rotated_as_complex(q, freqs, style, out):
    x = q.float()
    pairs = torch.stack(x.chunk(2, dim=-1), dim=-1) if style == "rotate_half" else x.reshape(*q.shape[:-1], -1, 2)
    y = torch.view_as_real(torch.view_as_complex(pairs) * freqs)
    y = y.flatten(3) if style == "rotate_every_two" else y.transpose(-1, -2).flatten(3)
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
    x, halves_in, split = _split(view, pairs)
    source = view.source(x)
    q = source.base
    root, halves_out, joined = _joined(view, real, q)
    style = _STYLES.get((halves_in, halves_out))
    if style is None:
        raise NotThis(root, f"{root.name} puts halves together as pairs; the kernel writes halves where it reads them")
    narrow, cast = example(q).dtype, next(iter(root.users), None)
    casts = ((n, view.transparent(n)) for n in joined)
    rounded = [n for n, below in casts if below and not keeps_values(example(below).dtype, example(n).dtype)]
    if rounded and {example(n).dtype for n in (*rounded, root)} != {narrow}:
        raise NotThis(rounded[0], f"{rounded[0].name} rounds to another dtype than that of {q.name}")
    after = len(root.users) == 1 and not rounded and narrow != torch.float32
    if after and view.transparent(cast) is root and example(cast).dtype == narrow:
        root, rounded = cast, [cast]
    nodes = frozenset((real, product, pairs, *split, *joined, root))
    inputs, statics = {"q": q, "freqs": freqs}, {"style": style, "out": "input" if rounded else "promoted"}
    crossed = frozenset(source.crossed)
    return Match("complex_rope", (root,), nodes, inputs, statics, crossed=crossed, rounded=frozenset(rounded))


def _split(view: View, pairs: fx.Node) -> tuple[fx.Node, bool, list[fx.Node]]:
    """Return the tensor that is read as pairs, whether the members of a pair are half a row apart, and the nodes between."""
    edge = view.edge(source_of(pairs))
    split = edge.base
    if not edge.roundings and is_tensor(split):
        term = view.term(split)
        x = term.operands[0] if term.op in ("view", "stack") else None
        if term.op == "view" and is_tensor(x) and same_shape(example(split)[..., 0, 0], example(x)[..., 0]):
            return x, False, [*edge.crossed, split]
        if term.op == "stack" and term.attrs == (-1,):
            members = [view.term(view.source(member).base) for member in term.operands]
            halves = _MEMBERS.get(tuple((member.op, *member.attrs) for member in members))
            nodes = [*edge.crossed, split, *(n for o in term.operands for n in view.source(o).crossed)]
            if halves is not None and view.same_source(members[0].operands[0], members[1].operands[0]):
                return members[0].operands[0], halves, [*nodes, *members[0].nodes, *members[1].nodes]
    raise NotThis(split, f"{pairs.name} does not read the last dim of a tensor as pairs, or its halves")


def _joined(view: View, real: fx.Node, q: fx.Node) -> tuple[fx.Node, bool, set[fx.Node]]:
    """Return the node that puts the pairs together in the shape of ``q``, whether their members are half a row apart, and
    the nodes between."""
    seen, waiting = set[fx.Node](), list(real.users)
    while waiting:
        node = waiting.pop(0)
        if node in seen or view.name(node) not in _MOVES:
            continue
        seen.add(node)
        if not is_tensor(node) or not same_shape(example(node), example(q)):
            waiting += node.users
            continue
        halves = _order(view, node, real)
        if halves is None:
            raise NotThis(node, f"{node.name} puts the members of the pairs together in another order than the kernel")
        between, above = set[fx.Node](), [node]
        while above:
            between.add(n := above.pop())
            above += [i for i in n.all_input_nodes if view.order[i] > view.order[real] and i not in between]
        return node, halves, between
    raise NotThis(real, f"{real.name} is not put together again in the shape of {q.name}")


def _order(view: View, joined: fx.Node, real: fx.Node) -> bool | None:
    """Return whether the members of a pair are half a row apart in ``joined``, or side by side; None for another order."""
    term = view.term(joined)
    axis: int
    members: tuple[tuple[Any, ...], ...]
    if term.op == "view" or (term.op == "flatten" and term.attrs == (-2, -1)):
        below = view.edge(term.operands[0]).base
        if below is real:
            return False
        term = view.term(below)
        if term.op == "transpose" and term.attrs == (-2, -1):
            return True if view.edge(term.operands[0]).base is real else None
        axis, members = -2, (("part", -1, 0, 2), ("part", -1, 1, 2))
    else:
        axis, members = -1, (("select", -1, 0), ("select", -1, 1))
    if term.op != "cat" or term.attrs != (axis,):
        return None
    found = [view.term(view.edge(member).base) for member in term.operands]
    alike = tuple((member.op, *member.attrs) for member in found) == members
    return True if alike and all(view.edge(member.operands[0]).base is real for member in found) else None


def _is_complex_view(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is torch.view_as_complex


def emit(editor: Editor, match: Match) -> None:
    root = match.root
    with editor.graph.inserting_before(insertion_point(match, editor)):
        tables = editor.call(torch.view_as_real, (match.inputs["freqs"],), like=root)
        cos, sin = (editor.method("select", (tables, -1, i), like=root) for i in range(2))
        style, out = match.statics["style"], match.statics["out"]
        arguments = (match.inputs["q"], None, cos, sin, style, out, not keeps_layout(match))
        y = editor.item(editor.call(rope, arguments, like=root), 0, like=root)
        editor.check([root], [y])
    editor.replace(root, y)


def finish(editor: Editor, match: Match, made: Sequence[fx.Node]) -> str | None:
    return fold_norms(editor, match, made)


def guard(q, freqs, style, out):
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


def why_keep(q, freqs, style, out):
    return too_small(q, symbolic=True)


# Whether a pair is half a row apart, in and out.
_STYLES = {(False, False): "rotate_every_two", (True, True): "rotate_half", (False, True): "even_odd_to_halves"}
_MEMBERS: dict[Any, bool] = {
    (("part", -1, 0, 2), ("part", -1, 1, 2)): True,
    (("slice", -1, 0, "end", 2), ("slice", -1, 1, "end", 2)): False,
}
_MOVES = {
    "to", "type_as", "float", "half", "bfloat16", "getitem", "unbind", "chunk", "split", "select", "transpose", "cat",
    "flatten", "reshape", "view", "contiguous",
}  # fmt: skip

FUSION = Fusion(
    name="complex_rope",
    pattern=rotated_as_complex,
    inputs={"q": "b h s d", "freqs": "b|1 h|1 s|1 c|1"},
    complex_inputs=("freqs",),
    variants=tuple({"style": style, "out": out} for style in _STYLES.values() for out in ("input", "promoted")),
    find=find,
    emit=emit,
    finish=finish,
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
