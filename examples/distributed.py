"""Several processes: torchrun --nproc-per-node 2 examples/distributed.py ddp    (or fsdp2)"""

import os
import sys

import torch
import torch.distributed as dist
from small import batches, device, llama
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fx_fusion

if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
model = llama()
if sys.argv[1] == "ddp":
    compiled = torch.compile(DistributedDataParallel(model), backend="fx_fusion")
else:  # each layer is sharded and gathered on its own; compiled as a whole, with a graph a layer
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    compiled = torch.compile(model, backend="fx_fusion")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with fx_fusion.recording() as report:
    for batch in batches(4):  # a real run gives each rank its own
        loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}")
    print(report)
dist.destroy_process_group()
