"""Inputs of any transformers class with which it makes a loss: forms that are tried in turn."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from fx_fusion.tiny_configs import find

Inputs = dict[str, torch.Tensor]


class _Draw:
    """Tokens of the vocabulary and noise in the dtype of the model, the same each time."""

    def __init__(self, model: Any) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(1), model.dtype
        self.vocab = min(100, find(model.config, "vocab_size") or 100)  # special tokens come after

    def tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(3, self.vocab, shape, generator=self.generator)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)


def inputs_of(model: torch.nn.Module, kind: str) -> Inputs:
    """The first of the forms below from which the model makes a loss."""
    failed = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for inputs in _forms(model, kind):
            try:
                if model(**inputs).loss.isfinite():
                    return inputs
            except Exception as error:
                shapes = {name: list(value.shape) for name, value in inputs.items()}
                failed.append(f"{shapes} {type(error).__name__}: {error}"[:250])
    raise ValueError("\n".join(("no form of inputs gives a finite loss", *failed)))


def _forms(model: torch.nn.Module, kind: str) -> Iterator[Inputs]:
    config, takes, draw = model.config, inspect.signature(model.forward).parameters, _Draw(model)
    if kind == "image":
        yield from _of_images(config, takes, draw)
    elif kind == "speech" or {"input_features", "input_values"} & set(takes):
        yield from _of_sounds(model, takes, draw)
    ids, books = draw.tokens(2, 16), find(config, "num_codebooks") or 1
    if "pixel_values" in takes and "input_ids" in takes and not find(config, "image_token_id", "image_token_index"):
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
        books = find(config, "num_channels") or books
        codes = draw.tokens(2, 16, books)
        labels = codes.transpose(1, 2).reshape(2 * books, 16)
        yield {"input_ids": ids, "decoder_input_ids": codes, "labels": labels}


def _of_images(config: Any, takes: Any, draw: _Draw) -> Iterator[Inputs]:
    """Patches, pixels or the tokens that stand for them, with classes."""
    size = find(config, "image_size", "train_size") or 64
    size = (size, size) if isinstance(size, int) else size
    channels, classes = find(config, "num_channels", "stem_num_channels") or 3, torch.tensor([0, 1])
    if "spatial_shapes" in takes:
        patches = draw.noise(2, 16, channels * find(config, "patch_size") ** 2)
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
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", "d_model")
    bins = find(config, *names)
    stack = find(config, "num_stacked_frames") or 4
    most = find(config, "max_length") or 2 * (find(config, "max_source_positions") or 64)
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
    place = find(model.config, "audio_token_id", "audio_token_index")
    for count in counts:
        places = draw.tokens(2, count) if place is None else torch.full((2, count), place)
        yield places if place is None else torch.cat([places, draw.tokens(2, 8)], 1)
