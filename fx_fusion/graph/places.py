"""Find where a node comes from: the path of its module, and its lines of source."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import fx

_TORCH = f"{Path(torch.__file__).parent}/"
# To a module through what its forward was before somebody wrapped it: accelerate's hooks, a patch, a function around it.
_BEFORE = r"(^[LG]\['\w+'\]|\.(?:_old_|_original_|_orig_|original_)?forward)"
_WRAPPED = re.compile(_BEFORE + r"(\.__func__)?(\.__closure__\[\d+\]\.cell_contents)*\.__self__")
_NAME = "what the model calls it"  # of a placeholder, in its meta


def module_of(node: fx.Node) -> str:
    """The path of the innermost module that made the node, as ``layers.0.mlp``, from the outermost one; empty for a free
    function."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _readable(str(path))


@functools.lru_cache(maxsize=4096)
def _readable(path: str) -> str:
    path = _WRAPPED.sub("", path)
    path = re.sub(r"^[LG]\['args'\]\[0\]", "", path)  # the model, where a decorator of its forward takes (*args, **kwargs)
    path = re.sub(r"^[LG]\['\w+'\](?!\[)", "", path)  # self, or what a function calls the model
    path = re.sub(r"(\.__dict__)?(\._modules|\['_modules'\])", "", path)
    path = re.sub(r"\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    path = re.sub(r"^[LG](?=\.)", "", path).lstrip(".").removeprefix("fn.")
    return re.sub(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)", "", path).lstrip(".")


def named(node: fx.Node) -> str:
    """The name of a node; of an input of the graph what the model calls it, as ``attention_mask``, or by its place where it
    came in ``*args``, as ``args[2]``."""
    if node.op != "placeholder":
        return node.name
    if _NAME in node.meta:
        return str(node.meta[_NAME])
    name = str(node.target).strip("_").removeprefix("L_").removeprefix("kwargs_")
    return re.sub(r"^args_(\d+)$", r"args[\1]", name)


def name_arguments(graph: fx.Graph, names: Sequence[str]) -> None:
    """Give the inputs of a graph that came in ``*args`` these names, by their places there."""
    for node in graph.find_nodes(op="placeholder"):
        found = re.fullmatch(r"L_args_(\d+)_", str(node.target))
        if found is not None and int(found[1]) < len(names):
            node.meta[_NAME] = names[int(found[1])]


def location_of(node: fx.Node) -> str:
    """``file.py:line`` of the innermost line outside of torch that made the node."""
    frames = frames_of(node)
    innermost = next((f for f in reversed(frames) if not f.startswith(_TORCH)), frames[-1] if frames else "")
    return innermost.rsplit("/", 1)[-1]


def frames_of(node: fx.Node) -> tuple[str, ...]:
    """The lines that led to the node, outermost first, as ``path:line``."""
    return _frames(node.meta.get("stack_trace") or "")


def users_frame(frames: Sequence[str]) -> str:
    """``file.py:line`` of the innermost of some frames that is in no installed package; empty where there is none, or it is
    the innermost of all."""
    own = [frame for frame in frames if "/site-packages/" not in frame and "/dist-packages/" not in frame]
    return own[-1].rsplit("/", 1)[-1] if own and own[-1] != frames[-1] else ""


@functools.lru_cache(maxsize=4096)
def _frames(stack_trace: str) -> tuple[str, ...]:
    return tuple(f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', stack_trace))


def shortened(modules: Iterable[str]) -> str:
    """``layers.0.norm layers.1.norm`` -> ``layers.{0-1}.norm``."""
    patterns: dict[str, list[int]] = {}
    for module in modules:
        numbers = re.findall(r"\d+", module)
        patterns.setdefault(re.sub(r"\d+", "{}", module, count=1), []).append(int(numbers[0]) if numbers else -1)
    parts = []
    for pattern, numbers in patterns.items():
        span = f"{{{min(numbers)}-{max(numbers)}}}" if min(numbers) != max(numbers) else str(numbers[0])
        parts.append(pattern.replace("{}", span, 1))
    return " ".join(parts)
