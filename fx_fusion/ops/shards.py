"""Between DTensors and the plain tensors that kernels take: functions that graphs call."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def own_part(weight: Any) -> Tensor:
    """The part of a sharded DTensor that this rank has; its gradient is that part's."""
    return weight.to_local()


def whole_here(x: Any) -> Tensor:
    """A replicated DTensor as this rank has it, for a function whose gradient has to be summed over the ranks."""
    from torch.distributed.tensor import Partial

    return x.to_local(grad_placements=[Partial()] * x.device_mesh.ndim)
