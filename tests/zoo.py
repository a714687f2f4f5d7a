"""Tiny random models of 16 families, and how many sites of each fusion they have (by counting their modules)."""

import torch

SMALL = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# class prefix: (changes to SMALL, sites expected as (norms, gated, rope, masks, grouped heads)). Norms are rms_norm and
# add_rms_norm together; a model that adds or scales in between has fewer of the latter.
FAMILIES = {
    "Llama": ({}, (5, 2, 2, 2, 2)),
    "Mistral": ({"sliding_window": None}, (5, 2, 2, 2, 2)),
    "Qwen2": ({}, (5, 2, 2, 2, 2)),
    "Qwen3": ({"head_dim": 8}, (9, 2, 2, 2, 2)),
    "Gemma": ({"head_dim": 8}, (5, 2, 2, 2, 2)),
    "Gemma2": ({"head_dim": 8, "sliding_window": 64}, (9, 2, 2, 0, 0)),
    "Gemma3": ({"head_dim": 8, "sliding_window": 64}, (13, 2, 2, 2, 2)),
    "Phi3": ({}, (5, 2, 2, 2, 2)),
    "Olmo2": ({}, (9, 2, 2, 2, 2)),
    "Mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, (5, 2, 2, 2, 2)),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_DROPOUT}, (0, 0, 0, 2, 0)),
    "Bert": ({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, (0, 0, 0, 0, 0)),
    "T5": ({"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}, (12, 4, 0, 2, 0)),
    "GPTNeoX": ({"rotary_pct": 0.5, **NO_DROPOUT}, (0, 0, 2, 2, 0)),
    "Granite": ({"logits_scaling": 8.0, "residual_multiplier": 0.5}, (5, 2, 2, 2, 2)),
    "Cohere": ({}, (0, 2, 2, 2, 2)),  # LayerNorm, written out
}  # fmt: skip
HEADS = {"Bert": "ForMaskedLM", "T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}


def build(family, dtype=torch.float32):
    import transformers

    changes, _ = FAMILIES[family]
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    settings = {
        k: v
        for k, v in SMALL.items()
        if family not in ("T5", "GPT2") or k in ("vocab_size", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    config = config_class(**{**settings, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{HEADS.get(family, 'ForCausalLM')}")(config)
    model.loss_type = {"Bert": "ForMaskedLM", "T5": None}.get(family, "ForCausalLM")
    return model.to(dtype).train()


def batch(seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
