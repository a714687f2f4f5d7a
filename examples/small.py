"""Define what the examples train: a Llama of transformers with random weights, on random tokens of several lengths."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

device = "cuda" if torch.cuda.is_available() else "cpu"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Padded on the right to 160 tokens; labels of padding are -100."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        length = int(torch.randint(32, 161, (), generator=generator))
        ids = torch.randint(2, 32000, (160,), generator=generator)
        mask = (torch.arange(160) < length).long()
        made.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return made


def batches(count: int, size: int = 4):
    data = rows(count * size)
    for start in range(0, count * size, size):
        part = data[start : start + size]
        yield {name: torch.stack([row[name] for row in part]).to(device) for name in part[0]}


def words() -> tuple[PreTrainedTokenizerFast, list[str]]:
    """A tokenizer of 250 words, and 32 texts of them."""
    known = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(250))]
    by_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<pad>"))
    by_words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return tokenizer, [" ".join(f"w{(n * i) % 250}" for i in range(10 + n)) for n in range(32)]
