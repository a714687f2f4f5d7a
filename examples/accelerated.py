"""A loop of one's own under accelerate: `accelerate launch` says on how many processes, Accelerator compiles."""

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from small import batches, llama

import fx_fusion  # from here on, accelerate takes "fx_fusion"

accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="fx_fusion"))
model = llama()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
with fx_fusion.recording() as report:
    for batch in batches(4):
        loss = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.4f}")
accelerator.print(report)
