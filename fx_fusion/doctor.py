"""Check what this machine can do, one line a fact."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from rich.markup import escape

from fx_fusion.console import Output
from fx_fusion.cost import measure, table
from fx_fusion.errors import OptionError
from fx_fusion.fusion.registry import all_fusions, installed, plugins
from fx_fusion.ops.on_cpu import interpreting
from fx_fusion.options import parse, unknown_variables
from fx_fusion.torch_internals.inductor import cache_folder, triton_compiles

COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True)
class Fact:
    """Something about this machine: what it is about, whether that is as it should be, a sentence, and whether it is a
    mistake, which somebody has to mend."""

    about: str
    good: bool
    says: str
    mistake: bool = False

    @property
    def mark(self) -> str:
        """Return what stands in front of its line."""
        return "[green]ok[/]" if self.good else "[red]no[/]" if self.mistake else "[yellow]--[/]"


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor needs on CPU, or None."""
    return next((c for c in COMPILERS if shutil.which(c)), None)


def facts() -> Iterator[Fact]:
    """Everything that is checked."""
    yield Fact("versions", True, f"torch {torch.__version__}, triton {triton.__version__}{_others()}")
    installed_here = bool(importlib.metadata.entry_points(group="torch_dynamo_backends", name="fx_fusion"))
    missing = "the package is not installed: torch finds the backend only after `import fx_fusion`. Run pip install -e ."
    yield Fact("backend", installed_here, 'backend="fx_fusion" is registered' if installed_here else missing)
    yield from _gpu()
    compiler = cpp_compiler()
    yield Fact("compiler", compiler is not None, f"C++ compiler for Inductor on CPU: {compiler or 'missing, install g++'}")
    yield from (_folder(*named) for named in _folders())
    yield Fact("fusions", True, f"{len(all_fusions())} fusions: {', '.join(sorted(f.name for f in all_fusions()))}")
    more = [f"{fusion.name} ({fusion.pattern.__module__})" for fusion in plugins()]
    if more:
        yield Fact("plug-ins", True, f"brought by plug-ins: {', '.join(more)}")
    yield from (Fact("plug-ins", False, trouble) for trouble in installed())
    chosen = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("FX_FUSION_"))
    if chosen:
        yield Fact("environment", True, f"chosen by the environment: {', '.join(chosen)}")
    yield from (Fact("variables", False, mistake, mistake=True) for mistake in _mistakes_in_the_environment())
    if interpreting():
        yield Fact("interpreter", False, "TRITON_INTERPRET=1: kernels run in Triton's interpreter, on CPU tensors")


def _mistakes_in_the_environment() -> Iterator[str]:
    yield from unknown_variables().values()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown ones are said already
            parse(None, None)
    except OptionError as error:
        yield str(error)


def _others() -> str:
    """Versions of what is used beside, where it is installed."""
    found = []
    for name in ("transformers", "accelerate", "peft", "diffusers", "timm"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "".join(f", {one}" for one in found)


def _gpu() -> Iterator[Fact]:
    if not torch.cuda.is_available():
        yield Fact("GPU", False, "no CUDA device: what pays on a CPU is fused (lm_head + loss, masks, grouped keys)")
        return
    properties, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    memory, others = properties.total_memory / 2**30, f", {count} of them" if count > 1 else ""
    kind = f"compute capability {properties.major}.{properties.minor}"
    yield Fact("GPU", True, f"{properties.name}, {memory:.0f} GiB, {kind}, CUDA {torch.version.cuda}{driver()}{others}")
    compiles = triton_compiles()
    yield Fact("Triton", compiles, f"Triton {'can' if compiles else 'cannot'} compile for it")
    speaks = table.tables_for(properties.name, torch.device("cuda", 0))[0]
    own = speaks == properties.name
    measured = {cell.fusion for fusion in all_fusions() for cell in table.cells_of(speaks, fusion.name)}
    says = f"a table of measurements for {len(measured)} fusions decides"
    if not own:
        says += f', of an {speaks}: this GPU was not measured; options={{"select": "measure"}} times both on the spot'
    yield Fact("table", own, says)


def driver() -> str:
    """``, driver 580.65.06``, as nvidia-smi says it; empty where it says nothing."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return f", driver {said[0]}" if said else ""


def _folders() -> Iterator[tuple[str, Path]]:
    yield "measurements", measure.folder()
    if (inductors := cache_folder()) is not None:
        yield "Inductor's cache", Path(inductors)


def _folder(what: str, path: Path) -> Fact:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Fact(what, True, f"{what}: {path}")
    except OSError as error:
        return Fact(what, False, f"{what}: {path} can't be written to ({error.strerror})")


def main(as_json: bool = False) -> int:
    """Print the facts; 1 if something that is needed is missing, or there is a mistake."""
    found = list(facts())
    if as_json:
        print(json.dumps([asdict(fact) for fact in found], indent=1))
    else:
        console = Output(highlight=False, soft_wrap=True)
        for fact in found:
            console.print(f"{fact.mark}  ", escape(fact.says), sep="")
    good = {fact.about: fact.good for fact in found}
    compiles = good["compiler"] or good["GPU"]
    return 0 if compiles and not any(fact.mistake for fact in found) else 1
