"""``python -m fx_fusion bench``: training steps of a model under eager, Inductor, Liger and fx_fusion, in turns.

Each variant is a process of its own, so that compile caches, patches and peak memory are its own. The processes compile one
after the other and stay. Then each measures a few steps in its turn, several times over, so that all see a GPU that gets
warmer. Inductor runs twice, because the distance of two runs of the same code says what a ratio is worth. Where the variants
do not fit on the GPU together, each is measured alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tabulate import tabulate

import fx_fusion
from fx_fusion.errors import TargetError
from fx_fusion.targets import Target
from fx_fusion.torch_internals.containers import tree_leaves

VARIANTS = ("eager", "inductor", "liger", "fx_fusion")
AGAIN = "inductor, again"
TURNS = 5
_WARM = 3  # steps behind the first one that are not measured


@dataclass
class Measured:
    """The time and memory of one variant.

    Attributes:
        variant: its name.
        seconds: of each measured step, by turn.
        first: seconds of the first step, compilation included.
        peak: bytes that the GPU's allocator held at most; None on a CPU.
        losses: of the first steps.
        failed: why there are no numbers; empty where there are.
    """

    variant: str
    seconds: list[list[float]] = field(default_factory=list)
    first: float = 0.0
    peak: int | None = None
    losses: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return statistics.median(s for turn in self.seconds for s in turn)

    @property
    def spread(self) -> float:
        """Return how far the medians of its turns are apart, relative to the median step."""
        medians = [statistics.median(turn) for turn in self.seconds]
        return (max(medians) - min(medians)) / self.step


def variants_here(kind: str | None) -> list[str]:
    """Return the variants that can run here: Liger where it is installed and has a patch for this type of model."""
    return [name for name in VARIANTS if name != "liger" or _liger(kind) is not None]


def _liger(kind: str | None) -> Any:
    try:
        import liger_kernel.transformers as liger
    except ImportError:
        return None
    return getattr(liger, f"apply_liger_kernel_to_{kind}", None)


def patch(kind: str | None) -> None:
    """Patch the classes of a type of model by Liger's kernels, as its users do."""
    apply = _liger(kind)
    if apply is None:
        raise TargetError(f"Liger has no patch for {kind!r} here")
    apply()


