"""A function in several CPU processes with gloo, as torchrun starts them."""

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank, ranks, port, function, arguments, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    queue.put((rank, function(rank, *arguments)))
    dist.barrier()  # none leaves while the other still talks to it
    os._exit(0)  # freeing DDP's reducer behind a process group that is gone waits forever now and then


def on_ranks(function, *arguments, ranks=2, seconds=1200):
    """Return what ``function(rank, *arguments)`` returned on each rank: a function of a module, whose results hold no
    tensors."""
    if not dist.is_gloo_available():
        pytest.skip("no gloo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    running = mp.spawn(_rank, args=(ranks, port, function, arguments, queue), nprocs=ranks, join=False)
    results, late = {}, time.monotonic() + seconds
    try:
        while not running.join(timeout=1) or not queue.empty():
            while not queue.empty():
                results.update([queue.get()])
            assert time.monotonic() < late, "a process does not end"
    finally:
        for process in running.processes:
            process.kill()
    return results


def whole(tensor):
    """All of a DTensor; a copy of another tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()
