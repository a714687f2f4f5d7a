"""Find what ``python -m fx_fusion explain TARGET`` names: a model and what it is called with, and fusions."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fx_fusion.errors import OptionError, TargetError, nearest
from fx_fusion.fusion import registry
from fx_fusion.transformers_models import Sizes, built, config_of

# What runs a user's code: these frames come before theirs.
_RUNNERS = ("fx_fusion", "runpy", "importlib", "_frozen_importlib", "_frozen_importlib_external")


class TargetFailed(TargetError):
    """The code of a target raised. That is printed already, as what a script raises, and the exit code is the same."""

    exit_code = 1


@dataclass
class Target:
    """``call(*args, **kwargs)`` is what is explained, inside of ``mode`` if its tensors have no memory."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    mode: Any = None


def target_of(
    name: str, sizes: Sizes, *, device: str, dtype: torch.dtype, fake: bool = True, download: bool = False
) -> Target:  # fmt: skip
    """The target of a name: a model type of transformers (``llama``), a ``config.json`` or its folder, a model of the Hub
    (``download``: its config may be fetched), or a function that makes the model and its arguments
    (``package.module:function``, ``file.py:function``). Models of transformers have these sizes, device and dtype; with
    ``fake`` they have no memory, where the class can be built so.

    Raises TargetError where there is no such thing, or it can't be built; TargetFailed where its own code raises.
    """
    if names_a_function(name):
        place, _, function = name.rpartition(":")
        return _made_by(place, function)
    if name.endswith(".py"):
        which = "a script" if Path(name).is_file() else "a script that does not exist"
        raise TargetError(f"{name!r} is {which}: name a function of a script, which returns a model and its arguments, as "
                          "train.py:make")  # fmt: skip
    if importlib.util.find_spec("transformers") is None:
        raise TargetError(f"{name!r}: transformers is not installed, so it can only be package.module:function")
    config, made_by = config_of(name, download=download)
    model, kwargs, mode = built(config, made_by, sizes, device, dtype, fake)
    return Target(model, kwargs=kwargs, mode=mode)


def names_a_function(name: str) -> bool:
    """Return True for ``package.module:function`` and ``file.py:function``."""
    place, _, function = name.rpartition(":")
    return bool(place) and function.isidentifier()


def check_fusions(output: Mapping[str, Any], *, before: str = "") -> None:
    """Raise OptionError where ``--fusion`` or ``--require`` names a fusion that does not exist, before a target or a script
    runs; not yet where that may register it."""
    shown = [] if output["fusion"] is None else [output["fusion"]]
    names = [*shown, *(wanted.partition("=")[0] for wanted in output["require"])]
    known = [fusion.name for fusion in registry.all_fusions()]
    unknown = next((name for name in names if name not in known), None)
    if unknown is None or _may_register(before):
        return
    file = before.rpartition(":")[0] or before
    own = f" One of your own: register it in {file}, or by an entry point (docs/plugins.md)." if file.endswith(".py") else ""
    raise OptionError(f"no fusion is called {unknown!r}. {nearest(unknown, known)}{own}")


def _may_register(name: str) -> bool:
    """Return True if the code of a target or a script may bring fusions: a file with the word ``register``, or any
    module."""
    code = name.rpartition(":")[0] if names_a_function(name) else name
    if not code.endswith(".py"):
        return code != name
    return Path(code).is_file() and re.search(r"\bregister\b", Path(code).read_text(errors="replace")) is not None


def print_raised(error: BaseException) -> None:
    """Print what a user's code raised, from the first frame that is theirs."""
    frames = _own_frames(error)
    if frames is None and not isinstance(error, SyntaxError):  # that of a file that could not even be read says where
        frames = error.__traceback__
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _own_frames(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _RUNNERS:
        frames = frames.tb_next
    return frames


def _made_by(place: str, name: str) -> Target:
    try:
        function = _imported(place, name)
        made = function()
    except TargetError:
        raise
    except SystemExit as end:
        raise TargetError(f"{place} must not end the process, and did (exit code {end.code}) before {name}() had returned a "
                          'model: keep its own work behind if __name__ == "__main__"') from end  # fmt: skip
    except Exception as error:
        if isinstance(error, (ImportError, OSError)) and _own_frames(error) is None:
            raise TargetError(f"{place!r} can't be imported: {error}") from error
        print_raised(error)
        raise TargetFailed(f"'{place}:{name}' failed by its own error, above: {type(error).__name__}") from None
    call, *given = made if isinstance(made, tuple) else (made,)
    kwargs = given.pop() if given and isinstance(given[-1], dict) else {}
    args = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else tuple(given)
    if not callable(call) or not (args or kwargs):
        raise TargetError(f"{name}() must return a model and its arguments: (model, kwargs), (model, args, kwargs) or "
                          f"(model, tensor, ...); it returned {type(made).__name__}")  # fmt: skip
    return Target(call, args, kwargs)


def _imported(place: str, name: str) -> Callable[[], Any]:
    """The function of this name, of a module or a file."""
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not callable(function := getattr(module, name, None)):
        raise TargetError(f"{place} has no function {name!r}")
    return function
