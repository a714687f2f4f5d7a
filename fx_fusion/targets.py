"""What ``python -m fx_fusion explain TARGET`` names: a model, and what it is called with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fx_fusion.errors import TargetError
from fx_fusion.transformers_models import Sizes, built, config_of


@dataclass
class Target:
    """``call(*args, **kwargs)`` is what is explained, inside of ``mode`` if its tensors have no memory."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    mode: Any = None


def target_of(name: str, sizes: Sizes, *, device: str, dtype: torch.dtype, fake: bool = True) -> Target:
    """The target of a name: a model type of transformers (``llama``), a ``config.json`` or its folder, or a function that
    makes the model and its arguments (``package.module:function``, ``file.py:function``). Models of transformers have these
    sizes, device and dtype; with ``fake`` they have no memory, where the class can be built so.

    Raises TargetError where there is no such thing, or it can't be built.
    """
    place, _, function = name.rpartition(":")
    if place and function.isidentifier():
        return _made_by(place, function)
    if importlib.util.find_spec("transformers") is None:
        raise TargetError(f"{name!r}: transformers is not installed, so it can only be package.module:function")
    config, made_by = config_of(name)
    model, kwargs, mode = built(config, made_by, sizes, device, dtype, fake)
    return Target(model, kwargs=kwargs, mode=mode)


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
