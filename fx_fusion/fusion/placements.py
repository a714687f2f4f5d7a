"""DTensors as inputs of a fusion: whether the parts that a rank has give its part of the result, and of every gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.match import Match
from fx_fusion.graph.terms import example, is_tensor


class _Not(Exception):
    """The reason why parts don't give parts."""


def in_parts(fusion: Fusion, match: Match) -> Match:
    """The match, with ``parts`` where its inputs are DTensors whose parts the kernel can take."""
    try:
        return replace(match, parts=_gradients(fusion, match)) if _is_distributed(fusion, match) else match
    except _Not:
        return match


def why_not_in_parts(fusion: Fusion, match: Match) -> str | None:
    """Return why a fusion whose inputs are DTensors can't be computed part by part; None where it can, or they are plain."""
    if not _is_distributed(fusion, match):
        return None
    try:
        _gradients(fusion, match)
    except _Not as why:
        return str(why)
    return None


def _tensors(match: Match) -> dict[str, Any]:
    given: Mapping[str, Any] = match.inputs
    return {name: example(node) for name, node in given.items() if is_tensor(node)}


def _is_distributed(fusion: Fusion, match: Match) -> bool:
    return bool(fusion.parallel) and any(hasattr(t, "placements") for t in _tensors(match).values())


def _gradients(fusion: Fusion, match: Match) -> dict[str, tuple[Any, ...]]:
    """For each input, how its gradient lies over the mesh. Sharded along a dim in ``fusion.parallel``, all inputs that have
    the dim alike: as the input lies. Without that dim (a norm's weight): summed over the ranks."""
    from torch.distributed.tensor import Partial, Replicate

    tensors = _tensors(match)
    if any(isinstance(node, fx.Node) for node in match.others.values()):
        raise _Not("the match reads more than its declared inputs")
    for name, tensor in tensors.items():
        if not hasattr(tensor, "placements"):
            raise _Not(f"{name} is a plain tensor, and others are DTensors")
    mesh = next(iter(tensors.values())).device_mesh
    if any(tensor.device_mesh != mesh for tensor in tensors.values()):
        raise _Not("its inputs lie on several meshes")
    gradients: dict[str, list[Any]] = {name: [] for name in tensors}
    for i in range(mesh.ndim):
        places = {name: _sharded_dim(fusion, name, tensor, tensor.placements[i]) for name, tensor in tensors.items()}
        dims = {place for place in places.values() if place is not None}
        if len(dims) > 1:
            raise _Not(f"its inputs are sharded along {' and '.join(sorted(name for name, _ in dims))}")
        for name, tensor in tensors.items():
            if places[name] is not None:
                gradients[name].append(tensor.placements[i])
                continue
            has = _dims_of(fusion, name, tensor)
            if any(dim in has for dim, _ in dims):
                raise _Not(f"{name} is replicated where others are sharded along {next(iter(dims))[0]}")
            gradients[name].append(Partial() if dims else Replicate())
    return {name: tuple(found) for name, found in gradients.items()}


def _dims_of(fusion: Fusion, name: str, tensor: Any) -> set[str]:
    """The entries of its spec that a tensor has, without those that it is broadcast over."""
    places = fusion.specs[name].align(tensor.dim()) or ()
    return {
        dim.name
        for dim, where in places
        if where.start < where.stop and not (dim.broadcast and statically_known_true(tensor.shape[where.start] == 1))
    }


def _sharded_dim(fusion: Fusion, name: str, tensor: Any, placement: Any) -> tuple[str, int] | None:
    """The entry of its spec along which a tensor is sharded, and which dim that is, from the right; None if it is whole."""
    from torch.distributed.tensor import Replicate, Shard

    if type(placement) is Replicate:
        return None
    if type(placement) is not Shard:
        raise _Not(f"{name} lies as {placement}, as a sum or in pieces; kernels take it sharded or whole")
    at = placement.dim % tensor.dim()
    for dim, where in fusion.specs[name].align(tensor.dim()) or ():
        if where.start <= at < where.stop and dim.name in fusion.parallel:
            return dim.name, at - tensor.dim()
    raise _Not(f"{name} is sharded along dim {at}, over which {fusion.name} computes")
