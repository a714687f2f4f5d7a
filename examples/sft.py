"""TRL's SFTTrainer: head and loss of TRL's own are part of the graph."""

import datasets
from small import llama, words
from trl import SFTConfig, SFTTrainer

import fx_fusion  # from here on, the trainer takes "fx_fusion"

tokenizer, texts = words()
arguments = SFTConfig(
    "out", torch_compile=True, torch_compile_backend="fx_fusion", max_steps=4, logging_steps=2, max_length=64, bf16=False,
    per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True,
)  # fmt: skip
rows = datasets.Dataset.from_dict({"text": texts})
trainer = SFTTrainer(llama(), arguments, train_dataset=rows, processing_class=tokenizer)
with fx_fusion.recording() as report:
    trainer.train()
print(report)
