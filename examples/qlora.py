"""QLoRA: the base in 4 bits through bitsandbytes, LoRA with PEFT beside it."""

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from small import batches, device, llama
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import fx_fusion

llama().save_pretrained("out/base")
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
base = LlamaForCausalLM.from_pretrained("out/base", quantization_config=four_bits, device_map=device)
base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.train()  # from_pretrained gives an evaluating model, whose 4-bit weights bitsandbytes lays out anew on some CPUs
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
print(f"{type(model.get_submodule('model.model.layers.0.mlp.up_proj')).__name__} of {base.get_memory_footprint() >> 20} MiB")
print(report)
