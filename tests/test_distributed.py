"""DDP on two CPU processes: same losses and gradients as without the backend, logits stay deferred."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from torch.nn.parallel import DistributedDataParallel

    import fx_fusion
    from fx_fusion.deferred_tensor import DeferredTensor
    from fx_fusion.testing import rewriting_backend
    from tests.helpers import tiny_llama, tokens

    ids = tokens()[rank : rank + 1]
    results = []
    for compiled in (False, True):
        model = DistributedDataParallel(tiny_llama())
        run = torch.compile(model, backend=rewriting_backend()) if compiled else model
        with fx_fusion.recording() as report:
            out = run(input_ids=ids, labels=ids)
        lazy = isinstance(out.logits, DeferredTensor)
        out.loss.backward()
        results.append(
            (out.loss.item(), model.module.lm_head.weight.grad.clone(), lazy, report.count("linear_cross_entropy"))
        )
    (loss, grad, _, _), (our_loss, our_grad, lazy, fused) = results
    queue.put((rank, abs(loss - our_loss), (grad - our_grad).abs().max().item(), lazy, fused))
    dist.destroy_process_group()


def test_two_processes():
    if not dist.is_gloo_available():
        pytest.skip("no gloo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    mp.spawn(worker, args=(port, queue), nprocs=2, join=True)
    for _ in range(2):
        _, loss_error, grad_error, lazy, fused = queue.get()
        assert loss_error < 1e-5
        assert grad_error < 1e-5
        assert fused == 1
        assert lazy
