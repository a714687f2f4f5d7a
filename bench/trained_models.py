"""Models that ``bench.setups`` trains, and their sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


@dataclasses.dataclass
class Sizes:
    """The sizes of models and batches."""

    device: str = "cuda"
    vocabulary: int = 128256
    hidden: int = 2048
    heads: int = 32
    batch: int = 4
    length: int = 2048
    bert_batch: int = 64
    bert_length: int = 512
    bert_layers: int = 12
    bert_vocabulary: int = 30522
    t5_vocabulary: int = 32128


TINY = Sizes("cpu", 5000, 64, 4, 2, 64, 4, 32, 1, 5000, 5000)
SIZES = Sizes()  # ``use`` changes it


def use(sizes: Sizes) -> None:
    """From now on, models and batches are of these sizes."""
    vars(SIZES).update(vars(sizes))


def llama(layers: int) -> nn.Module:
    """The shape of Llama 3.2 1B with fewer layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SIZES.vocabulary, hidden_size=SIZES.hidden, intermediate_size=4 * SIZES.hidden, num_hidden_layers=layers,
        num_attention_heads=SIZES.heads, num_key_value_heads=SIZES.heads // 4, head_dim=SIZES.hidden // SIZES.heads,
        max_position_embeddings=8192, rope_theta=5e5, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama_written_out(layers: int) -> nn.Module:
    """With ``attn_implementation="eager"``."""
    model = llama(layers)
    model.set_attn_implementation("eager")
    return model


def gemma2(layers: int) -> nn.Module:
    """Gemma 2 as wide as the Llama, with heads of 128 as in 27B: attention is written out, its scores are capped."""
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(
        vocab_size=SIZES.vocabulary, hidden_size=SIZES.hidden, intermediate_size=4 * SIZES.hidden, num_hidden_layers=layers,
        num_attention_heads=SIZES.heads // 2, num_key_value_heads=SIZES.heads // 4, head_dim=128,
        query_pre_attn_scalar=128, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def t5(layers: int) -> nn.Module:
    """T5 base with half of its layers, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768, d_ff=2048, d_kv=64, num_layers=max(1, SIZES.bert_layers // 2), num_heads=12,
        feed_forward_proj="gated-gelu", vocab_size=SIZES.t5_vocabulary, decoder_start_token_id=0, dropout_rate=0.0,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def llama_with_cache(layers: int) -> nn.Module:
    """From transformers 5.18 on, without a mask, Inductor gets is_causal by itself then."""
    model = llama(layers)
    model.config.use_cache = True
    return model


def bert(dropout: float) -> Callable[[int], nn.Module]:
    """BERT base for masked language modeling."""

    def build(layers: int) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout, vocab_size=SIZES.bert_vocabulary,
            num_hidden_layers=SIZES.bert_layers,
        )  # fmt: skip
        return BertForMaskedLM(config)

    return build


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16):
        super().__init__()
        like = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.base, self.a = base, nn.Linear(base.in_features, rank, **like)
        self.b = nn.Linear(rank, base.out_features, **like)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


def with_lora(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, LowRank(child))


def with_checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
