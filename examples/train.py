"""A training loop: nothing but ``backend="fx_fusion"`` is new."""

import argparse

import torch
from small import batches, llama

import fx_fusion

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
steps = parser.parse_args().steps

model = llama()
compiled = torch.compile(model, backend="fx_fusion")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with fx_fusion.recording() as report:
    for step, batch in enumerate(batches(steps)):
        loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
print(report)
