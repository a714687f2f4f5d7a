"""What the ranks of a process group do together: gathering, and waiting for each other."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """The tensors of all ranks of a group, by the group's name, one behind the other along the first dim; not there before
    ``arrived``, and ``tensor`` has to stay until then. All ranks have to call it. Gone: raises AttributeError at the first
    step, and nothing is computed."""
    return torch.ops._c10d_functional.all_gather_into_tensor(tensor, ranks, group)


def arrived(tensor: Tensor) -> Tensor:
    """What ``gather`` returned, once it is there. Gone: as ``gather``."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


_MEETINGS: Counter[str] = Counter()  # of this rank, by group


def present_within(seconds: float, group: Any) -> int:
    """How many ranks of a group call this, the same time for each, until all do or the time is up. Gone: all of them."""
    store_of = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if store_of is None or dist.get_backend(group) == "fake":
        return dist.get_world_size(group)
    name = group.group_name
    _MEETINGS[name] += 1
    store, key = store_of(group), f"fx_fusion/{_MEETINGS[name]}"
    late, present = time.monotonic() + seconds, store.add(key, 1)
    while present < dist.get_world_size(group):
        if time.monotonic() > late:
            store.add(key, -1)  # who comes later must not find us
            return present
        time.sleep(0.001)
        present = store.add(key, 0)
    return present
