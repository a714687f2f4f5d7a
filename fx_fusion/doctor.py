"""Check what this machine can do, one line a fact."""

from __future__ import annotations

import shutil

import torch
import triton
from rich.console import Console

from fx_fusion.fusion.registry import all_fusions
from fx_fusion.ops.on_cpu import interpreting

COMPILERS = ("g++", "clang++", "c++")


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor needs on CPU, or None."""
    return next((c for c in COMPILERS if shutil.which(c)), None)


def main() -> int:
    """Print the facts; 1 if something that is needed is missing."""
    console = Console(highlight=False)
    compiler = cpp_compiler()
    registered = "fx_fusion" in torch.compiler.list_backends(exclude_tags=())
    facts = [
        (True, f"torch {torch.__version__}, triton {triton.__version__}"),
        (registered, 'backend="fx_fusion" is registered' if registered else "not installed: run pip install -e ."),
        (torch.cuda.is_available(), _gpu()),
        (compiler is not None, f"C++ compiler for Inductor on CPU: {compiler or 'missing, install g++ or clang++'}"),
        (True, f"{len(all_fusions())} fusions: {', '.join(sorted(f.name for f in all_fusions()))}"),
    ]
    for good, fact in facts:
        console.print(f"[green]ok[/]  {fact}" if good else f"[yellow]--[/]  {fact}")
    if interpreting():
        console.print("[yellow]--[/]  TRITON_INTERPRET=1: kernels run in Triton's interpreter, on CPU tensors")
    return 0 if registered and (compiler or torch.cuda.is_available()) else 1


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device: fusions that pay on CPU are used (lm_head + loss, masks, grouped-query attention)"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}"
