"""The scan of Mamba-2, written out over chunks in plain torch -> kernels/mamba2_scan.py.

In Mamba-2 and its hybrids (Nemotron-H, Granite 4, Bamba, Zamba2, Falcon-H1), where mamba_ssm is not installed: 60 calls in
float32, over tensors (b, chunks, chunk_size, chunk_size, heads) and B, C repeated for each head.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import wrong_dtype
from fx_fusion.fusion.isomorphism import Difference, compare
from fx_fusion.fusion.match import Match, NearMiss
from fx_fusion.fusion.search import Search
from fx_fusion.fusion.tracing import call_beside, trace
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View
from fx_fusion.kernels.mamba2_scan import MOST_CHANNELS, mamba2_scan
from fx_fusion.patterns.sites.gaps import replace_part
from fx_fusion.rewrite.editor import Editor
from fx_fusion.rewrite.replace import insertion_point


def chunked(x, dt, A, B, C, D, chunk_size):
    cut = x.shape[1] % chunk_size != 0
    return _chunked(x, dt, A, B, C, D, tuple(x.shape), tuple(B.shape[2:]), chunk_size, x.device, cut)


def _chunked(x, dt, A, B, C, D, shape, state, q, device, cut):
    """Compute the same for sizes that are given, as a traced x has none. ``cut``: whether the last chunk is cut off."""
    (b, t, heads, p), (groups, n) = shape, state
    behind = (q - t % q) % q
    x = x.float()
    B = B.float().repeat_interleave(heads // groups, dim=2, output_size=heads)
    C = C.float().repeat_interleave(heads // groups, dim=2, output_size=heads)
    skip = None if D is None else D[..., None] * _padded(x, behind, 4)
    x = x * dt[..., None].float()
    steps = A.to(torch.float32) * dt.float()
    x, B, C = (_padded(rows, behind, 4).reshape(b, -1, q, heads, size) for rows, size in ((x, p), (B, n), (C, n)))
    steps = _padded(steps, behind, 3).reshape(b, -1, q, heads).permute(0, 3, 1, 2)
    s = torch.cumsum(steps, dim=-1)
    chunks = (t + behind) // q
    inner = q if isinstance(t, int) else (t + behind) // chunks  # how torch writes q where t is a symbol

    decays = torch.exp(_sums_between(steps, (b, heads, chunks, inner), device))
    products = torch.einsum("bclhn,bcshn->bclsh", C, B) * decays.permute(0, 2, 3, 4, 1)
    within = torch.einsum("bclsh,bcshp->bclhp", products, x)
    to_end = torch.exp(s[:, :, :, -1:] - s).permute(0, -2, -1, 1)[..., None]
    states = torch.einsum("bclhn,bclhp->bchpn", B * to_end, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    sums = F.pad(s[:, :, :, -1], (1, 0))
    decays = torch.exp(_sums_between(sums, (b, heads, chunks + 1), device)).transpose(1, 3)
    states = torch.einsum("bzch,bzhpn->bchpn", decays, states)[:, :-1]
    before = torch.einsum("bclhn,bchpn->bclhp", C, states) * torch.exp(s).permute(0, 2, 3, 1)[..., None]

    y = (within + before).contiguous().reshape(b, -1, heads, p)
    y = y if skip is None else y + skip
    return y[:, :t] if cut else y


def _padded(rows, behind, dims):
    sizes = (0, 0, 0, 0, 0, behind, 0, 0) if dims == 4 else (0, 0, 0, behind, 0, 0)
    return F.pad(rows, sizes, mode="constant", value=0)


def _sums_between(steps, shape, device):
    """s[l] − s[k] for k ≤ l as sums of the steps in between, else −inf: (..., l, k)."""
    n = shape[-1]
    steps = steps[..., None].expand(*shape, n)
    behind = torch.tril(call_beside(steps, torch.ones, n, n, device=device, dtype=torch.bool), diagonal=-1)
    sums = torch.cumsum(steps.masked_fill(~behind, 0), dim=-2)
    upto = torch.tril(call_beside(steps, torch.ones, n, n, device=device, dtype=torch.bool), diagonal=0)
    return sums.masked_fill(~upto, -math.inf)


_CHUNKS = ("reshape", "pad")


def find(search: Search) -> Iterator[Match | NearMiss]:
    view = search.view
    for node in view.graph.nodes:
        bound = view.arguments_of(node, "einsum")
        if bound is not None and _letters(bound["equation"]) == "abcde,abdef->abcef":
            yield from _read(view, node, *_tensors(bound))


def _letters(equation: Any) -> str:
    """Return an equation with its letters in order of appearance: a, b, c ..."""
    if not isinstance(equation, str):
        return ""
    order = {letter: chr(97 + i) for i, letter in enumerate(dict.fromkeys(re.findall("[a-zA-Z]", equation)))}
    return "".join(order.get(letter, letter) for letter in equation.replace(" ", ""))


def _tensors(bound: Any) -> tuple[Any, ...]:
    operands = bound["operands"]
    return tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else tuple(operands)


def _read(view: View, within: fx.Node, products: Any, rows: Any) -> Iterator[Match | NearMiss]:
    """Propose inputs by a way to each, and take what is the reference of these, call by call."""
    factors = view.arguments_of(products, "mul") or {}
    of_group = view.arguments_of(factors.get("input"), "einsum")
    pair = () if of_group is None else _tensors(of_group)
    if len(pair) != 2:
        return
    x, dt = _below(view, rows, *_CHUNKS, "mul", "float"), _below(view, rows, *_CHUNKS, ("mul", "other"), "float", "getitem")
    C, B = (_below(view, n, *_CHUNKS, "repeat_interleave", "float") for n in pair)
    sums = _below(view, factors["other"], "permute", "exp", "masked_fill", "cumsum", "masked_fill", "expand", "getitem")
    A = _below(view, sums, "permute", *_CHUNKS, "mul", "to")
    inputs = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    root = view.only_reader(view.only_reader(view.only_reader(within, "add"), "contiguous"), "reshape")
    if root is None or not all(map(is_tensor, inputs.values())):
        return
    D = None
    if (skipped := view.only_reader(root, "add")) is not None:
        D = _below(view, view.arguments_of(skipped, "add")["other"], "mul", "getitem")  # type: ignore[index]
        root = root if D is None else skipped
    chunk_size, t = _chunk_size(view, rows), example(x).shape[1]
    if chunk_size is None:
        return
    whole = root
    if not statically_known_true(t % chunk_size == 0):
        root = view.only_reader(root, "getitem") or root
    given = inputs if D is None else {**inputs, "D": D}
    shape, state = tuple(example(x).shape), tuple(example(B).shape[2:])
    statics = {"shape": shape, "state": state, "q": chunk_size, "device": example(x).device, "cut": root is not whole}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of symbols in a graph, which nobody runs
        reference = trace(_chunked, given, statics if D is not None else {**statics, "D": None})
    assert reference is not None
    found = compare(view, root, reference, given)
    if isinstance(found, Difference):
        yield NearMiss("mamba2_scan", root, found.node, found.reason)
    else:
        yield Match(
            fusion="mamba2_scan",
            outputs=(root,),
            nodes=found | _unread_without(view, found),
            rounded=found,
            inputs={**inputs, "D": D},
            statics={"chunk_size": chunk_size},
        )


def _unread_without(view: View, found: frozenset[fx.Node]) -> set[fx.Node]:
    """Return what is read by the scan alone or by nobody: sizes of its tensors, and the last state."""
    reached: dict[fx.Node, None] = {}
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            is_size = isinstance(example(user), (int, torch.SymInt))
            if user not in found and user not in reached and (is_size or (not user.users and view.is_pure(user))):
                reached[user] = None
                waiting.append(user)
    unread = set(reached)
    while read := {n for n in unread if any(user not in found and user not in unread for user in n.users)}:
        unread -= read
    return unread


def _chunk_size(view: View, rows: Any) -> int | None:
    """Return the length of a chunk that x is reshaped to, (b, chunks, length, heads, p)."""
    shape = view.folded((view.arguments_of(rows, "reshape") or {"shape": ()})["shape"])
    size = shape[2] if len(shape) == 5 else None
    return size if isinstance(size, int) else None


def _below(view: View, node: Any, *ways: str | tuple[str, str]) -> Any:
    """Return what is reached through these ops, by the input of each or by the parameter that is named; None for others."""
    for way in ways:
        name, parameter = way if isinstance(way, tuple) else (way, "input")
        bound = view.arguments_of(node, name)
        node = None if bound is None else bound[parameter]
    return node


def emit(editor: Editor, match: Match) -> None:
    root = match.root
    with editor.graph.inserting_before(insertion_point(match, editor)):
        operands = (match.inputs[name] for name in ("x", "dt", "A", "B", "C", "D"))
        y = editor.call(mamba2_scan.overload, (*operands, match.statics["chunk_size"]), like=root)
    t, q = example(root).shape[1], match.statics["chunk_size"]
    replace_part(editor, root, y, 1, (q - t % q) % q)


def guard(x, dt, A, B, C, D, chunk_size):
    if x.shape[3] > MOST_CHANNELS:
        return f"{x.shape[3]} channels a head; the kernels take up to {MOST_CHANNELS}"
    return wrong_dtype(x=x, dt=dt, A=A, B=B, C=C, D=D)


def decaying(inputs: dict[str, Any], statics: Mapping[str, Any]) -> dict[str, Any]:
    """Steps up to 0.3 and A down to −3 or so, as models have them: with A > 0 states grow beyond all numbers."""
    return {**inputs, "dt": inputs["dt"].abs() * 0.1, "A": -inputs["A"].abs()}


FUSION = Fusion(
    name="mamba2_scan",
    pattern=chunked,
    inputs={"x": "b t h p", "dt": "b t h", "A": "h", "B": "b t g n", "C": "b t g n", "D": "h"},
    variants=({"chunk_size": 16}, {"chunk_size": 16, "D": None}),
    kernel=mamba2_scan,
    find=find,
    emit=emit,
    guard=guard,
    of_variant=decaying,
    # Bytes as compiled for an H200, and for each FLOP what is moved meanwhile: ours at 250 TFLOP/s, theirs at 50 in float32.
    traffic=("b*t*h*(30*p + 2.2*p*n)", "b*t*h*(36000 + 100*(n + p) + 4*p*n)"),
    cases=(
        case("one_token", b=2, t=1, h=2, p=8, g=1, n=16, bench=False),
        case("odd", b=2, t=41, h=4, p=24, g=2, n=40, bench=False),
        case("several_chunks", b=1, t=150, h=2, p=16, g=1, n=16, bench=False),
        case("mamba2_2.7b", b=4, t=2048, h=80, p=64, g=1, n=128, statics={"chunk_size": 256}),
    ),
    source="Dao and Gu 2024, arXiv:2405.21060",
)
