"""What ``python -m fx_fusion explain TARGET`` names: a model, and what it is called with."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fx_fusion.errors import TargetError, nearest
from fx_fusion.torch_internals.fakes import FakeTensorMode

_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip


@dataclass
class Target:
    """``call(*args, **kwargs)`` is what is explained, inside of ``mode`` if its tensors have no memory."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    mode: Any = None


def target_of(
    name: str, *, batch: int, length: int, layers: int, device: str, dtype: torch.dtype, fake: bool = True
) -> Target:
    """The target of a name: a model type of transformers (``llama``), a ``config.json`` or its folder, or a function that
    makes the model and its arguments (``package.module:function``, ``file.py:function``). Models of transformers have their
    full width and ``layers`` layers, no dropout, and with ``fake`` no memory, where the class can be built so.

    Raises TargetError where there is no such thing, or it can't be built.
    """
    place, _, function = name.rpartition(":")
    if place and function.isidentifier():
        return _made_by(place, function)
    try:
        import transformers
    except ImportError as error:
        raise TargetError(f"{name!r}: transformers is not installed, so it can only be package.module:function") from error
    classes = _classes()
    given: dict[str, Any] = {}
    if Path(name).exists():
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TargetError(f"{path} can't be read as a config: {error}") from error
    kind = given.pop("model_type", "" if given else name)
    if kind not in classes:
        raise TargetError(f"{kind!r} is no model type with a language-model head. {nearest(kind, sorted(classes))[:400]}")
    config = transformers.AutoConfig.for_model(kind, **given)
    for attribute in _LAYERS:
        if isinstance(getattr(config, attribute, None), int):
            setattr(config, attribute, min(layers, getattr(config, attribute)))
    for attribute in ("layer_types", "mlp_layer_types"):
        if getattr(config, attribute, None):
            setattr(config, attribute, getattr(config, attribute)[:layers])
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    for attribute in (a for a in vars(config) if re.search("drop|pdrop", a) and isinstance(getattr(config, a), float)):
        setattr(config, attribute, 0.0)
    return _built(getattr(transformers, classes[kind]), config, batch, length, device, dtype, fake)


def _classes() -> dict[str, Any]:
    """The class with a language-model head of each model type: encoders that can be decoders too are taken for encoders."""
    from transformers.models.auto import modeling_auto as auto

    return {
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }


def _built(
    made_by: Any, config: Any, batch: int, length: int, device: str, dtype: torch.dtype, fake: bool
) -> Target:  # fmt: skip
    """Without memory if that is asked for; with it where a model reads values while it is built."""
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), None) if fake else (None,):
        known = torch.get_default_dtype()
        try:
            with mode or contextlib.nullcontext(), torch.device(device):
                torch.set_default_dtype(dtype)
                model = made_by(config).train()
                least = min(1000, getattr(config.get_text_config(), "vocab_size", 2))
                ids = torch.arange(batch * length).view(batch, length) % least
                return Target(model, kwargs={"input_ids": ids, "labels": ids.clone()}, mode=mode)
        except Exception as error:
            if mode is None:
                raise TargetError(f"{made_by.__name__} can't be built: {type(error).__name__}: {error}") from error
        finally:
            torch.set_default_dtype(known)
    raise AssertionError("one of the two returns or raises")


def _made_by(place: str, name: str) -> Target:
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise TargetError(f"{place!r} can't be imported: {error}") from error
    if not callable(function := getattr(module, name, None)):
        raise TargetError(f"{place} has no function {name!r}")
    made = function()
    call, *given = made if isinstance(made, tuple) else (made,)
    kwargs = given.pop() if given and isinstance(given[-1], dict) else {}
    args = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else tuple(given)
    if not callable(call) or not (args or kwargs):
        raise TargetError(f"{name}() must return a model and its arguments: (model, kwargs), (model, args, kwargs) or "
                          f"(model, tensor, ...); it returned {type(made).__name__}")  # fmt: skip
    return Target(call, args, kwargs)
