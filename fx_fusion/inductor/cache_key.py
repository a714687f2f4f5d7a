"""Make the compile caches see us.

AOTAutograd's cache knows an op by its name: a changed backward formula would hit an entry compiled with the old one.
A custom pass that does nothing, but whose ``uuid`` hashes all our sources, the options of this compilation and the
Triton version, puts that into the keys of both caches.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import triton
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fx_fusion.ops.fused_op import PLAIN_FUNCTIONS
from fx_fusion.options import Options

_SLOT = "post_grad_custom_pre_pass"
_CACHEABLE = "unsafe_marked_cacheable_functions"


class _NoOpPass(CustomGraphPass):
    """Changes nothing; exists for its uuid."""

    def __init__(self, key: str):
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        return

    def uuid(self) -> Any:
        return self.key


@functools.cache
def source_hash() -> str:
    """SHA-256 over the paths and bytes of all source files of the package, patterns and kernels included."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    folders = os.walk(root, followlinks=True)  # in a checkout, patterns and kernels are links
    for file in sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def key_of(options: Options) -> str:
    parts = (source_hash(), options.key(), triton.__version__, torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def config_patches(options: Options) -> dict[str, Any]:
    """Inductor's options of this compilation, with our key added to its custom passes."""
    patches = dict(options.inductor)
    given = patches.get(_SLOT, getattr(inductor_config, _SLOT))
    ours = _NoOpPass(key_of(options))
    known = dict(patches.get(_CACHEABLE, getattr(inductor_config, _CACHEABLE)) or {})
    patches[_CACHEABLE] = {**known, **dict.fromkeys(PLAIN_FUNCTIONS, source_hash())}
    if given is None:
        patches[_SLOT] = ours
    elif isinstance(given, CustomGraphPass):
        patches[_SLOT] = _Both(given, ours)
    return patches


class _Both(CustomGraphPass):
    """The user's own pass, and our key."""

    def __init__(self, users: CustomGraphPass, ours: _NoOpPass):
        self.users, self.ours = users, ours

    def __call__(self, graph: fx.Graph) -> None:
        self.users(graph)

    def uuid(self) -> Any:
        theirs = self.users.uuid()
        return None if theirs is None else (theirs, self.ours.uuid())
