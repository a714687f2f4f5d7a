"""``python -m fx_fusion profile``: where the time of a training step goes, under Inductor and under fx_fusion.

A script runs as it is, once for each. Its steps are those of its optimizer: some to warm up, some to be timed, some under
torch's profiler; then it is stopped. What ran is added up by kind, from the names of kernels: Inductor's hold the ops that
they compute, those of fx_fusion what they are for.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.optim.optimizer import register_optimizer_step_post_hook

from fx_fusion.report.verdict import NOTHING_COMPILED, counted

# The first that is found in a name is its kind: a kernel that computes a loss and something beside it is the loss's.
_KINDS = (
    ("compilation", r"dynamo_timed|inductor_|async_compile"),
    ("communication", r"nccl|c10d|all_?reduce|reduce_scatter|all_?gather|all_?to_?all"),
    ("optimizer", r"multi_tensor_apply|_foreach_|fusedadam|adamw?_|triton_for_|optimizer"),
    ("attention", r"flash|fmha|sdpa|attention|flex|(?<!log)_softmax|softmax_warp"),
    ("convolution", r"conv|cudnn|winograd|implicit"),
    ("matmul", r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|triton_tem_|::(b?mm|addmm|baddbmm|linear|matmul|dot)\b|mkldnn"),
    ("loss", r"log_softmax|nll_loss|cross_entropy|logsumexp|loss"),
    ("embedding", r"embedding"),
    ("norm", r"norm|rsqrt|var_mean|column_sums|welford"),
    ("rope", r"rope|(^|_)(cos|sin)(_|$)"),
    ("gate, activation", r"glu|silu|gelu|swish|sigmoid|tanh|relu"),
    ("copy", r"mem(cpy|set)|copy|::(clone|cat|contiguous|fill_|zero_|zeros|stack)\b|_fused_(cat|clone|_to_copy)_"),
    ("elementwise", r"triton_poi_|elementwise|cpp_fused|::(add|sub|mul|div|neg|pow|sqrt|where|lerp|addcmul|addcdiv)_?\b"),
    ("reduction", r"triton_(red|per)_|reduce|::(sum|mean|max|min|norm)\b"),
)
_OPTIMIZER = "Optimizer.step"  # how torch's profiler names the steps of an optimizer


def kind_of(name: str) -> str:
    """Return what a kernel, or an op on a CPU, is for, by its name."""
    lower = name.lower()
    return next((kind for kind, words in _KINDS if re.search(words, lower)), "other")


@dataclass
class Profiled:
    """One training step of a script, on average.

    Attributes:
        backend: what compiled it.
        ms: wall time, without the profiler.
        peak: bytes that the GPU's allocator held at most; None on a CPU.
        kinds: milliseconds by kind of kernel (of op, on a CPU); "idle" is when a GPU had nothing to do.
        fused: how many sites were replaced, in ``graphs`` compiled graphs.
    """

    backend: str
    ms: float
    peak: int | None
    kinds: dict[str, float] = field(default_factory=dict)
    fused: int = 0
    graphs: int = 0

    def save(self, file: str) -> None:
        """Write it as JSON."""
        Path(file).write_text(json.dumps(asdict(self)))


class Measured(SystemExit):
    """Ends a script whose steps were measured."""


class Steps:
    """Follows the steps of the first optimizer that makes one: ``after`` to warm up, ``steps`` to be timed, ``steps`` more
    under the profiler. Then it raises Measured; ``result`` is there.

    Args:
        trace: a file for the profiler's trace (Perfetto, chrome://tracing); None for none.
    """

    def __init__(self, backend: str, after: int, steps: int, trace: str | None):
        self.after, self.steps, self.trace = after, steps, trace
        self.result = Profiled(backend, 0.0, None)
        self.made = 0
        self._optimizer: Any = None
        self._profiler: Any = None
        self._started = 0.0

    def __enter__(self) -> Steps:
        self._hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)

    @property
    def needed(self) -> int:
        """Return how many steps it takes."""
        return self.after + 2 * self.steps

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self.made += 1
        gpu = torch.cuda.is_available()
        if self.made == self.after:
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self._started = time.perf_counter()
        elif self.made == self.after + self.steps:
            if gpu:
                torch.cuda.synchronize()
                self.result.peak = torch.cuda.max_memory_allocated()
            self.result.ms = (time.perf_counter() - self._started) * 1e3 / self.steps
            self._profiler = torch.profiler.profile()
            self._profiler.__enter__()
        elif self.made == self.needed:
            if gpu:
                torch.cuda.synchronize()
            profiler, self._profiler = self._profiler, None
            profiler.__exit__(None, None, None)
            self.result.kinds = {kind: us / 1e3 / self.steps for kind, us in microseconds_by_kind(profiler.events()).items()}
            if self.trace:
                profiler.export_chrome_trace(self.trace)
            raise Measured(0)


def microseconds_by_kind(events: Iterable[Any]) -> dict[str, float]:
    """Microseconds of a profile, by kind: of kernels if a GPU ran any, of ops without what they call otherwise."""
    events = list(events)
    kernels = [e for e in events if e.device_type == torch.profiler.DeviceType.CUDA and not e.is_user_annotation]
    kinds: dict[str, float] = {}
    for event in kernels or events:
        kind = kind_of(event.name) if kernels else _kind_on_cpu(event)
        taken = event.time_range.elapsed_us() if kernels else event.self_cpu_time_total
        kinds[kind] = kinds.get(kind, 0.0) + taken
    if kernels:
        kinds["idle"] = _idle([(k.time_range.start, k.time_range.end) for k in kernels])
    return kinds


def _kind_on_cpu(event: Any) -> str:
    above = event
    while above is not None:
        if above.name.startswith(_OPTIMIZER):
            return "optimizer"
        above = above.cpu_parent
    return kind_of(event.name)


def _idle(spans: Sequence[tuple[float, float]]) -> float:
    """Return how much of the time from the first start to the last end none of the spans covers."""
    idle, reached = 0.0, min(start for start, _ in spans)
    for start, end in sorted(spans):
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle


def side_by_side(found: Sequence[Profiled]) -> str:
    """A table: a row a kind of kernel, those that differ most first."""
    kinds = {kind for one in found for kind in one.kinds}
    first, last = found[0], found[-1]
    order = sorted(kinds, key=lambda kind: -abs(first.kinds.get(kind, 0.0) - last.kinds.get(kind, 0.0)))
    rows = [[kind, *(f"{one.kinds.get(kind, 0.0):.2f}" for one in found)] for kind in order]
    rows.append(["all of it", *(f"{sum(one.kinds.values()):.2f}" for one in found)])
    rows.append(["a step, without the profiler", *(f"{one.ms:.2f}" for one in found)])
    text = tabulate(rows, headers=["ms a step", *(one.backend for one in found)], disable_numparse=True, colalign=("left",))
    lines = [text, f"{last.backend}: {first.ms / last.ms:.2f} of {first.backend}'s speed"]
    if first.peak and last.peak:
        lines.append(f"peak memory: {first.peak / 2**30:.2f} -> {last.peak / 2**30:.2f} GiB")
    if not last.graphs:
        lines.append(NOTHING_COMPILED)
    else:
        lines.append(f"{counted(last.fused, 'site')} fused in {counted(last.graphs, 'graph')}")
    return "\n".join(lines)


def read(file: str) -> Profiled:
    """Return what ``Profiled.save`` wrote."""
    saved: Mapping[str, Any] = json.loads(Path(file).read_text())
    return Profiled(**saved)