# -- in the process of a variant ---------------------------------------------------------------------------------------
def train(target: Target, variant: str, steps: int) -> None:
    """Train, and measure ``steps`` steps for each line of standard input; one JSON line of standard output for each."""
    model: Any = target.call
    call = model
    if variant.startswith("inductor"):
        call = torch.compile(model)
    elif variant == "fx_fusion":
        call = torch.compile(model, backend="fx_fusion")
    gpu = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=gpu or None)

    def step() -> torch.Tensor:
        output = call(*target.args, **target.kwargs)
        loss = loss_of(output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    began = time.perf_counter()
    losses = [step().item()]
    first = time.perf_counter() - began
    losses += [step().item() for _ in range(_WARM)]
    if gpu:
        torch.cuda.empty_cache()
    _say({"first": first, "losses": losses})
    for _ in sys.stdin:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        _say({"seconds": times, "peak": torch.cuda.max_memory_allocated() if gpu else None})


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of an output, or the mean of its first tensor of floats where it has none."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad).float().mean()


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


# -- in the process that compares them ---------------------------------------------------------------------------------
class _Process:
    """A variant that waits for its turn."""

    def __init__(self, command: Sequence[str], variant: str):
        self.result = Measured(variant)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads would stop the process
        self._process = subprocess.Popen(
            [*command, "--variant", variant], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        if (said := self._read()) is not None:
            self.result.first, self.result.losses = said["first"], said["losses"]

    def turn(self) -> None:
        """Measure a few steps."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.poll()
        if (said := self._read()) is not None:
            self.result.seconds.append(said["seconds"])
            self.result.peak = said["peak"]

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()
        self.result.failed = last[-1] if last else f"exit code {self._process.returncode}"
        return None

    def end(self) -> None:
        """End the process, which frees its memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._errors.close()


def compare(command: Sequence[str], variants: Sequence[str], tell: Any) -> list[Measured]:
    """Measure variants in turns, or one after the other where they do not fit on the GPU together.

    Args:
        command: what runs one variant, without ``--variant``.
        tell: called with a sentence about what is going on.
    """
    found, held = {}, []
    try:
        for variant in variants:
            tell(f"{variant}: compiling")
            held.append(_Process(command, variant))
            if _out_of_memory(held[-1].result) and len(held) > 1:
                tell("they do not fit on the GPU together: one after the other")
                break
        else:
            for turn in range(TURNS):
                tell(f"measuring, turn {turn + 1} of {TURNS}")
                for one in held:
                    if not one.result.failed:
                        one.turn()
            found = {one.result.variant: one.result for one in held}
    finally:
        for one in held:
            one.end()
    for variant in variants if not found else ():
        tell(f"{variant}: alone")
        one = _Process(command, variant)
        try:
            for _ in range(TURNS if not one.result.failed else 0):
                one.turn()
        finally:
            one.end()
        found[variant] = one.result
    return [found[variant] for variant in variants]


def _out_of_memory(result: Measured) -> bool:
    return "out of memory" in result.failed.lower() or "OutOfMemoryError" in result.failed


# -- what is shown -----------------------------------------------------------------------------------------------------
def shown(found: Sequence[Measured], title: str) -> str:
    """Return the table of what was measured, what the ratios are worth, and the row of a table in Markdown."""
    by_name = {one.variant: one for one in found if not one.failed}
    base, ours = by_name.get("inductor"), by_name.get("fx_fusion")
    rows = [_row(one, base) for one in found]
    headers = ["", "ms a step", "spread", "x Inductor", "peak GiB", "of its memory", "first step s", "last loss"]
    lines = [title, "", tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 7))]
    if base is None or ours is None:
        return "\n".join([*lines, "no ratio: Inductor or fx_fusion has no numbers"])
    ratios, noise = by_turn(base, ours), noise_of(found)
    ratio = statistics.median(ratios)
    verdict = "faster" if ratio > 1 + noise else "slower" if ratio < 1 - noise else "no difference"
    lines += ["", f"fx_fusion: {ratio:.3f} of Inductor's speed ({min(ratios):.3f} to {max(ratios):.3f} by turn), {verdict}: "
              f"equal code differs by {noise:.1%} here"]  # fmt: skip
    if noise > 0.03:
        lines.append("that is much: something else uses this machine, or it has not warmed up; measure again")
    if (apart := _losses_apart(base, ours)) > 2e-2:
        lines.append(f"LOSSES DIFFER by {apart:.1%}: python -m fx_fusion verify says where")
    memory = f"{ours.peak / base.peak:.2f}" if ours.peak and base.peak else "-"
    speed = {name: f"{statistics.median(by_turn(base, one)):.2f}" for name, one in by_name.items()}
    lines += ["", f"| {title} | {' | '.join(speed.get(name, '-') for name in ('eager', 'liger', 'fx_fusion'))} | {memory} |"]
    return "\n".join(lines)


def by_turn(base: Measured, other: Measured) -> list[float]:
    """Return by turn how many times as fast as ``base`` another one is, by the median steps of both."""
    pairs = zip(base.seconds, other.seconds, strict=True)
    return [statistics.median(one) / statistics.median(two) for one, two in pairs]


def noise_of(found: Sequence[Measured]) -> float:
    """Return how far two runs of the same code are apart in all turns but one, at least 0.005; 0.5 where one is missing."""
    by_name = {one.variant: one for one in found if not one.failed}
    base, again = by_name.get("inductor"), by_name.get(AGAIN)
    if base is None or again is None:
        return 0.5
    return max(sorted(abs(ratio - 1) for ratio in by_turn(base, again))[-2], 0.005)


def _row(one: Measured, base: Measured | None) -> list[str]:
    if one.failed:
        return [one.variant, one.failed[:60], *("",) * 6]
    gib = f"{one.peak / 2**30:.2f}" if one.peak else "-"
    part = f"{one.peak / base.peak:.2f}" if base and one.peak and base.peak else "-"
    ratio = f"{statistics.median(by_turn(base, one)):.3f}" if base else "-"
    times = f"{one.step * 1e3:.2f}", f"{one.spread:.1%}", ratio
    return [one.variant, *times, gib, part, f"{one.first:.1f}", f"{one.losses[-1]:.4f}"]


def _losses_apart(one: Measured, other: Measured) -> float:
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one.losses, other.losses, strict=True))


def as_json(found: Sequence[Measured], title: str) -> str:
    """Return what was measured, with the versions that it was measured with."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"torch": torch.__version__, "fx_fusion": fx_fusion.__version__, "gpu": gpu}
    return json.dumps({"title": title, **versions, "measured": [asdict(one) for one in found]}, indent=1)
