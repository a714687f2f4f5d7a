"""Normal forms of normalizations that are called by name."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fx_fusion.graph.forms import Bound, Rules
from fx_fusion.graph.terms import Reader, Term, example

RULES = Rules()


@RULES.of("rms_norm")
def _rms_norm(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    x, weight, eps = bound["input"], bound["weight"], bound["eps"]
    if not isinstance(bound["normalized_shape"], (tuple, list)) or len(bound["normalized_shape"]) != 1:
        return None
    if eps is None:
        eps = default_rms_norm_eps(example(x).dtype, example(x).device)
    return Term("rms_norm", (x, eps) if weight is None else (x, weight, eps), (), (node,))


@functools.cache
def default_rms_norm_eps(dtype: torch.dtype, device: torch.device) -> float:
    """Return what ``F.rms_norm`` adds when eps is None: the epsilon of the input's dtype or of float32, by torch version.
    Read off one call: for x much smaller than eps, ``x / rms_norm(x)`` is ``sqrt(eps)``."""
    x = torch.full((8,), 2.0**-13, dtype=dtype, device="cpu" if device.type == "meta" else device)
    measured = (x.double() / torch.nn.functional.rms_norm(x, (8,)).double()).square().mean().item() - 2.0**-26
    return min((torch.finfo(dtype).eps, torch.finfo(torch.float32).eps), key=lambda eps: abs(eps - measured))


@RULES.of("layer_norm")
def _layer_norm(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    if not isinstance(bound["normalized_shape"], (tuple, list)) or len(bound["normalized_shape"]) != 1:
        return None
    return _affine_norm("layer_norm", node, (bound["input"],), bound)


@RULES.of("group_norm")
def _group_norm(view: Reader, node: fx.Node, bound: Bound) -> Term | None:
    return _affine_norm("group_norm", node, (bound["input"], bound["num_groups"]), bound)


def _affine_norm(name: str, node: fx.Node, first: tuple[Any, ...], bound: Bound) -> Term:
    given = tuple(p for p in ("weight", "bias") if bound[p] is not None)
    return Term(name, (*first, *(bound[p] for p in given), bound["eps"]), given, (node,))
