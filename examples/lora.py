"""LoRA with PEFT: the base is frozen, so nothing is kept for its gradients."""

import torch
from peft import LoraConfig, get_peft_model
from small import batches, llama

import fx_fusion

model = get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()
compiled = torch.compile(model, backend="fx_fusion")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

with fx_fusion.recording() as report:
    for batch in batches(4):
        loss = compiled(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
print(report)
