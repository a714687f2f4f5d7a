"""Masks of attention calls that a graph builds and hands on: the graphs that get them need not read what is proved here.

A model that is cut, into the buckets of DDP or at graph breaks, builds the mask in its first graph and attends in others.
To read it there, the host waits until the GPU has done all that it was given before. (Under FSDP2 models of transformers run
cut into functions, and the one that builds the mask gets the positions as a tensor: there it is read once a step.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fx_fusion.graph.masks.prover import MaskProver
from fx_fusion.graph.terms import example
from fx_fusion.graph.view import View
from fx_fusion.runtime.mask_values import note_kind

Compiled = Callable[..., Any]


def hand_masks_on(untouched: fx.GraphModule) -> Callable[[Compiled], Compiled]:
    """A layer around a compiled graph that notes of which kind its outputs are, where that follows from the graph as Dynamo
    wrote it, whatever comes in."""
    output = next(node for node in reversed(untouched.graph.nodes) if node.op == "output")
    masks = {i: node for i, node in enumerate(output.args[0]) if isinstance(node, fx.Node) and _may_be_a_mask(node)}
    kinds: dict[int, str] = {}
    if masks:
        prover = MaskProver(View(untouched.graph), may_assume=False)
        proofs = {i: prover.prove(node) for i, node in masks.items()}
        kinds = {i: proof.kind for i, proof in proofs.items() if proof.kind in ("none", "causal") and not proof.assumes}

    def wrap(compiled: Compiled) -> Compiled:
        def run(*args: Any) -> Any:
            results = compiled(*args)
            for i, kind in kinds.items():
                note_kind(results[i], kind)
            return results

        return run if kinds else compiled

    return wrap


def _may_be_a_mask(node: fx.Node) -> bool:
    """Return True if an output is one that says by booleans which keys (batch, heads, queries, keys) are shown."""
    mask = example(node)
    return isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype == torch.bool
