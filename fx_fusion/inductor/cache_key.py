"""Make the compile caches see us.

AOTAutograd's cache knows an op by its name: a changed backward formula would hit an entry compiled with the old one.
A custom pass that does nothing, but whose ``uuid`` hashes all our sources and those of plug-ins, the options of this
compilation and the Triton version, puts that into the keys of both caches.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
import triton

from fx_fusion.fusion import registry
from fx_fusion.ops.library import PLAIN_FUNCTIONS
from fx_fusion.options import Options
from fx_fusion.torch_internals.inductor import with_key


def source_hash() -> str:
    """SHA-256 over the paths and bytes of all source files of the package, patterns and kernels included, and of the
    packages that plug-ins come from."""
    modules = {
        module.partition(".")[0]
        for fusion in registry.plugins()
        for module in (fusion.pattern.__module__, *([fusion.kernel.module] if fusion.kernel else []))
    }
    return _hash_of(("fx_fusion", *sorted(modules - {"fx_fusion"})))


@functools.cache
def _hash_of(packages: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for package in packages:
        module = sys.modules[package]
        roots = [Path(folder) for folder in getattr(module, "__path__", ())]
        for root in roots:
            for file in _python_files(root, follow=package == "fx_fusion"):
                digest.update(f"{package}/{file.relative_to(root)}".encode())
                digest.update(file.read_bytes())
        if not roots:
            source = Path(getattr(module, "__file__", None) or "")
            # A notebook has no file: nothing tells its versions apart.
            digest.update(source.read_bytes() if source.is_file() else uuid.uuid4().bytes)
    return digest.hexdigest()


def _python_files(root: Path, follow: bool) -> list[Path]:
    folders = os.walk(root, followlinks=follow)  # in a checkout, patterns and kernels are links
    return sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py"))


def key_of(options: Options) -> str:
    parts = (source_hash(), options.key(), triton.__version__, torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def config_patches(options: Options) -> dict[str, Any]:
    """Inductor's options of this compilation, with our key added to its custom passes."""
    return with_key(options.inductor, key_of(options), dict.fromkeys(PLAIN_FUNCTIONS, source_hash()))
