"""The models of ``bench.models``: how each is built and what a step of its training reads.

A family gives a model with random bfloat16 weights on the GPU and a function of the step's number that gives the call's
keyword arguments; its loss is ``loss_of`` the output. ``items`` are what a step's throughput counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """``build(batch, length)`` -> model, step, items a step; ``liger``: the name of Liger's patch, if it has one."""

    build: Callable[[int, int], tuple[nn.Module, Step, int]]
    batch: int
    length: int
    unit: str = "tokens"
    liger: str | None = None
    loss_of: Callable[[Any, dict[str, Any]], Tensor] = lambda out, given: out.loss


def _transformers(
    model: str, config: str, documents: int = 0, **sizes: Any
) -> Callable[[int, int], tuple[nn.Module, Step, int]]:
    """A causal or masked language model: labels are the inputs; ``documents`` of one length are packed into a row."""

    def build(batch: int, length: int) -> tuple[nn.Module, Step, int]:
        import transformers

        made = getattr(transformers, config)(**sizes)
        with torch.device("cuda"):
            module = getattr(transformers, model)(made)
        ids = torch.randint(0, made.vocab_size, (8, batch, length), device="cuda")
        more = {}
        if documents:
            positions = torch.arange(length, device="cuda") % (length // documents)
            more = {"position_ids": positions.expand(batch, length).contiguous()}
        return module, lambda i: {"input_ids": ids[i % 8], "labels": ids[i % 8], **more}, batch * length

    return build


def _with_lora(
    build: Callable[[int, int], tuple[nn.Module, Step, int]],
) -> Callable[[int, int], tuple[nn.Module, Step, int]]:
    """The model with LoRA of rank 16 beside every ``*_proj``, all other weights frozen."""

    def built(batch: int, length: int) -> tuple[nn.Module, Step, int]:
        from bench.ways_to_train import with_lora

        model, step, items = build(batch, length)
        with torch.device("cuda"):
            with_lora(model)
        return model, step, items

    return built


def _t5(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("cuda"):
        model = T5ForConditionalGeneration(T5Config.from_dict({
            "d_model": 768, "d_ff": 2048, "d_kv": 64, "num_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu",
            "vocab_size": 32128, "decoder_start_token_id": 0, "dropout_rate": 0.0, "tie_word_embeddings": False,
            "use_cache": False,
        }))  # fmt: skip
    ids, labels = (torch.randint(1, 32128, (8, batch, n), device="cuda") for n in (length, length // 4))
    return model, lambda i: {"input_ids": ids[i % 8], "labels": labels[i % 8]}, batch * (length + length // 4)


def _unet(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """The UNet of Stable Diffusion 1.5 on latents of length x length."""
    from diffusers import UNet2DConditionModel

    with torch.device("cuda"):
        model = UNet2DConditionModel(sample_size=length, cross_attention_dim=768)
    latents = torch.randn(8, batch, 4, length, length, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(8, batch, 77, 768, device="cuda", dtype=torch.bfloat16)
    times = torch.randint(0, 1000, (8, batch), device="cuda")

    def step(i: int) -> dict[str, Any]:
        return {"sample": latents[i % 8], "timestep": times[i % 8], "encoder_hidden_states": text[i % 8]}

    return model, step, batch


def _timm(name: str) -> Callable[[int, int], tuple[nn.Module, Step, int]]:
    def build(batch: int, length: int) -> tuple[nn.Module, Step, int]:
        import timm

        model = timm.create_model(name).to("cuda")
        images = torch.randn(4, batch, 3, length, length, device="cuda", dtype=torch.bfloat16)
        return model, lambda i: {"x": images[i % 4]}, batch

    return build


def _class_loss(out: Any, given: dict[str, Any]) -> Tensor:
    return F.cross_entropy(out.float(), torch.zeros(len(out), dtype=torch.long, device=out.device))


def _noise_loss(out: Any, given: dict[str, Any]) -> Tensor:
    return F.mse_loss(out.sample.float(), given["sample"].float())


_LLAMA = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "use_cache": False, "vocab_size": 128256}
_LLAMA_1B = {
    **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_8B = {
    **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
_MISTRAL = {  # 8 of its 32 layers
    "use_cache": False, "num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None,
}  # fmt: skip
_WINDOW = {**_MISTRAL, "sliding_window": 4096}
_MIXTRAL = {**_MISTRAL, "num_hidden_layers": 2}

_GEMMA3 = {  # the 1B text model
    "use_cache": False, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
}  # fmt: skip
_GEMMA2 = {  # 13 of the 26 layers of 2B, whose scores have a softcap
    "use_cache": False, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 13, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
}  # fmt: skip
_GPT_OSS = {  # 4 of the 24 layers of 20B, whose scores have a sink
    "use_cache": False, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128, "num_local_experts": 32,
    "num_experts_per_tok": 4,
}  # fmt: skip
_QWEN3 = {  # 0.6B
    "use_cache": False, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip

FAMILIES = {
    "llama-1b": Family(_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA_1B), 8, 2048, liger="llama"),
    "llama-8b": Family(_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA_8B), 1, 4096, liger="llama"),
    "llama-8b-lora": Family(_with_lora(_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA_8B)), 1, 4096),
    "mistral": Family(_transformers("MistralForCausalLM", "MistralConfig", **_MISTRAL), 4, 4096, liger="mistral"),
    "mistral-window": Family(_transformers("MistralForCausalLM", "MistralConfig", **_WINDOW), 2, 8192, liger="mistral"),
    "llama-1b-packed": Family(
        _transformers("LlamaForCausalLM", "LlamaConfig", documents=8, **_LLAMA_1B), 2, 8192, liger="llama"
    ),
    "gemma3": Family(_transformers("Gemma3ForCausalLM", "Gemma3TextConfig", **_GEMMA3), 2, 4096, liger="gemma3_text"),
    "gemma2": Family(_transformers("Gemma2ForCausalLM", "Gemma2Config", **_GEMMA2), 2, 4096, liger="gemma2"),
    "gpt-oss": Family(_transformers("GptOssForCausalLM", "GptOssConfig", **_GPT_OSS), 2, 2048),
    "qwen3": Family(_transformers("Qwen3ForCausalLM", "Qwen3Config", **_QWEN3), 8, 2048, liger="qwen3"),
    "modernbert": Family(_transformers("ModernBertForMaskedLM", "ModernBertConfig"), 8, 4096),
    "mixtral": Family(_transformers("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL), 4, 2048, liger="mixtral"),
    "gpt2": Family(_transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False), 16, 1024),
    "bert": Family(_transformers("BertForMaskedLM", "BertConfig"), 64, 512),
    "t5": Family(_t5, 32, 512),
    "vit-l": Family(_timm("vit_large_patch16_224"), 64, 224, unit="images", loss_of=_class_loss),
    "unet": Family(_unet, 16, 64, unit="images", loss_of=_noise_loss),
    "resnet-evonorm": Family(_timm("resnetv2_50d_evos"), 128, 224, unit="images", loss_of=_class_loss),
}
