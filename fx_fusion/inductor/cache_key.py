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

from fx_fusion.ops.library import PLAIN_FUNCTIONS
from fx_fusion.options import Options
from fx_fusion.torch_internals.inductor import with_key


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
    return with_key(options.inductor, key_of(options), dict.fromkeys(PLAIN_FUNCTIONS, source_hash()))
