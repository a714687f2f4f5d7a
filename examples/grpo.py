"""TRL's GRPOTrainer with a reward in Python. As in sft.py, its head is part of the graph."""

import datasets
from small import llama, words
from trl import GRPOConfig, GRPOTrainer

import fx_fusion  # from here on, the trainer takes "fx_fusion"


def even_tokens(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


tokenizer, texts = words()
arguments = GRPOConfig(
    "out", torch_compile=True, torch_compile_backend="fx_fusion", max_steps=4, logging_steps=1, num_generations=4,
    max_completion_length=16, num_iterations=2, per_device_train_batch_size=4, report_to=[], save_strategy="no", bf16=False,
    disable_tqdm=True, learning_rate=1e-3,
    gradient_checkpointing=False,  # TRL switches it off and on in each step, and each time is compiled anew
)  # fmt: skip
prompts = datasets.Dataset.from_dict({"prompt": texts})
trainer = GRPOTrainer(llama(), even_tokens, arguments, train_dataset=prompts, processing_class=tokenizer)
with fx_fusion.recording() as report:
    trainer.train()
print(report)
