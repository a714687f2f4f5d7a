"""Models of transformers with random weights, and what they are called with: by a type of model, or by a config."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fx_fusion.errors import TargetError, nearest
from fx_fusion.tiny_configs import find, shrunk_from
from fx_fusion.torch_internals.fakes import FakeTensorMode

# The first of transformers' lists that has a type of model says which class is taken for it.
_LISTS = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_MAPPING_NAMES",
)  # fmt: skip
_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "depths",
)  # fmt: skip
_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types")
# Embeddings by the last part of their path. A distance between tokens has its own rows, and far ones share one.
_OF_POSITIONS = re.compile(r"(?:^|\.)\w*(?:position|pos_emb|wpe)\w*$")
_DISTANCES = re.compile(r"relative|distance")
_ON_THE_HUB = re.compile(r"\w[\w.-]*/[\w.-]*\w")
_SECOND = 16000  # samples of a waveform


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its inputs.

    Attributes:
        batch: rows; None for 4, or 1 for a model of text with memory, or a tiny one.
        length: tokens in a row, of a model of text; None for 2048, 512 with memory, or as many as it has positions.
        layers: at most so many; None for all.
        tiny: small widths too.
        mask: what a model of text is given beside its tokens: ``none``, ``ones``, ``padded`` or ``packed``.
    """

    batch: int | None
    length: int | None
    layers: int | None
    tiny: bool
    mask: str = "none"

    def of(self, model: Any, *, memory: bool) -> Sizes:
        """Return these sizes with numbers for a model. Raises TargetError where it has fewer positions than tokens."""
        length = self.length or min(512 if memory else 2048, _positions(model))
        _check_length(model, length)
        runs = memory and (self.tiny or model.main_input_name == "input_ids")
        return replace(self, batch=self.batch or (1 if runs else 4), length=length)


_DOCUMENTS = 4  # of a row that is packed


def config_of(name: str, *, download: bool = False) -> tuple[Any, type]:
    """Return the config and the class of a type of model (``llama``), a ``config.json`` or its folder, or a model of the
    Hub whose config is in the local cache, or may be downloaded. A file's ``architectures`` name the class; else the type
    does: one with a loss, if there is one. Raises TargetError."""
    import transformers

    given: dict[str, Any] = {}
    if not Path(name).exists() and _ON_THE_HUB.fullmatch(name):
        given = _of_the_hub(name, download)
    if Path(name).exists():
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TargetError(f"{path} can't be read as a config: {error}") from error
    kind = given.pop("model_type", "" if given else name)
    classes = _classes()
    if "/" in name and not given and not Path(name).exists():
        raise TargetError(f"there is no file or folder {name!r}: name a config.json or its folder, or a type, as llama")
    if kind not in classes:
        raise TargetError(f"{kind!r} is no type of model that transformers has. {nearest(kind, sorted(classes))[:400]}")
    named = [c for c in given.get("architectures") or () if hasattr(transformers, c)]
    config = transformers.AutoConfig.for_model(kind, **given)
    made_by = getattr(transformers, named[0] if named else classes[kind])
    if made_by.config_class is not None and not isinstance(config, made_by.config_class):
        part = config.get_text_config(decoder=True)  # a causal model of a type that reads images or sounds too
        config = part if isinstance(part, made_by.config_class) else config
    return config, made_by


def _of_the_hub(name: str, download: bool) -> dict[str, Any]:
    """Return the config of a model of the Hub as its file has it."""
    import transformers

    try:
        return transformers.PreTrainedConfig.get_config_dict(name, local_files_only=not download)[0]
    except (OSError, ValueError) as error:
        how = "it could not be downloaded" if download else "its config is not in the local cache; --download fetches it"
        said = " ".join(str(error).split())[:120]
        raise TargetError(f"{name!r} is no folder here, and {how}: name a type of model, as llama, or a local folder with "
                          f"the model's config.json ({said})") from error  # fmt: skip


def _classes() -> dict[str, str]:
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for name in _LISTS:
        for kind, made_by in getattr(modeling_auto, name, {}).items():
            found.setdefault(kind, made_by if isinstance(made_by, str) else made_by[0])
    return found


def built(
    config: Any, made_by: Any, sizes: Sizes, device: str, dtype: torch.dtype, fake: bool
) -> tuple[Any, dict[str, Any], Any]:  # fmt: skip
    """A model without dropout, what it is called with, and the mode in which both have no memory: with ``fake``, where the
    class can be built so; None where they have. Raises TargetError."""
    try:
        config = shrunk_from(config) if sizes.tiny else config
        _prepare(config, sizes.layers)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        how = "--tiny" if sizes.tiny else "--layers"
        raise TargetError(f"{made_by.__name__}'s config can't be made smaller ({how}): {reason}") from error
    # Some models read values while they are built.
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), None) if fake else (None,):
        known = torch.get_default_dtype()
        try:
            with mode or contextlib.nullcontext(), torch.device(device):
                torch.set_default_dtype(dtype)
                model = made_by(config).train()
                return model, _inputs(model, sizes.of(model, memory=mode is None)), mode
        except TargetError:
            raise
        except Exception as error:
            if mode is None:
                raise TargetError(f"{made_by.__name__} can't be built: {type(error).__name__}: {error}") from error
        finally:
            torch.set_default_dtype(known)
    raise AssertionError("one of the two returns or raises")


