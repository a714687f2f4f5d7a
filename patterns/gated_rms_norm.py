"""RMSNorm with ``silu(gate)`` or ``sigmoid(gate)`` before or after it -> kernels/gated_rms_norm.py.

In the state-space and linear-attention models: Mamba-2, Bamba, Granite hybrid, Qwen3-Next, Kimi linear.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import fx

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.fusion.guards import unlike_shapes, wrong_dtype
from fx_fusion.fusion.match import Match
from fx_fusion.graph.size_hints import expected, too_small
from fx_fusion.graph.terms import example, same_shape
from fx_fusion.kernels.gated_rms_norm import WIDEST, gated_rms_norm
from fx_fusion.patterns.sites.lengths import HINTS
from fx_fusion.rewrite.editor import Editor

_CASTS = ("to", "half", "bfloat16")


def gated(x, gate, weight, eps, before, silu, round_first, groups, out):
    a = F.silu(gate.float()) if silu else torch.sigmoid(gate.float())
    h = x.float() * a if before else x.float()
    h = h if groups == 1 else h.unflatten(-1, (groups, -1))
    normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    normed = normed if groups == 1 else normed.view(x.shape)
    y = weight * normed.to(x.dtype) if round_first else weight.float() * normed
    y = (y if before else y * a).to(x.dtype)
    return y if out == "input" else y.to(getattr(torch, out))


def read_groups(match: Match) -> Match | None:
    """The match with the number of groups that the shapes of its views say; None where they say none."""
    if match.statics["groups"] == 1:
        return match
    x, squared = example(match.inputs["x"]), next(example(t.operands[0]) for t in match.terms if t.op == "square")
    columns, size = x.shape[-1], squared.shape[-1]
    if not isinstance(size, int) or not isinstance(columns, int) or columns % size:
        return None
    grouped = x.unflatten(-1, (-1, size))
    views = [example(term) for term in match.terms if term.op == "view"]
    if not same_shape(squared, grouped) or not all(same_shape(v, grouped) or same_shape(v, x) for v in views):
        return None
    return dataclasses.replace(match, statics={**match.statics, "groups": columns // size})


def finish(editor: Editor, match: Match, made: Sequence[fx.Node]) -> str | None:
    """Store in 16 bits what is only cast to them: rows of float32, of a scan, in front of a product in 16 bits."""
    for y in (n for n in made if n.target is operator.getitem and example(n).dtype == torch.float32):
        call, cast = y.args[0], editor.view.only_reader(y, *_CASTS)
        if call.target is not gated_rms_norm.overload or cast is None:
            continue
        if (narrow := example(cast).dtype) in (torch.bfloat16, torch.float16):
            editor.change_results(call, (*call.args[:-1], str(narrow).removeprefix("torch.")), like=match.root)
    return None


def guard(x, gate, weight, eps, before, silu, round_first, groups, out):
    if (why := unlike_shapes(x=x, gate=gate)) is not None:
        return why
    if expected(x.shape[-1]) > WIDEST:
        return f"rows of {x.shape[-1]}; the kernel keeps a row in registers, up to {WIDEST}"
    return wrong_dtype(x=x, gate=gate, weight=weight)


def why_keep(x, gate, weight, eps, before, silu, round_first, groups, out):
    return too_small(x)


FUSION = Fusion(
    name="gated_rms_norm",
    instead="F.rms_norm(x, (n,), weight, eps) * F.silu(gate)",
    hints=HINTS,
    pattern=gated,
    inputs={"x": "... n", "gate": "... n", "weight": "n", "eps": 1e-6},
    variants=tuple(
        {"before": before, "silu": silu, "round_first": round_first, "groups": groups, "out": "input"}
        for before, silu, round_first, groups in (
            (True, True, True, 1),
            (True, True, True, 2),
            (True, True, False, 1),
            (True, True, False, 2),
            (False, True, True, 1),
            (False, True, False, 1),
            (False, False, False, 1),
            (False, False, True, 1),
        )
    ),
    read=read_groups,
    parallel=("...",),
    kernel=gated_rms_norm,
    finish=finish,
    guard=guard,
    why_keep=why_keep,
    traffic=("8*m*n*bytes", "10*m*n*bytes"),
    before=("add_rms_norm", "rms_norm", "swiglu", "swish"),
    cases=(
        case("two_elements", m=1, n=2, bench=False),
        case("odd", m=5, n=782, bench=False),
        case("mamba2", m=16384, n=5120),
        case(
            "qwen3_next", m=131072, n=128,
            statics={"before": False, "silu": True, "round_first": True, "groups": 1, "out": "input"},
        ),
    ),
    source="Dao and Gu 2024, arXiv:2405.21060",
)
