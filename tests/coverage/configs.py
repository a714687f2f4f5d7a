"""Tiny random models of any transformers class: the defaults of its config, made small by what the fields are called."""

from __future__ import annotations

from typing import Any

import torch

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "audio_vocab_size"), 128),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "word_embed_proj_dim", "embedding_dim", "model_dim", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "shared_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp", "ffn_hidden_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "sliding_window", "window_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "moe_layer_start_index", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_n_heads", "linear_num_value_heads"), 8), **dict.fromkeys(("mamba_d_head", "state_size", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim", "ssm_state_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8), **dict.fromkeys(("linear_num_key_heads",), 4),
    **dict.fromkeys(("image_size",), 32), **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("pad_token_id",), 0), **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1), **dict.fromkeys(("eos_token_id",), 2),
    "use_cache": False, "rotary_dim": 8, "type_vocab_size": 2,
}  # fmt: skip


def shrunk(config_class: type, depth: int = 0) -> Any:
    """A config of this class with small sizes and no dropout, nested configs included."""
    default = config_class()
    given = default.to_dict()
    changes = {
        name: SMALL[name]
        for name, now in given.items()
        if name in SMALL
        and isinstance(now, (int, type(None)))
        and not (now is None and name not in ("pad_token_id", "head_dim"))
    }
    changes.update({name: 0.0 for name, now in given.items() if isinstance(now, float) and _is_dropout(name)})
    for name, now in vars(default).items():
        if hasattr(now, "to_dict") and depth < 2:
            changes[name] = shrunk(type(now), depth + 1).to_dict()
    if "kv_lora_rank" in changes:  # latent attention has as many keys as queries
        changes["num_key_value_heads"] = SMALL["num_attention_heads"]
    if "expand" in given and "num_heads" in given and "head_dim" in given:  # heads of a state-space layer fill it
        changes["num_heads"] = SMALL["hidden_size"] * given["expand"] // SMALL["head_dim"]
    layers = next((changes[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in changes), 2)
    if isinstance(given.get("layer_types"), list):
        kinds = list(dict.fromkeys(given["layer_types"]))
        changes["layer_types"] = (kinds * layers)[:layers]
    return config_class(**changes)


def _is_dropout(name: str) -> bool:
    return any(part in name for part in ("dropout", "drop_path", "layerdrop", "pdrop"))


def inputs_of(model: torch.nn.Module, kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 100, (2, 16), generator=generator)
    if kind == "image":
        config = model.config
        size, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
        size = size if isinstance(size, int) else size[0]
        images = torch.randn(2, channels, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 1])}
    return {"input_ids": ids, "labels": ids}
