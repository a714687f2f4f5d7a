"""Pointwise ops in front of a site and behind it: what they save Inductor, which computes them in the kernel of the site.

A kernel of ours reads what such an op has stored, and stores what the next one reads: LayerScale or dropout in front of an
add and a norm, the modulation of a diffusion transformer behind a norm, the bias of a convolution in front of a norm of its
channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fx_fusion.fusion.match import Match
from fx_fusion.graph.size_hints import bytes_of, elements, trained
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.graph.view import View

_POINTWISE = frozenset((
    "add", "sub", "mul", "div", "pow", "neg", "sqrt", "rsqrt", "square", "reciprocal", "sigmoid", "tanh", "erf", "exp",
    "log", "silu", "gelu", "relu", "maximum", "clamp", "dropout", "masked_fill", "where",
))  # fmt: skip
_SUMS = frozenset(("add", "sub"))  # their gradient is the one that comes in: nothing is computed for it
_PERMUTATIONS = ("permute", "transpose", "movedim")
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")


@dataclass(frozen=True)
class Beside:
    """The costs of pointwise neighbors of a site to our kernels and not Inductor's.

    Attributes:
        bytes: that are written and read between them, forward and backward.
        ops: which they are, in words.
        device: where.
    """

    bytes: float
    ops: str
    device: torch.device


def beside(match: Match, view: View, claimed: Mapping[fx.Node, int]) -> Beside:
    """The pointwise neighbors of a site whose values are as large as its result.

    Args:
        claimed: how many sites a node is part of: kernels of ours may compute it, then.
    """
    result = match.root
    if not is_tensor(result):
        return Beside(0, "", torch.device("meta"))
    size = elements(example(result))
    moved = 0
    ops: list[str] = []

    def is_pointwise(node: fx.Node) -> bool:
        alike = is_tensor(node) and elements(example(node)) == size
        return alike and not claimed.get(node) and node not in match.nodes and view.name(node) in _POINTWISE

    inputs = [node for node in match.inputs.values() if is_tensor(node) and elements(example(node)) == size]
    for made in filter(is_pointwise, (_below(node, view) for node in inputs)):
        readers = _readers(made, view)
        if min(readers, key=lambda n: view.order.get(n, 0), default=None) not in match.nodes:
            continue  # a kernel in front of it computes what is read there first
        stored = not match.nodes.issuperset(readers)
        passes = 1 if stored else 2
        if trained(example(made)) and (stored or view.name(made) not in _SUMS):  # one that others read has other gradients
            passes += 2 if len(inputs) == 1 else 1  # one that is another input's gradient too is stored by Inductor as well
        moved += passes * bytes_of(example(made))
        ops.append(str(view.name(made)))
    for convolution, bias in filter(None, (_permuted_convolution(node, view) for node in inputs)):
        passes = bias + 2 * trained(example(convolution))  # whose gradient is copied to lie as the convolution's result does
        moved += passes * bytes_of(example(convolution))
        ops.append("bias of a convolution" if bias else "gradient's layout")
    readers = [user for user in _readers(result, view) if user not in match.nodes]
    if inputs and (fused := [user for user in readers if is_pointwise(user)]):
        passes = 2 if len(fused) == len(readers) else 1
        if trained(example(result)) and not all(view.name(user) in _SUMS for user in fused):
            passes += 2
        moved += passes * bytes_of(example(result))
        ops.append(str(view.name(fused[0])))
    return Beside(moved, " and ".join(dict.fromkeys(ops)), example(result).device)


def _below(node: fx.Node, view: View) -> fx.Node:
    """Return what computes the values of a node: down through views and what changes no value."""
    while True:
        below = view.transparent(node)
        if below is None and (bound := view.arguments_of(node, *_RESHAPES)) is not None:
            below = bound["input"]
        if not isinstance(below, fx.Node):
            return node
        node = below


def _permuted_convolution(node: fx.Node, view: View) -> tuple[fx.Node, bool] | None:
    """The convolution whose permuted result a node is, and whether it adds a bias, which Inductor does behind it."""
    below, permuted = _below(node, view), False
    while (bound := view.arguments_of(below, *_PERMUTATIONS)) is not None:
        below, permuted = _below(bound["input"], view), True
    if not permuted or below.target not in _CONVOLUTIONS:
        return None
    return below, any(map(is_tensor, (*below.args[2:3], below.kwargs.get("bias"))))


def _readers(node: fx.Node, view: View) -> list[fx.Node]:
    """Return who reads a node, directly or through views and what changes no value."""
    found: dict[fx.Node, None] = {}
    below, waiting = _below(node, view), list(node.users)
    while waiting:
        user = waiting.pop()
        if _below(user, view) is below:
            waiting += user.users
        else:
            found[user] = None
    return list(found)
