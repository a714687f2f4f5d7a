"""transformers' Trainer."""

from small import llama, rows
from transformers import Trainer, TrainingArguments

from fx_fusion.trainer import watch  # from here on, Trainer takes "fx_fusion"

arguments = TrainingArguments(
    "out", torch_compile=True, torch_compile_backend="fx_fusion", max_steps=6, logging_steps=2,
    per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(llama(), arguments, train_dataset=rows(32))
report = watch(trainer)
trainer.train()
print(report)
print("the page: out/fx_fusion.html")
