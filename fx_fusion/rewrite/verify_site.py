"""One replaced site as the model wrote it, as it is now, and in float64, on given inputs; and a file that shows it alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from fx_fusion.accuracy import Compared, Double, Values, alike, compare, doubled, nudged
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.torch_internals.containers import tree_map_only

_CHECKED_AT_ONCE = 2**33  # bytes that a site may take in float64 on a CPU


@dataclass(frozen=True)
class SiteCheck:
    """A site that can be checked.

    Attributes:
        place: what the messages call it: ``rms_norm in model.norm (modeling.py:12)``.
        fusion: what replaced it.
        before: computes ``outputs`` from ``inputs`` as the model does; ``after`` as the rewritten graph does.
        inputs: names of the nodes of the captured graph that either reads; ``trained`` those that need a gradient.
        differentiated: those of ``outputs`` to which a gradient comes back.
        at: the name of the node behind which all of them are known.
    """

    place: str
    fusion: str
    before: Callable[..., Any]
    after: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    trained: frozenset[str]
    differentiated: frozenset[str]
    at: str


class NotComparable(Exception):
    """A site can't be checked on these inputs."""


def compared(check: SiteCheck, inputs: Mapping[str, Any]) -> list[Compared]:
    """The results and gradients of a site against float64, the worst first."""
    tensors = [t for t in inputs.values() if isinstance(t, Tensor)]
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
        kind = next(type(t).__name__ for t in tensors if type(t) not in (Tensor, torch.nn.Parameter))
        raise NotComparable(f"its inputs are no plain tensors but {kind}")
    if not all(t.numel() for t in tensors):
        raise NotComparable("an input of it has no elements")
    size = 8 * sum(t.numel() for t in tensors)
    if size > _CHECKED_AT_ONCE and not any(t.is_cuda for t in tensors):
        raise NotComparable(f"its inputs take {size / 2**30:.0f} GiB in float64")
    try:
        usual = _step(check.before, check, inputs)
        again = _step(check.before, check, inputs)
        if not usual:
            raise NotComparable("it makes integers alone")
        if not alike(again, usual):
            raise NotComparable("it draws random numbers")
        ours, exact = _step(check.after, check, inputs), _exact(check, inputs)
        rows = compare(ours, usual, exact)
        if not all(row.ok for row in rows):
            rows = _with_eagers_luck_removed(check, inputs, rows, ours, exact)
    except torch.OutOfMemoryError as error:
        raise NotComparable("the memory does not suffice for its float64 twin") from error
    if not rows:
        raise NotComparable("it has no elements")
    return rows


def _exact(check: SiteCheck, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Results and gradients in float64."""
    devices = {t.device.type for t in inputs.values() if isinstance(t, Tensor)}
    with Double(), contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            return _step(check.before, check, tree_map_only(Tensor, doubled, dict(inputs)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a tensor that the model makes in float32 meets float64
            raise NotComparable(f"it has no float64 twin: {str(error).splitlines()[0]}") from error


def _with_eagers_luck_removed(
    check: SiteCheck, inputs: Mapping[str, Any], rows: Sequence[Compared], ours: Values, exact: Values
) -> list[Compared]:
    """Return what is allowed by eager's worst error over inputs that differ by a rounding: where two numbers are nearly tied
    for a maximum, the gradient goes to one or the other, and a single run may happen to be right."""
    known = {row.name: row.usual for row in rows}
    for seed in range(8):
        moved = nudged(inputs, seed)
        near = compare(ours, _step(check.before, check, moved), exact)
        further = nudged(inputs, seed, together=4)
        off = _step(check.before, check, further)
        for row in (*near, *compare(off, off, _exact(check, further))):
            known[row.name] = max(known[row.name], row.usual)
    worst = [replace(row, usual=known[row.name], allowed=row.allowed + 2 * (known[row.name] - row.usual)) for row in rows]
    return sorted(worst, key=lambda row: -row.used)


def _step(function: Callable[..., Any], check: SiteCheck, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Results and gradients of a site, by name."""
    with torch.enable_grad():
        leaves = {n: _leaf(v, n in check.trained) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        outs = function(*leaves.values())
    made = dict(zip(check.outputs, outs, strict=True))
    floating = {n: o for n, o in made.items() if isinstance(o, Tensor) and (o.is_floating_point() or o.is_complex())}
    values = {f"result {n}": o.detach() for n, o in floating.items()}
    through = [o for n, o in floating.items() if n in check.differentiated and o.requires_grad]
    wanted = [n for n in check.inputs if n in check.trained]
    if through and wanted:
        dys = [_gradient(o) for o in through]
        grads = torch.autograd.grad(through, [leaves[n] for n in wanted], dys, allow_unused=True)
        values |= {f"gradient of {n}": g for n, g in zip(wanted, grads, strict=True) if g is not None}
    return values


def _leaf(tensor: Tensor, trained: bool) -> Tensor:
    """A copy with the same strides, which compiled code relies on."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided((size,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride()).requires_grad_(trained)


def _gradient(out: Tensor) -> Tensor:
    """Random, of length 1 an element, the same for every dtype."""
    generator = torch.Generator(out.device).manual_seed(7)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)


# -- telling -----------------------------------------------------------------------------------------------------------
def table(rows: Sequence[Compared]) -> str:
    """The worst of what was compared."""
    shown = [(r.name, f"{r.error:.2e}", f"{r.usual:.2e}", f"{r.allowed:.2e}", "" if r.ok else "wrong") for r in rows[:8]]
    return tabulate(shown, headers=("the worst", "error", "eager's", "allowed", ""), disable_numparse=True)


def complaint(check: SiteCheck, rows: Sequence[Compared], file: str) -> str:
    saved = f"saved: python -m fx_fusion replay {file}" if file else "its inputs could not be saved"
    return (
        f"{check.place} is wrong on the inputs of this call.\n{table(rows)}\n{saved}\n"
        f'without it: options={{"fusions": ["-{check.fusion}"]}}'
    )


def reproducer(check: SiteCheck, inputs: Mapping[str, Any]) -> str:
    """The site and its inputs in a file; its path, empty if it can't be written."""
    folder = os.environ.get("FX_FUSION_REPRODUCERS") or tempfile.gettempdir()
    try:
        os.makedirs(folder, exist_ok=True)
        plain = {n: v.detach() if isinstance(v, Tensor) else v for n, v in inputs.items()}
        prefix = f"fx_fusion_{check.fusion}_"
        with tempfile.NamedTemporaryFile(dir=folder, prefix=prefix, suffix=".pt", delete=False) as file:
            torch.save({"check": vars(check), "inputs": plain, "torch": torch.__version__}, file)
    except Exception as error:  # what is wrong must be told whatever happens to the file
        return "" if isinstance(error, OSError) else f"(not written: {type(error).__name__}: {error})"
    return file.name


def replayed(file: str) -> tuple[SiteCheck, list[Compared]]:
    """Return what a reproducer compares, here and now. It holds code, as every pickle: open your own only."""
    all_fusions()  # the code names their ops
    saved = torch.load(file, weights_only=False, map_location=None if torch.cuda.is_available() else "cpu")
    check = SiteCheck(**saved["check"])
    return check, compared(check, saved["inputs"])
