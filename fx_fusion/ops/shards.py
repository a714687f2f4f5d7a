"""Between DTensors and the plain tensors that kernels take: functions that graphs call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def own_part(weight: Any) -> Tensor:
    """The part of a sharded DTensor that this rank has; its gradient is that part's."""
    return weight.to_local()


def part_of_rank(x: Any, gradient: Any) -> Tensor:
    """A rank's part of a DTensor, whose gradient lies over the mesh as ``gradient`` says."""
    return x.to_local(grad_placements=list(gradient))


def of_all_ranks(part: Tensor, like: Any, contiguous: bool = False) -> Tensor:
    """The DTensor of which ``part`` is this rank's, with the shape and the placements of ``like``, and its strides unless it
    is ``contiguous``."""
    from torch.distributed.tensor import DTensor

    stride = _contiguous(like.shape) if contiguous else like.stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride)


def rows_of_all_ranks(part: Tensor, ids: Any, table: Any, placements: Any) -> Tensor:
    """The DTensor of which ``part`` is this rank's: a row of ``table`` for each of ``ids``."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*ids.shape, table.shape[1]))
    return DTensor.from_local(
        part, table.device_mesh, list(placements), run_check=False, shape=shape, stride=_contiguous(shape)
    )


def redistributed(x: Any, *args: Any, **kwargs: Any) -> Any:
    """The DTensor ``x`` in other placements: its method, as a function."""
    return x.redistribute(*args, **kwargs)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, size * strides[0])
    return tuple(strides)


def replica(x: Any) -> Tensor:
    """A replicated DTensor as this rank has it, for a function whose gradient every rank has whole."""
    return x.to_local()


def replicated_beside(x: Tensor, weight: Any) -> Tensor:
    """The DTensor, replicated over the ranks of ``weight``, that ``replica`` took apart."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim, run_check=False)
