"""TRL's DPOTrainer with a reference model. As in sft.py, its head is part of the graphs of both models."""

import datasets
from small import llama, words
from trl import DPOConfig, DPOTrainer

import fx_fusion  # from here on, the trainer takes "fx_fusion"

tokenizer, texts = words()
arguments = DPOConfig(
    "out", torch_compile=True, torch_compile_backend="fx_fusion", max_steps=4, logging_steps=1, max_length=64, bf16=False,
    per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
    gradient_checkpointing=False,  # TRL switches it off and on in each step, and each time is compiled anew
)  # fmt: skip
pairs = datasets.Dataset.from_dict({"prompt": texts, "chosen": [" w1 w2 w3"] * 32, "rejected": [" w4 w5"] * 32})
trainer = DPOTrainer(llama(), llama(), arguments, train_dataset=pairs, processing_class=tokenizer)
with fx_fusion.recording() as report:
    trainer.train()
print(report)