def _check_length(model: Any, length: int) -> None:
    """Raise TargetError where a model of text has no position of its own for each token."""
    if length > (most := _positions(model)):
        raise TargetError(f"--length: must be at most {most} for {type(model).__name__}, which has so many positions "
                          f"(max_position_embeddings or n_positions of its config); got {length}")  # fmt: skip


def _positions(model: Any) -> Any:
    """Return how many positions a model of text has in a table, infinity for others: angles (RoPE) go on without end.
    Tensors without memory would not tell."""
    if model.main_input_name != "input_ids":
        return math.inf
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and _OF_POSITIONS.search(name) and not _DISTANCES.search(name)
    ]
    # RoBERTa's tokens are counted from the padding's row on.
    rows = [table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables]
    rows += [table.shape[0] for name, table in model.named_buffers() if name.endswith("embed_positions")]  # GPT-J's angles
    return min([*rows, find(model.config, "max_position_embeddings", "n_positions") or math.inf]) if rows else math.inf


def _prepare(config: Any, layers: int | None) -> None:
    """No cache, no dropout, at most so many layers; in configs within this one too."""
    for inner in _configs(config):
        for attribute in _LAYERS if layers is not None else ():
            count = getattr(inner, attribute, None)
            if isinstance(count, (int, list, tuple)) and not isinstance(count, bool):
                setattr(inner, attribute, _at_most(count, layers))
        for attribute in _KINDS_OF_LAYERS if layers is not None else ():
            derived = isinstance(getattr(type(inner), attribute, None), property)
            if getattr(inner, attribute, None) and not derived:
                setattr(inner, attribute, getattr(inner, attribute)[:layers])
        for attribute in (a for a in vars(inner) if re.search("drop", a) and isinstance(getattr(inner, a), float)):
            setattr(inner, attribute, 0.0)
        inner.use_cache = inner.apply_spec_augment = False  # the latter masks parts of a sound at random
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for inner in list(vars(config).values()):
        if hasattr(inner, "to_dict"):
            yield from _configs(inner)


def _at_most(count: Any, most: int | None) -> Any:
    return type(count)(_at_most(n, most) for n in count) if isinstance(count, (list, tuple)) else min(count, most or count)


def _inputs(model: Any, sizes: Sizes) -> dict[str, Any]:
    """Return what the forward of a model takes, by what its class calls its main input, with labels where it takes any."""
    config, takes = model.config, inspect.signature(model.forward).parameters
    main, tokens = model.main_input_name, find(config, "vocab_size") or 2
    assert sizes.batch is not None
    assert sizes.length is not None
    ids = torch.arange(sizes.batch * sizes.length).view(sizes.batch, sizes.length) % min(1000, tokens)
    classes = torch.arange(sizes.batch) % max(1, getattr(config, "num_labels", 1))
    if main in ("pixel_values", "input_features", "input_values"):
        shape = {"pixel_values": _image, "input_features": _spectrogram, "input_values": lambda _: (_SECOND,)}[main](config)
        given = {main: torch.randn(sizes.batch, *shape)}
        labels = classes if "Classification" in type(model).__name__ else ids[:, : min(sizes.length, 16)]
    else:
        given = {main: ids}
        labels = classes if re.search("SequenceClassification|MultipleChoice", type(model).__name__) else ids
        if "TokenClassification" in type(model).__name__:
            labels = ids % config.num_labels
    if "labels" in takes:
        given["labels"] = labels.clone()
    return given | (_mask(model, sizes, takes) if sizes.mask != "none" else {})


def _mask(model: Any, sizes: Sizes, takes: Any) -> dict[str, Any]:
    """Return what says which tokens belong together: a mask of ones, of rows that are padded behind, or positions that begin
    anew with each document. Raises TargetError for a model that takes none."""
    batch, length = sizes.batch or 1, sizes.length or 1
    name = "position_ids" if sizes.mask == "packed" else "attention_mask"
    if name not in takes or model.main_input_name != "input_ids":
        raise TargetError(f"--mask {sizes.mask}: {type(model).__name__} takes no {name}")
    places = torch.arange(length).expand(batch, length)
    if sizes.mask == "packed":
        return {name: places % max(1, length // _DOCUMENTS)}
    shown = torch.ones(batch, length, dtype=torch.long)
    if sizes.mask == "padded":
        lengths = length - (torch.arange(batch) % 4 + 1) * max(1, length // 8)
        shown = (places < lengths[:, None]).long()
    return {name: shown}


def _image(config: Any) -> tuple[int, ...]:
    size = find(config, "image_size") or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return find(config, "num_channels") or 3, height, width


def _spectrogram(config: Any) -> tuple[int, ...]:
    bins = find(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim") or 80
    return bins, 2 * (find(config, "max_source_positions") or 1500)
