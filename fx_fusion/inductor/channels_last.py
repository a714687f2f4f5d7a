"""Predict whether Inductor will lay out the convolutions of a graph channels last, and everything around them with them.

It does so for most convolutional networks on a GPU, while the graph it is given still says channels first. Norms of images
in such a graph run channels last too (``ops.layouts``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.match import Match
from fx_fusion.graph.devices import device_type
from fx_fusion.graph.terms import example, is_tensor
from fx_fusion.torch_internals.inductor import forces_layouts, optimizes_layouts

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)  # those of torch.nn.functional are the same objects
_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def goes_channels_last(graph: fx.Graph) -> bool:
    """Inductor's own rule (``GraphLowering.decide_layout_opt``, for training), on Dynamo's graph."""
    if not optimizes_layouts():
        return False
    convolutions = [bound for node in graph.nodes if (bound := _convolution(node)) is not None]
    if not convolutions:
        return False
    if forces_layouts():
        return True
    # It counts aten nodes, of which there are about twice as many.
    if 2 * len(graph.nodes) >= 300 * len(convolutions):
        return False
    weights = [example(bound["weight"]) for bound in convolutions]
    tensors = [example(bound["input"]) for bound in convolutions] + weights
    if not all(isinstance(n, int) for t in tensors for n in t.shape):
        return False
    grouped = any(bound["groups"] > 1 and w.shape[1] > 1 for bound, w in zip(convolutions, weights, strict=True))
    narrowing = any(2 * w.shape[0] <= w.shape[1] and w.shape[2] > 1 for w in weights)
    small = all(w.shape[0] <= 64 and w.shape[1] <= 64 for w in weights)
    return not (grouped or narrowing or small)


def images_of(fusion: Fusion, inputs: Mapping[str, Any]) -> frozenset[str]:
    """The inputs of a site that are images."""
    return frozenset(name for name in fusion.images if is_tensor(inputs.get(name)))


def laid_out_of(fusion: Fusion, match: Match) -> frozenset[str]:
    """The inputs that are images which convolutions of two dims would hand on, contiguous in the graph."""
    images = images_of(fusion, match.inputs)
    fits = all(example(match.inputs[n]).dim() == 4 and example(match.inputs[n]).is_contiguous() for n in images)
    return images if fits else frozenset()


def _convolution(node: fx.Node) -> dict[str, Any] | None:
    if node.op != "call_function" or node.target not in _CONVOLUTIONS:
        return None
    bound = {"groups": 1, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    if not is_tensor(bound.get("input")) or not is_tensor(bound.get("weight")):
        return None
    return bound if device_type(example(bound["input"])) == "cuda" else None
