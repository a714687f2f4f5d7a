"""Tiny random models of any transformers class: the defaults of its config, made small by what the fields are called."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

Inputs = dict[str, torch.Tensor]
Fields = dict[str, Any]

# The first expression that is the whole name of a field says how large the field may be.
AT_MOST = {re.compile(names.replace(" ", "")): size for names, size in {
    r"\w*vocab_size\w* | \w*hash_byte_group_vocab | prompt_types | segment_types | indexer_budget": 128,
    r"n_group | num_expert_group | topk_group | moe_layer_start_index | first_k_dense_replace | indexer_kv_heads | \w*_coefficient": 1,
    r"\w*(dense|shared)_(experts|layers) | num_(nextn|mtp)\w* | num_timestamp_\w* | num_cross_attention_heads": 1,
    r"\w*experts_per_tok(en)? | \w*top_?k(_experts)? | moe_k | \w*(kv|key_value)_heads | kv_n_heads": 2,
    r"depths | block_sizes | \w*num_blocks | \w*numb_of_layers | \w*block_repeats | n_attn_blocks": 2,
    r"\w*(num|n)_(local_|routed_)?experts | num_quantizers | num_codebooks | indexer_compress_ratio | depth": 4,
    r"mamba_(num|n)_heads | linear_num_value_heads | num_filters | \w*num_groups | upsample_groups": 8,
    r"\w*((num|n)_(\w+_)?|attention_)heads?(_per_layer)?": 4,
    r"(\w+_)?head_dim | d_kv | d_head | dim_head | \w*rotary_dim | mamba_d_head | attention_head_size": 8,
    r"\w*(state_size|d_state) | (mamba_|attention_)?chunk_size | context_size": 8,
    r"\w*_rank | num_latents | patch_size": 16,
    r"\w*(intermediate_size(_mlp)?|ffn\w*_(dim|size)|feed_forward_size) | d_ff | dff | dim_ff | d_inner | n_inner": 64,
    r"mlp_dim | \w*max_(\w+_)?(positions|position_embeddings|seq_len|pos_emb) | n_positions | n_ctx | (?!n_)\w*window\w*": 64,
    r"image_size | train_size | \w*entity_vocab_size": 64,
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
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_ALIKE = {"kv_lora_rank", "context_size"}
# What one field has to be for the sake of others: from the fields, small ones first, and from what they were.
RELATED: dict[str, Callable[[Fields, Fields], Any]] = {
    "hidden_sizes": lambda c, _: c.get("stage_out_channels") or _widths(c["hidden_sizes"]),
    "embed_dim": lambda c, was: _widths(was["embed_dim"]) if "depth" in was else max(16, 8 * c["num_heads"][0]),
    "stem_out_channels": lambda c, _: c["hidden_sizes"][0],
    "window_size": lambda c, _: c["depths"] and 2,  # less than the last stage has
    "hidden_dim": lambda c, _: int(1280 * c["width_coefficient"]),
    "qk_head_dim": lambda c, _: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
    "head_dim": lambda c, was: c["qk_rope_head_dim"]
    + (was["head_dim"] is not None and was["head_dim"] > was["qk_rope_head_dim"] and c["qk_nope_head_dim"]),
    # Attention to latents or in blocks has as many keys as queries, and so have two stacks that share a config.
    "num_key_value_heads": lambda c, _: c["num_attention_heads" if _ALIKE & c.keys() else "num_key_value_heads"],
    "encoder_num_key_value_heads": lambda c, _: c["encoder_num_attention_heads"],
    "decoder_num_key_value_heads": lambda c, _: c["decoder_num_attention_heads"],
    "attention_hidden_size": lambda c, was: c["hidden_size"] * was["attention_hidden_size"] // was["hidden_size"],
    "attention_head_dim": lambda c, _: c["attention_hidden_size"] // c["num_attention_heads"],
    "num_heads": lambda c, _: c["hidden_size"] * c["expand"] // c["head_dim"],  # state-space heads fill the layer
    "mamba_d_ssm": lambda c, _: c["mamba_n_heads"] * c["mamba_d_head"],
    "num_kv_shared_layers": lambda c, was: was["num_kv_shared_layers"] and c["num_hidden_layers"] // 2,
    "attention_types": lambda c, _: [[c["attention_types"][0][0], c["num_layers"] // 2]],
    "layer_types": lambda c, _: c["layer_types"] or (["conv", "full_attention"] if "conv_L_cache" in c else None),
    "rope_parameters": lambda c, _: c["rope_parameters"] or {kind: dict(ROPE) for kind in c["layer_types"]},
    "axial_pos_shape": lambda *_: (4, 4),  # as long as the inputs
    "axial_pos_embds_dim": lambda c, _: (c["hidden_size"] // 2,) * 2,
    "default_language": lambda c, _: c["languages"][0],
    "adaptor_config": lambda c, _: _with(c["adaptor_config"], intermediate_size=c["text_config"].hidden_size // 4),
}  # fmt: skip


def shrunk(config_class: type, kind: str = "") -> Any:
    """A config of this class with small sizes and nothing random, nested configs included."""
    return _shrunk(config_class(), kind == "causal")


def _shrunk(default: Any, causal: bool = False) -> Any:
    default.allow_global_per_layer_attribute_access = True
    names = [f.name for f in dataclasses.fields(default)]  # what the class derives from its fields is no field
    was = {name: getattr(default, name) for name in names}
    plain = type(default)()
    plain.allow_global_per_layer_attribute_access = True
    made = {n: v for n, v in was.items() if not hasattr(v, "to_dict") and v != getattr(plain, n, None)}
    before = getattr(default, "num_hidden_layers", None)
    per_layer = {n: _distinct(v) for n, v in was.items() if isinstance(v, (list, tuple)) and len(v) == before}
    layers = max([2, *(len(v) for v in per_layer.values() if isinstance(v[0], str))])
    if was.get("num_kv_shared_layers") or any("hybrid" in kinds for kinds in per_layer.values()):
        layers *= 2  # what later layers share with earlier ones of their kind
    other = 100
    for name, now in was.items():
        size = _size(name)
        if hasattr(now, "to_dict"):
            made[name] = _shrunk(now)
        elif name.endswith(("_token_id", "_token_index")) and (now is not None or FILLED.fullmatch(name)):
            made[name] = next((i for kind, i in TOKENS.items() if name.startswith(kind)), other)
            other += made[name] == other
        elif name in per_layer and (isinstance(now[0], str) or any(LAYERS.fullmatch(n) for n in was)):
            made[name] = _least((per_layer[name] * layers)[:layers], size)
        elif LAYER_IDS.fullmatch(name) and size is None and isinstance(now, (list, tuple)) and now and type(now[0]) is int:
            made[name] = [layers - 1]
        elif isinstance(now, (list, tuple)) and name.endswith("heads"):
            made[name] = now  # of stages, whose widths go with them
        elif RANDOM.fullmatch(name):
            made[name] = _least(now, 0.0)
        elif LAYERS.fullmatch(name) and size is None:
            made[name] = _least(now, layers)
        elif size is not None:
            made[name] = size if now is None and FILLED.fullmatch(name) else _least(now, size)
        elif isinstance(now, dict):
            made[name] = _section(now)
    made |= {name: value for name, value in SET.items() if name in was}
    for name, value in UNSAID.items():
        if not hasattr(default, name) and (name != "rope_theta" or "rope_parameters" not in was):
            made[name] = value
    made["pad_token_id"] = made.get("pad_token_id") or 0
    if was.get("is_encoder_decoder") or "decoder_start_token_id" in was:
        made["decoder_start_token_id"] = 1
    if causal and "is_decoder" in was:
        made["is_decoder"] = True
    made |= _related(was | made, was, names)
    if overrides := default.to_dict().get("per_layer_config"):
        kinds, made["per_layer_config"] = list(was["layer_types"]), {}
        for i, kind in enumerate(made["layer_types"]):
            own = {int(k): v for k, v in overrides.items()}.get(kinds.index(kind), {})
            small = {n: _least(v, _size(n)) for n, v in own.items()}
            made["per_layer_config"][i] = small | _related(was | made | small, was | own, own)
    try:
        return type(default)(**made)
    except Exception:  # fewer keys than queries are not for every class
        if "num_key_value_heads" not in made or "num_attention_heads" not in made:
            raise
        return type(default)(**made | {"num_key_value_heads": made["num_attention_heads"]})


def _size(name: str) -> int | None:
    return next((size for pattern, size in AT_MOST.items() if pattern.fullmatch(name)), None)


def _related(now: Fields, was: Fields, names: Any) -> Fields:
    found: Fields = {}
    for name, rule in RELATED.items():
        if name in names:
            try:
                found[name] = rule(now | found, was)
            except (KeyError, TypeError):  # the fields are those of another family
                continue
    return found


def _distinct(values: Any) -> list[Any]:
    return [v for i, v in enumerate(values) if v not in values[:i]]


def _least(now: Any, size: float | None) -> Any:
    if isinstance(now, (list, tuple)):
        return type(now)(_least(v, size) for v in now)
    number = isinstance(now, (int, float)) and not isinstance(now, bool)
    return type(now)(min(now, size)) if number and size is not None else now


def _section(rope: Fields) -> Fields:
    """What is said about rotary embeddings, for heads of eight."""
    small = {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return {k: _section(v) if isinstance(v, dict) else small.get(k, v) for k, v in rope.items()}


def _widths(stages: Any) -> list[int]:
    """Widths in the same proportions, their common factor at most 32."""
    unit = math.gcd(*stages)
    return [width // unit * min(unit, 32) for width in stages]


def _with(config: Any, **changes: Any) -> Any:
    config.update(changes)
    return config


class _Draw:
    """Tokens of the vocabulary and noise, the same each time."""

    def __init__(self, config: Any) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.vocab = min(100, _find(config, "vocab_size") or 100)  # special tokens come after

    def tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(3, self.vocab, shape, generator=self.generator)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def inputs_of(model: torch.nn.Module, kind: str) -> Inputs:
    """The first of the forms below from which the model makes a loss."""
    failed = []
    with torch.random.fork_rng(), torch.no_grad():
        for inputs in _forms(model, kind):
            try:
                if model(**inputs).loss.isfinite():
                    return inputs
            except Exception as error:
                failed.append(f"{[f'{n} {tuple(v.shape)}' for n, v in inputs.items()]} {type(error).__name__}: {error}")
    raise ValueError("\n".join(text[:250] for text in ("no form of inputs gives a finite loss", *failed)))


def _forms(model: torch.nn.Module, kind: str) -> Iterator[Inputs]:
    config, takes, draw = model.config, inspect.signature(model.forward).parameters, _Draw(model.config)
    if kind == "image":
        yield from _of_images(config, takes, draw)
    elif kind == "speech" or {"input_features", "input_values"} & set(takes):
        yield from _of_sounds(model, takes, draw)
    ids, books = draw.tokens(2, 16), _find(config, "num_codebooks") or 1
    if "pixel_values" in takes and "input_ids" in takes and not _find(config, "image_token_id", "image_token_index"):
        images = next(_of_images(config, takes, draw))
        yield {**images, "input_ids": ids, "labels": ids}  # a prefix of the text
    if "inputs" in takes and kind != "image":
        ids = draw.tokens(2, config.max_position_embeddings)
        yield {"inputs": ids, "labels": ids}
    if "input_ids" in takes and kind != "image":
        yield {"input_ids": ids, "labels": ids}
        # A token for each of the code books: in the batch, after a text token, or from the decoder.
        yield {"input_ids": draw.tokens(2 * books, 16), "labels": draw.tokens(2, 16, books)}
        yield {"input_ids": draw.tokens(2, 16, books + 1), "labels": ids}
        books = _find(config, "num_channels") or books
        codes = draw.tokens(2, 16, books)
        labels = codes.transpose(1, 2).reshape(2 * books, 16)
        yield {"input_ids": ids, "decoder_input_ids": codes, "labels": labels}


def _of_images(config: Any, takes: Any, draw: _Draw) -> Iterator[Inputs]:
    """Patches, pixels or the tokens that stand for them, with classes."""
    size = _find(config, "image_size", "train_size") or 64
    size = (size, size) if isinstance(size, int) else size
    channels, classes = _find(config, "num_channels", "stem_num_channels") or 3, torch.tensor([0, 1])
    if "spatial_shapes" in takes:
        patches = draw.noise(2, 16, channels * _find(config, "patch_size") ** 2)
        mask, shapes = torch.ones(2, 16, dtype=torch.long), torch.full((2, 2), 4)
        yield {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes, "labels": classes}
    for name in ("pixel_values", "inputs"):
        if name in takes:
            yield {name: draw.noise(2, channels, *size), "labels": classes}
    if "input_ids" in takes:
        yield {"input_ids": draw.tokens(2, 16), "labels": classes}


def _of_sounds(model: torch.nn.Module, takes: Any, draw: _Draw) -> Iterator[Inputs]:
    """Frames of a spectrogram either way round or a waveform, with classes, a text to make or a text around them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES as CLASSIFY

    config = model.config
    bins = _find(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", "d_model")
    stack = _find(config, "num_stacked_frames") or 4
    most = _find(config, "max_length") or 2 * (_find(config, "max_source_positions") or 64)
    sounds = [(draw.noise(2, *shape), 6400) for shape in ((6400,), (1, 6400))]
    for frames in (most, 100, 60):
        for shape in ((bins, frames), (frames, bins), (frames, bins * stack)) if bins else ():
            sounds.append((draw.noise(2, *shape), frames))
    for name in ("input_features", "input_values"):
        for sound, length in sounds if name in takes else ():
            masks = [n for n in takes if re.fullmatch(r"(input_)?features?_(attention_)?mask|padding_mask", n)]
            if "input_ids" not in takes:
                labels = torch.tensor([0, 1]) if type(model).__name__ in CLASSIFY.values() else draw.tokens(2, 6)
                yield {name: sound, "labels": labels}
                if "attention_mask" in takes:
                    yield {name: sound, "labels": labels, "attention_mask": torch.ones(2, length, dtype=torch.long)}
                continue
            for masked in (masks, []) if masks else ([],):
                inputs = {name: sound, **{n: torch.ones(2, length, dtype=torch.long) for n in masked}}
                for ids in _around(model, inputs, length, draw):
                    yield {**inputs, "input_ids": ids, "labels": ids}


def _around(model: torch.nn.Module, inputs: Inputs, length: int, draw: _Draw) -> Iterator[torch.Tensor]:
    """Texts with a place for each of the frames that the model makes of a sound, or as long where it adds the two."""
    counts = [length // 4, 1]
    try:
        found = model.get_audio_features(**inputs)
        found = getattr(found, "pooler_output", found)
        counts = [sum(f.numel() for f in found) // 2 // model.config.get_text_config().hidden_size]
    except Exception:  # not the form that it takes, or it wants the text as well
        pass
    for count in counts:
        place = _find(model.config, "audio_token_id", "audio_token_index")
        yield draw.tokens(2, count) if place is None else torch.cat([torch.full((2, count), place), draw.tokens(2, 8)], 1)


def _find(config: Any, *names: str) -> Any:
    """The first of these fields that this config or one within it has."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    inner = (v for v in vars(config).values() if hasattr(v, "to_dict"))
    return next((value for c in inner if (value := _find(c, *names)) is not None), None)
