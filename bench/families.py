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
DEVICE = "cuda"  # tests, which need no GPU, put another in its place


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
        with torch.device(DEVICE):
            module = getattr(transformers, model)(made)
        ids = torch.randint(0, made.vocab_size, (8, batch, length), device=DEVICE)
        more = {}
        if documents:
            positions = torch.arange(length, device=DEVICE) % (length // documents)
            more = {"position_ids": positions.expand(batch, length).contiguous()}
        return module, lambda i: {"input_ids": ids[i % 8], "labels": ids[i % 8], **more}, batch * length

    return build


def _with_lora(
    build: Callable[[int, int], tuple[nn.Module, Step, int]],
) -> Callable[[int, int], tuple[nn.Module, Step, int]]:
    """The model with LoRA of rank 16 beside every ``*_proj``, all other weights frozen."""

    def built(batch: int, length: int) -> tuple[nn.Module, Step, int]:
        from bench.trained_models import with_lora

        model, step, items = build(batch, length)
        with torch.device(DEVICE):
            with_lora(model)
        return model, step, items

    return built


def _t5(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device(DEVICE):
        model = T5ForConditionalGeneration(T5Config.from_dict({
            "d_model": 768, "d_ff": 2048, "d_kv": 64, "num_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu",
            "vocab_size": 32128, "decoder_start_token_id": 0, "dropout_rate": 0.0, "tie_word_embeddings": False,
            "use_cache": False,
        }))  # fmt: skip
    ids, labels = (torch.randint(1, 32128, (8, batch, n), device=DEVICE) for n in (length, length // 4))
    return model, lambda i: {"input_ids": ids[i % 8], "labels": labels[i % 8]}, batch * (length + length // 4)


def _marian(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """The translator of opus-mt-en-de: sentences of ``length`` tokens, and translations as long."""
    from transformers import MarianConfig, MarianMTModel

    with torch.device(DEVICE):
        model = MarianMTModel(MarianConfig(
            d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
            encoder_ffn_dim=2048, decoder_ffn_dim=2048, vocab_size=58101, max_position_embeddings=512,
            activation_function="swish", scale_embedding=True, dropout=0.0, use_cache=False,
        ))  # fmt: skip
    ids, labels = torch.randint(0, 58100, (2, 8, batch, length), device=DEVICE)  # 58100 is padding
    return model, lambda i: {"input_ids": ids[i % 8], "labels": labels[i % 8]}, 2 * batch * length


def _whisper(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """Whisper small on half a minute of sound, as 3000 frames, with transcripts of ``length`` tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    with torch.device(DEVICE):
        model = WhisperForConditionalGeneration(WhisperConfig(
            d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
            encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=51865, decoder_start_token_id=50258, use_cache=False,
        ))  # fmt: skip
    sounds = torch.randn(4, batch, 80, 3000, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(0, 50257, (4, batch, length), device=DEVICE)  # no special tokens
    return model, lambda i: {"input_features": sounds[i % 4], "labels": labels[i % 4]}, batch


def _dinov2(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """DINOv2 large with a classifier. It has positions for images of 518 x 518, and interpolates them for smaller ones."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    with torch.device(DEVICE):
        model = Dinov2ForImageClassification(Dinov2Config(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, image_size=518, patch_size=14, num_labels=1000,
        ))  # fmt: skip
    images = torch.randn(4, batch, 3, length, length, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(0, 1000, (4, batch), device=DEVICE)
    return model, lambda i: {"pixel_values": images[i % 4], "labels": labels[i % 4]}, batch


def _unet(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """The UNet of Stable Diffusion 1.5 on latents of length x length."""
    from diffusers import UNet2DConditionModel

    with torch.device(DEVICE):
        model = UNet2DConditionModel(sample_size=length, cross_attention_dim=768)
    latents = torch.randn(8, batch, 4, length, length, device=DEVICE, dtype=torch.bfloat16)
    text = torch.randn(8, batch, 77, 768, device=DEVICE, dtype=torch.bfloat16)
    times = torch.randint(0, 1000, (8, batch), device=DEVICE)

    def step(i: int) -> dict[str, Any]:
        return {"sample": latents[i % 8], "timestep": times[i % 8], "encoder_hidden_states": text[i % 8]}

    return model, step, batch


def _sd3(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """Three of the 24 layers of Stable Diffusion 3 medium, on latents of length x length."""
    from diffusers import SD3Transformer2DModel

    with torch.device(DEVICE):
        model = SD3Transformer2DModel(
            sample_size=length, num_layers=3, attention_head_dim=64, num_attention_heads=24, joint_attention_dim=4096,
            caption_projection_dim=1536, pooled_projection_dim=2048, pos_embed_max_size=192,
        )  # fmt: skip
    latents = torch.randn(4, batch, 16, length, length, device=DEVICE, dtype=torch.bfloat16)
    text = torch.randn(4, batch, 154, 4096, device=DEVICE, dtype=torch.bfloat16)
    pooled = torch.randn(4, batch, 2048, device=DEVICE, dtype=torch.bfloat16)
    times = torch.randint(0, 1000, (4, batch), device=DEVICE)

    def step(i: int) -> dict[str, Any]:
        given = {"hidden_states": latents, "encoder_hidden_states": text, "pooled_projections": pooled, "timestep": times}
        return {name: values[i % 4] for name, values in given.items()}

    return model, step, batch


def _flux(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """One of the 19 double blocks of Flux and two of its 38 single blocks, on length x length patches of latents."""
    from diffusers import FluxTransformer2DModel

    with torch.device(DEVICE):
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=2, pooled_projection_dim=768)
        rows, columns = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
        places = torch.stack((torch.zeros_like(rows), rows, columns), -1).flatten(0, 1).float()
    patches = torch.randn(4, batch, length * length, 64, device=DEVICE, dtype=torch.bfloat16)
    text = torch.randn(4, batch, 512, 4096, device=DEVICE, dtype=torch.bfloat16)
    pooled = torch.randn(4, batch, 768, device=DEVICE, dtype=torch.bfloat16)
    times = torch.rand(4, batch, device=DEVICE, dtype=torch.bfloat16)

    def step(i: int) -> dict[str, Any]:
        given = {"hidden_states": patches, "encoder_hidden_states": text, "pooled_projections": pooled, "timestep": times}
        ids = {"img_ids": places, "txt_ids": torch.zeros(512, 3, device=DEVICE)}
        return {**{name: values[i % 4] for name, values in given.items()}, **ids}

    return model, step, batch


def _wan(batch: int, length: int) -> tuple[nn.Module, Step, int]:
    """Two of the 30 layers of Wan 2.1 1.3B, on latents of ``length`` frames of 40 x 64."""
    from diffusers import WanTransformer3DModel

    with torch.device(DEVICE):
        model = WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=2)
    latents = torch.randn(4, batch, 16, length, 40, 64, device=DEVICE, dtype=torch.bfloat16)
    text = torch.randn(4, batch, 512, 4096, device=DEVICE, dtype=torch.bfloat16)
    times = torch.randint(0, 1000, (4, batch), device=DEVICE)

    def step(i: int) -> dict[str, Any]:
        return {"hidden_states": latents[i % 4], "encoder_hidden_states": text[i % 4], "timestep": times[i % 4]}

    return model, step, batch


def _timm(name: str, **changes: Any) -> Callable[[int, int], tuple[nn.Module, Step, int]]:
    def build(batch: int, length: int) -> tuple[nn.Module, Step, int]:
        import timm

        model = timm.create_model(name, **changes).to(DEVICE)
        images = torch.randn(4, batch, 3, length, length, device=DEVICE, dtype=torch.bfloat16)
        return model, lambda i: {"x": images[i % 4]}, batch

    return build


def _class_loss(out: Any, given: dict[str, Any]) -> Tensor:
    return F.cross_entropy(out.float(), torch.zeros(len(out), dtype=torch.long, device=out.device))


def _noise_loss(out: Any, given: dict[str, Any]) -> Tensor:
    return F.mse_loss(out.sample.float(), given["sample" if "sample" in given else "hidden_states"].float())


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
_COHERE2 = {  # 4 of the 32 layers of Command R7B: three with a window, one without a window and without RoPE
    "use_cache": False, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 256000, "sliding_window": 4096, "logit_scale": 0.25,
}  # fmt: skip
_EXAONE4 = {  # 1.2B
    "use_cache": False, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 102400, "max_position_embeddings": 65536, "sliding_window": None,
    "layer_types": ["full_attention"] * 30, "tie_word_embeddings": True,
}  # fmt: skip
_LFM2 = {  # 1.2B: 10 of its layers are short convolutions; the MLP's width is two thirds of that given here
    "use_cache": False, "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 65536, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip
_OLMOE = {  # 4 of the 16 layers of 1B-7B, each with 16 of its 64 experts
    "use_cache": False, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 16, "num_experts_per_tok": 8,
}  # fmt: skip
_QWEN3_MOE = {  # 2 of the 48 layers of 30B-A3B
    "use_cache": False, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
_LLAMA4 = {  # 1 of the 48 layers of Scout, with experts
    "use_cache": False, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 1, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
}  # fmt: skip
_MAMBA2 = {  # 4 of the 64 layers of 2.7B
    "use_cache": False, "hidden_size": 2560, "expand": 2, "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1,
    "chunk_size": 256, "num_hidden_layers": 4, "vocab_size": 50288,
}  # fmt: skip
_NEMOTRON_H = {  # 4 of the 52 layers of 8B: scans, MLPs and an attention
    "use_cache": False, "hidden_size": 4096, "intermediate_size": 21504,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "chunk_size": 128, "vocab_size": 131072,
}  # fmt: skip
_ALBERT = {  # base v2: 12 times the same layer
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30000,
}  # fmt: skip
_DEBERTA = {  # v3 base
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 128100,
    "relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False,
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
    "sd3": Family(_sd3, 4, 128, unit="images", loss_of=_noise_loss),
    "flux": Family(_flux, 2, 64, unit="images", loss_of=_noise_loss),
    "wan": Family(_wan, 1, 13, unit="clips", loss_of=_noise_loss),
    "resnet-evonorm": Family(_timm("resnetv2_50d_evos"), 128, 224, unit="images", loss_of=_class_loss),
    "cohere2": Family(_transformers("Cohere2ForCausalLM", "Cohere2Config", **_COHERE2), 1, 8192),
    "exaone4": Family(_transformers("Exaone4ForCausalLM", "Exaone4Config", **_EXAONE4), 4, 2048),
    "lfm2": Family(_transformers("Lfm2ForCausalLM", "Lfm2Config", **_LFM2), 8, 2048),
    "olmoe": Family(_transformers("OlmoeForCausalLM", "OlmoeConfig", **_OLMOE), 8, 2048),
    "qwen3-moe": Family(_transformers("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_QWEN3_MOE), 4, 2048),
    "llama4": Family(_transformers("Llama4ForCausalLM", "Llama4TextConfig", **_LLAMA4), 2, 2048),
    "mamba2": Family(_transformers("Mamba2ForCausalLM", "Mamba2Config", **_MAMBA2), 2, 2048),
    "nemotron-h": Family(_transformers("NemotronHForCausalLM", "NemotronHConfig", **_NEMOTRON_H), 2, 2048),
    "albert": Family(_transformers("AlbertForMaskedLM", "AlbertConfig", **_ALBERT), 128, 512),
    "deberta": Family(_transformers("DebertaV2ForMaskedLM", "DebertaV2Config", **_DEBERTA), 32, 512),
    "marian": Family(_marian, 256, 128),
    "whisper": Family(_whisper, 32, 448, unit="recordings"),
    "dinov2": Family(_dinov2, 64, 224, unit="images"),
    "swin": Family(_timm("swin_base_patch4_window7_224", drop_path_rate=0.0), 128, 224, unit="images", loss_of=_class_loss),
    "convnext": Family(_timm("convnext_base"), 64, 224, unit="images", loss_of=_class_loss),
}
OF_TIMM = ("vit-l", "resnet-evonorm", "swin", "convnext")  # these read values while they are built, and are small enough
