"""Gather, add up and wait among the ranks of a process group."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """The tensors of all ranks of a group, by the group's name, one behind the other along the first dim; not there before
    ``arrived``, and ``tensor`` has to stay until then. All ranks have to call it. Gone: raises AttributeError at the first
    step, and nothing is computed."""
    return torch.ops._c10d_functional.all_gather_into_tensor(tensor, ranks, group)


def add_up(tensor: Tensor, group: str) -> None:
    """Starts to replace a tensor, or a part of one, by its sum over the ranks of a group, by the group's name; not there
    before ``arrived``. All ranks have to call it. Gone: as ``gather``."""
    torch.ops._c10d_functional.all_reduce_(tensor, "sum", group)


def arrived(tensor: Tensor) -> Tensor:
    """Return what ``gather`` returned, or a tensor whose parts ``add_up`` was given, once it is there. Gone: as
    ``gather``."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


_over: dict[str, str] = {}  # by the name of a group, the key of the last occasion on which all its ranks met


def present_within(seconds: float, group: Any, occasion: str) -> int:
    """Return how many ranks of a group are here on the same ``occasion`` until all are or the time is up. Once all were,
    nobody has to wait on it again. Gone: all of them."""
    store_of = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if store_of is None or dist.get_backend(group) == "fake":
        return dist.get_world_size(group)
    store, key, ranks = store_of(group), f"fx_fusion/{occasion}", dist.get_world_size(group)
    late, present = time.monotonic() + seconds, store.add(key, 1)
    while present < ranks:
        if time.monotonic() > late:
            if store.add(key, -1) < ranks - 1:  # who comes later must not find us
                return present
            store.add(key, 1)  # the last one came in between, and goes on
        time.sleep(0.001)
        present = store.add(key, 0)
    before = _over.get(group.group_name, key)
    if before != key and dist.get_rank(group) == 0:
        store.delete_key(before)  # all that were there are here
    _over[group.group_name] = key
    return present


def is_collective(operator: Any) -> bool:
    """Return True for an op of the dispatcher that the ranks of a process group run together, or that waits for one."""
    namespaces = "_c10d_functional", "_c10d_functional_autograd", "c10d", "fsdp", "symm_mem"
    return getattr(operator, "namespace", "") in namespaces
