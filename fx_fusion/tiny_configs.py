"""Tiny random models of any transformers class: the defaults of a config made small by what its fields are called."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]

# The first expression that is the whole name of a field says how large the field may be.
AT_MOST = {re.compile(names.replace(" ", "")): size for names, size in {
    r"\w*vocab_size\w* | \w*hash_byte_group_vocab | prompt_types | segment_types | indexer_budget": 128,
    r"n_group | num_expert_group | topk_group | moe_layer_start_index | first_k_dense_replace": 1,
    r"indexer_kv_heads | \w*_coefficient | num_sparse_(en|de)coder_layers | speech_encoder_left_chunk_num": 1,
    r"\w*(dense|shared)_(experts|layers) | num_(nextn|mtp)\w* | num_timestamp_\w* | num_cross_attention_heads": 1,
    r"(en|de)coder_sparse_step": 2,
    r"\w*experts_per_tok(en)? | (?!index)\w*top_?k(_experts)? | moe_k | \w*(kv|key_value)_heads | kv_n_heads": 2,
    r"depths | block_sizes | \w*num_blocks | \w*numb_of_layers | \w*block_repeats | n_attn_blocks": 2,
    r"\w*(num|n)_(local_|routed_)?experts | num_quantizers | num_codebooks | indexer_compress_ratio | depth": 4,
    r"mamba_(num|n)_heads | linear_num_value_heads | num_filters | \w*num_groups | upsample_groups": 8,
    r"\w*((num|n)_(\w+_)?|attention_)heads?(_per_layer)?": 4,
    r"(\w+_)?head_dim | d_kv | d_head | dim_head | \w*rotary_dim | mamba_d_head | attention_head_size": 8,
    # Attention that looks no further than this has to hide something of the sixteen tokens.
    r"(?!n_)\w*window(?!_layers)\w* | (mamba_|attention_|speech_encoder_)?chunk_size | context_size | block_size": 8,
    r"local_attention | local_radius | (lsh|local)_attn_chunk_length": 8,
    r"\w*(state_size|d_state)": 8,
    r"\w*_rank | num_latents | patch_size": 16,
    r"\w*(intermediate_size(_mlp)?|ffn\w*_(dim|size)|feed_forward_size) | d_ff | dff | dim_ff | d_inner | n_inner": 64,
    r"mlp_dim | \w*max_(\w+_)?(positions|position_embeddings|seq_len|pos_emb)": 64,
    r"n_positions | n_ctx | image_size | train_size": 64,
    r"(\w*_)?(hidden|model|emb|embed|embedding|projection|latent|lru)_(size|dim)(_\w+)? | d_model | n_embd | dim": 32,
    r"\w*proj_dim | codevector_dim | num_codevectors_per_group | conv_dim | tdnn_dim | d_latents": 32,
}.items()}  # fmt: skip
LAYERS = re.compile(r"(\w+_)?(num|n)_(\w+_)?layers?|(\w+_)?(en|de)coder_layers|num_blocks|num_self_attends_per_block")
LAYER_IDS = re.compile(r"(?!out_)\w*(layers|indexes|indices|idxs|layer_ids)")
RANDOM = re.compile(r"\w*(drop|jitter)\w*|mask_(time|feature)_prob")
TOKENS = {"pad": 0, "bos": 1, "decoder_start": 1, "eos": 2}
# Optional fields that the layers need all the same, and what they read though a config may never have said it.
FILLED = re.compile(
    r"vocab_size|head_dim|num_experts_per_tok|num_key_value_heads|n_(routed|shared)_experts|indexer_\w+|audio_token_id"
)
UNSAID = {"num_key_value_heads": 4, "rope_theta": 1e4}
SET = {"use_cache": False, "apply_spec_augment": False, "hash_seed": 1, "vae_std": 0.0, "clip_qkv": 8.0}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}  # for heads of eight
ALIKE = {"kv_lora_rank", "context_size"}
# What one field has to be for the sake of others: from the fields, small ones first, and from what they were.
RELATED: dict[str, Callable[[Fields, Fields], Any]] = {
    "hidden_sizes": lambda c, _: c.get("stage_out_channels") or _widths(c["hidden_sizes"]),
    "embed_dim": lambda c, was: _widths(was["embed_dim"]) if "depth" in was else max(16, 8 * c["num_heads"][0]),
    "stem_out_channels": lambda c, _: c["hidden_sizes"][0],
    "window_size": lambda c, was: _window(c, was["window_size"]),
    "hidden_dim": lambda c, _: int(1280 * c["width_coefficient"]),
    "qk_head_dim": lambda c, _: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
    "head_dim": lambda c, was: c["qk_rope_head_dim"]
    + (was["head_dim"] is not None and was["head_dim"] > was["qk_rope_head_dim"] and c["qk_nope_head_dim"]),
    # Attention to latents or in blocks has as many keys as queries, and so have two stacks that share a config.
    "num_key_value_heads": lambda c, _: c["num_attention_heads" if ALIKE & c.keys() else "num_key_value_heads"],
    "encoder_num_key_value_heads": lambda c, _: c["encoder_num_attention_heads"],
    "decoder_num_key_value_heads": lambda c, _: c["decoder_num_attention_heads"],
    "attention_hidden_size": lambda c, was: c["hidden_size"] * was["attention_hidden_size"] // was["hidden_size"],
    "attention_head_dim": lambda c, _: c["attention_hidden_size"] // c["num_attention_heads"],
    "num_heads": lambda c, _: c["hidden_size"] * c["expand"] // c["head_dim"],  # state-space heads fill the layer
    "mamba_d_ssm": lambda c, _: c["mamba_n_heads"] * c["mamba_d_head"],
    "num_kv_shared_layers": lambda c, was: was["num_kv_shared_layers"] and c["num_hidden_layers"] // 2,
    "attention_types": lambda c, _: [[c["attention_types"][0][0], c["num_layers"] // 2]],
    "layer_types": lambda c, _: _with_the_other_kind(c, c["layer_types"]),
    "attn_layer_indices": lambda c, _: [c["num_hidden_layers"] - 1],
    "attn_layer_offset": lambda *_: 1,
    "attn_layer_period": lambda *_: 2,
    "block_types": lambda c, _: _distinct(c["block_types"]),
    "rope_parameters": lambda c, _: c["rope_parameters"] or {kind: dict(ROPE) for kind in c["layer_types"]},
    "axial_pos_shape": lambda *_: (4, 4),  # as long as the inputs
    "axial_pos_embds_dim": lambda c, _: (c["hidden_size"] // 2,) * 2,
    "default_language": lambda c, _: c["languages"][0],
    "adaptor_config": lambda c, _: _with(c["adaptor_config"], intermediate_size=c["text_config"].hidden_size // 4),
}  # fmt: skip


def shrunk(config_class: type, kind: str = "") -> Any:
    """A config of this class with small sizes and nothing random, nested configs included."""
    return shrunk_from(config_class(), kind == "causal")


def shrunk_from(default: Any, causal: bool = False) -> Any:
    """The same for what this config says; ``causal`` where a model that encodes is to decode."""
    was, plain = _fields(default), _fields(type(default)())
    made = {n: v for n, v in was.items() if not hasattr(v, "to_dict") and v != plain[n]}  # a parent's own wishes
    lists = {n: v for n, v in was.items() if isinstance(v, (list, tuple)) and v}
    many = getattr(default, "num_hidden_layers", None)
    counted = any(LAYERS.fullmatch(name) for name in was)
    # A layer of each kind, at least two, and twice as many where later ones share with earlier ones of their kind.
    kinds = {n: _distinct(v) for n, v in lists.items() if len(v) == many and (counted or isinstance(v[0], str))}
    layers = max([2, *(len(v) for v in kinds.values() if isinstance(v[0], str))])
    if was.get("num_kv_shared_layers") or any("hybrid" in v for v in kinds.values()):
        layers *= 2
    other = itertools.count(100)
    for name, now in was.items():
        size = _size(name)
        if hasattr(now, "to_dict"):
            made[name] = shrunk_from(now)
        elif name.endswith(("_token_id", "_token_index")):
            if now is not None or FILLED.fullmatch(name):
                token = next((i for start, i in TOKENS.items() if name.startswith(start)), None)
                made[name] = next(other) if token is None else token
        elif name in kinds:
            made[name] = _least((kinds[name] * layers)[:layers], size)
        elif name in lists and LAYER_IDS.fullmatch(name) and size is None and type(now[0]) is int:
            made[name] = [layers - 1]
        elif name in lists and name.endswith("heads"):
            made[name] = now  # those of stages, whose widths go with them
        elif RANDOM.fullmatch(name):
            made[name] = _least(now, 0)
        elif LAYERS.fullmatch(name) and size is None:
            made[name] = _least(now, layers)
        elif size is not None:
            made[name] = size if now is None and FILLED.fullmatch(name) else _least(now, size)
        elif isinstance(now, dict):
            made[name] = _section(now)
    made |= {name: value for name, value in SET.items() if name in was}
    made |= {name: value for name, value in UNSAID.items() if not hasattr(default, name)}
    if "rope_parameters" in was:
        made.pop("rope_theta", None)
    made["pad_token_id"] = made.get("pad_token_id") or 0
    if was.get("is_encoder_decoder") or "decoder_start_token_id" in was:
        made["decoder_start_token_id"] = TOKENS["decoder_start"]
    if causal and "is_decoder" in was:
        made["is_decoder"] = True
    made |= _related(was | made, was, was)
    if overrides := default.to_dict().get("per_layer_config"):
        before, made["per_layer_config"] = list(was["layer_types"]), {}
        for layer, kind in enumerate(made["layer_types"]):
            own = {int(n): v for n, v in overrides.items()}.get(before.index(kind), {})  # of the first of its kind
            small = {n: _least(v, _size(n)) for n, v in own.items()}
            made["per_layer_config"][layer] = small | _related(was | made | small, was | own, own)
    try:
        return type(default)(**made)
    except Exception:  # fewer keys than queries are not for every class
        if not {"num_key_value_heads", "num_attention_heads"} <= made.keys():
            raise
        return type(default)(**made | {"num_key_value_heads": made["num_attention_heads"]})


def _fields(config: Any) -> Fields:
    """Return what the class takes: what it derives from that is no field."""
    config.allow_global_per_layer_attribute_access = True
    names = [field.name for field in dataclasses.fields(config)]
    kinds = {name: getattr(type(config), name, None) for name in names}
    derived = {name for name, kind in kinds.items() if isinstance(kind, property) and kind.fset is None}
    return {name: getattr(config, name) for name in names if name not in derived}


def _size(name: str) -> int | None:
    return next((size for pattern, size in AT_MOST.items() if pattern.fullmatch(name)), None)


def _related(now: Fields, was: Fields, names: Fields) -> Fields:
    found: Fields = {}
    for name, rule in RELATED.items():
        if name in names:
            try:
                found[name] = rule(now | found, was)
            except (KeyError, TypeError):  # the fields are those of another family
                continue
    return found


def _window(now: Fields, was: int) -> int:
    """Return a window of images, less than the last stage has; as it was where a sound is cut by it or one level of an image
    is."""
    if "depths" in now:
        return 2
    return was if {"downsample_rate", "image_size"} & now.keys() else now["window_size"]


def _with_the_other_kind(now: Fields, kinds: list[str] | None) -> list[str] | None:
    """The kinds of layers, and where the defaults are of one kind, the other that a class of this family is made for."""
    if "conv_L_cache" in now and "conv" not in (kinds or ()):
        return ["conv", "full_attention"]
    if set(kinds or ()) == {"linear_attention"} and "mamba_n_heads" in now:
        return ["linear_attention", "full_attention"]
    if set(kinds or ()) == {"full_attention"} and now.get("sliding_window") and not now.get("use_bidirectional_attention"):
        return ["full_attention", "sliding_attention"]
    return kinds


def _distinct(values: Any) -> list[Any]:
    return [v for i, v in enumerate(values) if v not in values[:i]]


def _least(now: Any, size: float | None) -> Any:
    if isinstance(now, (list, tuple)):
        return type(now)(_least(v, size) for v in now)
    number = isinstance(now, (int, float)) and not isinstance(now, bool)
    return type(now)(min(now, size)) if number and size is not None else now


def _section(rope: Fields) -> Fields:
    small = {"partial_rotary_factor": 0.5, "mrope_section": ROPE["mrope_section"]}
    return {k: _section(v) if isinstance(v, dict) else small.get(k, v) for k, v in rope.items()}


def _widths(stages: Any) -> list[int]:
    """Widths in the same proportions, their common factor at most 32."""
    unit = math.gcd(*stages)
    return [width // unit * min(unit, 32) for width in stages]


def _with(config: Any, **changes: Any) -> Any:
    config.update(changes)
    return config


def find(config: Any, *names: str) -> Any:
    """The first of these fields that this config or one within it has."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    inner = (v for v in vars(config).values() if hasattr(v, "to_dict"))
    return next((value for c in inner if (value := find(c, *names)) is not None), None)
