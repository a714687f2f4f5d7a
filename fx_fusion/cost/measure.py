"""``options={"select": "measure"}``: time the fused op and Inductor on the site's own shapes, once.

A site is described by its fusion, shapes, strides and dtypes. It is timed in a process of its own (nothing that a
compilation holds is disturbed; an error or a crash there is a reason here), and the result is kept in a file named by a
hash of the description, the GPU, and the versions of torch, Triton and this package. Files are written under another name
and moved into place, so that several processes may measure at once; a file that can't be read is measured again.

``FX_FUSION_CACHE_DIR`` (default: ``~/.cache/fx_fusion``) is where the files lie.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import fx

from fx_fusion.cost import timing
from fx_fusion.fusion.declaration import Fusion, Reason
from fx_fusion.fusion.matcher import Match
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.fusion.registry import all_fusions, fusion_named, register
from fx_fusion.graph.size_hints import expected
from fx_fusion.graph.terms import is_tensor

_SECONDS = 300  # for one site, compilers included
_SEEN: dict[str, dict[str, float] | str] = {}


@dataclass(frozen=True)
class Verdict:
    """The result of measuring a site: ``keep``, why Inductor is faster (None: it is not), or ``trouble``, why it could not
    be measured (empty: it was)."""

    keep: Reason = None
    trouble: str = ""

    @property
    def measured(self) -> bool:
        return not self.trouble


def ask(fusion: Fusion, match: Match) -> Verdict:
    """Measure a site, or look up what was measured."""
    site = describe(fusion, match)
    if isinstance(site, str):
        return Verdict(trouble=site)
    times = measured(site)
    if isinstance(times, str):
        return Verdict(trouble=times)
    if times["ours"] <= times["inductor"]:
        return Verdict()
    return Verdict(keep=f"measured here: {times['ours']:.4f} ms, Inductor {times['inductor']:.4f} ms")


def known(fusion: Fusion, match: Match) -> dict[str, float] | None:
    """``{"ours": ms, "inductor": ms}`` of a site that this process asked for; it measures none."""
    site = describe(fusion, match)
    times = _SEEN.get(_key(site)) if isinstance(site, dict) else None
    return times if isinstance(times, dict) else None


def describe(fusion: Fusion, match: Match) -> dict[str, Any] | str:
    """Return what decides about the time of a site, as plain data; or why that can't be said."""
    inputs: dict[str, Any] = {}
    if fusion.tensors[0] not in match.inputs:
        return f"its {fusion.tensors[0]} lies in another way than the kernel takes it"
    for name, spec in fusion.inputs.items():
        bound = match.inputs.get(name)
        if bound is None:
            inputs[name] = None
            continue
        example = match.example(name)
        if not is_tensor(bound):
            inputs[name] = expected(example) if isinstance(example, torch.SymInt) else example
            if not isinstance(inputs[name], (int, float)):
                return f"{name} has no value when the graph is compiled"
            continue
        shape, stride = ([expected(n) for n in numbers] for numbers in (example.shape, example.stride()))
        if not all(isinstance(n, int) for n in (*shape, *stride)):
            return f"{name} has a size without a value"
        bound_by = fusion.integers.get(name)
        inputs[name] = {
            "shape": shape, "stride": stride, "dtype": str(example.dtype).removeprefix("torch."),
            "grad": bool(example.requires_grad), "device": example.device.type, "below": bound_by, "spec": spec,
        }  # fmt: skip
    statics = {k: v for k, v in match.statics.items() if not isinstance(v, fx.Node)}
    module = fusion.pattern.__module__
    if module == "__main__":
        return f"{fusion.name} is declared in __main__, which the process that measures can't import"
    return {
        "fusion": fusion.name, "module": module, "statics": statics, "inputs": inputs, "grad": torch.is_grad_enabled(),
        "fp32_precision": torch.backends.cuda.matmul.fp32_precision,
    }  # fmt: skip


def measured(site: dict[str, Any]) -> dict[str, float] | str:
    """``{"ours": ms, "inductor": ms}`` from memory, from the file, or by measuring; or why not."""
    key = _key(site)
    if key not in _SEEN:
        file = folder() / f"{key}.json"
        found = _read(file) or _measure_in_a_process(site)
        if isinstance(found, dict):
            _write(file, found)
        _SEEN[key] = found
    return _SEEN[key]


