"""TRL's DPOTrainer with a reference model. As in sft.py, TRL's loss is behind a graph break; both models are rewritten."""

import datasets
from small import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import fx_fusion.accelerate  # from here on, the trainer takes "fx_fusion"

words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(250))]
by_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
by_words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
texts = [" ".join(f"w{(n * i) % 250}" for i in range(10 + n)) for n in range(32)]
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