def _key(site: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([site, *_environment()], sort_keys=True).encode()).hexdigest()


def _environment() -> tuple[str, ...]:
    from fx_fusion.inductor.cache_key import source_hash

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return gpu, torch.__version__, triton.__version__, source_hash()


def folder() -> Path:
    """Return where measurements are kept."""
    given = os.environ.get("FX_FUSION_CACHE_DIR")
    return (Path(given) if given else Path.home() / ".cache" / "fx_fusion") / "measured"


def _read(file: Path) -> dict[str, float] | None:
    try:
        found = json.loads(file.read_text())
        return {name: float(found[name]) for name in ("ours", "inductor")}
    except (OSError, ValueError, KeyError, TypeError):  # not there, or half a file: measure again
        return None


def _write(file: Path, found: dict[str, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as temporary:
            json.dump(found, temporary)
        os.replace(temporary.name, file)
    except OSError:  # a read-only home: the result still serves this process
        return


def _measure_in_a_process(site: dict[str, Any]) -> dict[str, float] | str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fx_fusion.cost.measure"], input=json.dumps(site), capture_output=True, text=True,
            timeout=_SECONDS, check=False, env=_environment_of(site["module"]),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"measuring took more than {_SECONDS} s"
    if done.returncode != 0:
        return f"measuring failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _environment_of(module: str) -> dict[str, str]:
    """Let the process that measures find plug-ins where this one found them. Options of this process are not its
    own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FX_FUSION_")}
    if torch.cuda.is_available():  # on the GPU of this rank, not on the first one
        seen = [name for name in kept.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        here = torch.cuda.current_device()
        kept["CUDA_VISIBLE_DEVICES"] = seen[here] if here < len(seen) else str(here)
    more = {} if module.startswith("fx_fusion.") else {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {**kept, **more}


def measure(site: dict[str, Any]) -> dict[str, float]:
    """Compile the site's function both ways and time forward + backward (forward alone where nothing needs a gradient)."""
    torch.backends.cuda.matmul.fp32_precision = site["fp32_precision"]
    fusion = _declared(site["module"], site["fusion"])
    given = {n: _tensor(t, site["inputs"]) if isinstance(t, dict) else t for n, t in site["inputs"].items()}
    function = reference_of(fusion, site["statics"])
    leaves = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    device = next(t.device.type for t in given.values() if isinstance(t, torch.Tensor))
    ours = {"select": "always", "strict": True, "fusions": [fusion.name]}
    calls = []
    for options in ({}, {"backend": "fx_fusion", "options": ours}):
        compiled: Any = torch.compile(function, dynamic=False, **options)

        def call(compiled: Any = compiled) -> None:
            with torch.set_grad_enabled(site["grad"]):
                made = compiled(**given)
                outs = [o for o in (made if isinstance(made, tuple) else (made,)) if o.requires_grad]
                if outs:
                    torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], allow_unused=True)

        call()
        calls.append(call)
    inductor, fused = timing.in_turns(calls) if device == "cuda" else timing.cpu_in_turns(calls)
    return {"inductor": inductor, "ours": fused}


def _declared(module: str, name: str) -> Fusion:
    """The fusion of this name; a plug-in's may have to be registered in this process first."""
    for found in vars(importlib.import_module(module)).values():
        if isinstance(found, Fusion) and found.name == name and found not in all_fusions():
            register(found)
    return fusion_named(name)


def _tensor(about: dict[str, Any], inputs: dict[str, Any]) -> torch.Tensor:
    dtype, shape, stride = getattr(torch, about["dtype"]), about["shape"], about["stride"]
    length = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    memory = torch.empty(length, dtype=dtype, device=about["device"])  # elements of an expanded tensor share theirs
    if dtype.is_floating_point:
        return memory.normal_().as_strided(shape, stride).requires_grad_(about["grad"])
    bound = 2
    for other in inputs.values():
        if isinstance(other, dict) and about["below"] in str(other["spec"]).split():
            bound = other["shape"][str(other["spec"]).split().index(about["below"])]
    return memory.random_(0, bound).as_strided(shape, stride)


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
