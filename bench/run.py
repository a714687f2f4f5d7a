"""Fusions x sizes x dtypes x {eager, Inductor, fx_fusion, Liger} x {forward, forward + backward}.

    python -m bench.run [--fusion NAME ...] [--grid] [--dtypes bfloat16,float32] [--providers inductor,fx_fusion]

Functions, inputs and sizes come from the declarations, those of plug-ins too. ``share`` is the time of the fewest bytes
(``bench.fewest``) at the copy rate measured in the same run, ``host_us`` the host's time a call. A case whose fused function
fails the accuracy rule is not timed. ``--compile-only`` fills the compilers' caches: several processes can do that at once,
measuring has to be alone: ``--lock FILE`` of a GPU lets several processes measure on it, one at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from tabulate import tabulate

import fx_fusion
from bench.composites import COMPOSITES, read_by_convolution
from bench.fewest import fewest_bytes
from bench.grid import cases_of
from bench.peers import liger
from bench.process import alone, environment
from fx_fusion.cost import timing
from fx_fusion.cost.table import why_slower_for
from fx_fusion.fusion.declaration import Case, Fusion
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.testing import eager_nearby, make_inputs, run, run_oracle, worst_excess

Row = dict[str, Any]
LAUNCHED = ("eager", "liger")
_CHECKED: dict[str, float] = {}


def providers(fusion: Fusion, function: Callable[..., Any], statics: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    together = {composite.name: list(members) for composite, members in COMPOSITES}
    ours = {"select": "always", "strict": True, "fusions": together.get(fusion.name, [fusion.name])}
    found = {
        "eager": function,
        "inductor": torch.compile(function, fullgraph=True, dynamic=False),
        "fx_fusion": torch.compile(function, fullgraph=True, dynamic=False, backend="fx_fusion", options=ours),
    }
    if (peer := liger(fusion.name)) is not None:
        found["liger"] = functools.partial(peer, **statics)
    return found


class Bench:
    """One fusion at one size and dtype."""

    def __init__(self, fusion: Fusion, case: Case, dtype: torch.dtype, wanted: list[str], lock: str | None = None):
        self.fusion, self.case, self.dtype, self.lock = fusion, case, dtype, lock
        self.statics = {**fusion.variants[0], **case.statics}
        self.function = reference_of(fusion, self.statics)
        if self.layout() == "b ... c":
            norm = self.function
            self.function = lambda **inputs: read_by_convolution(norm(**inputs))
        torch._dynamo.reset()
        found = providers(fusion, self.function, self.statics)
        self.providers = {p: f for p, f in found.items() if p in wanted}

    def inputs(self, case: Case) -> dict[str, Any]:
        return make_inputs(self.fusion, case, self.statics, self.dtype, "cuda")

    def layout(self) -> str:
        name = self.fusion.tensors[0]
        several = "m" in self.case.sizes
        entries = [dim.name for dim in self.fusion.specs[name].dims if dim.name != "..." or several]
        return self.case.order.get(name, " ".join(entries))

    def excess(self) -> float:
        """Return how much of the allowed error the fused function uses, at a size that float64 can follow; computed once for
        all cases that are checked at the same small size."""
        least = {"m": 512, "v": 512, "s": 512, "b": 4}
        small = {d: min(n, least.get(d, n)) for d, n in self.case.sizes.items()}
        key = repr((self.fusion.name, sorted(small.items()), self.case.scalars, self.layout(), self.statics, self.dtype))
        if key not in _CHECKED:
            inputs = self.inputs(dataclasses.replace(self.case, sizes=small))
            with fx_fusion.recording() as report:
                fused = run(self.providers["fx_fusion"], inputs, frozen=self.fusion.frozen)
            if not any(site.status == "fused" for site in report.sites):
                raise ValueError(f"nothing was fused: {[site.reason for site in report.sites]}")
            eager = run(self.function, inputs, frozen=self.fusion.frozen)
            oracle = run_oracle(self.function, inputs, frozen=self.fusion.frozen)
            used = worst_excess(fused, eager, oracle, self.dtype)[1]
            if used > 1:  # perhaps for elements that are nearly tied
                nearby = eager_nearby(self.function, inputs, oracle, frozen=self.fusion.frozen)
                used = worst_excess(fused, nearby, oracle, self.dtype)[1]
            _CHECKED[key] = used
        return _CHECKED[key]

    def calls(self, provider: str) -> dict[str, timing.Call]:
        """The call of each mode, on fresh inputs; and how many bytes it must move."""
        function, inputs = self.providers[provider], self.inputs(self.case)
        leaves = {
            k: v.requires_grad_(k not in self.fusion.frozen) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in inputs.items()
        }
        detached = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in leaves.items()}
        differentiable = [v for v in leaves.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        outs = list(_as_tuple(function(**detached)))
        upstream = [torch.randn_like(o) for o in outs]
        self.keeps = {"forward": self.why_kept(detached), "forward+backward": self.why_kept(leaves)}
        self.bytes = fewest_bytes(self.fusion, self.case.sizes, self.dtype, leaves, outs)
        del outs

        def forward() -> None:
            function(**detached)

        def both() -> None:
            made = [(o, d) for o, d in zip(_as_tuple(function(**leaves)), upstream, strict=True) if o.requires_grad]
            torch.autograd.grad([o for o, _ in made], differentiable, [d for _, d in made], allow_unused=True)

        return {"forward": forward, "forward+backward": both}

    def why_kept(self, inputs: dict[str, Any]) -> str | None:
        """Return what ``select="auto"`` says to this site: None fuses it."""
        arguments = {**self.statics, **inputs}
        if self.fusion.why_keep is not None and (sentence := self.fusion.why_keep(**arguments)) is not None:
            return sentence
        tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}
        return why_slower_for(self.fusion, tensors, self.statics)

    def compile(self) -> None:
        for provider in ("inductor", "fx_fusion"):
            for call in self.calls(provider).values():
                call()

    def measure(self, rate: float) -> list[Row]:
        """The rows of this cell, of the modes in which something is fused (a bias is no learned one where it has no
        gradient); one row with ``error`` if the fused function is wrong or fails."""
        about = {
            "fusion": self.fusion.name, "case": self.case.name, "sizes": dict(self.case.sizes), "dtype": str(self.dtype)[6:],
            "layout": self.layout(), "statics": dict(self.case.statics),
        }  # fmt: skip
        if (used := self.excess()) > 1:
            return [{**about, "error": f"uses {used:.1f} times the allowed error"}]
        with fx_fusion.recording() as compiled_forward:
            calls = {provider: self.calls(provider) for provider in self.providers}
        with fx_fusion.recording() as compiled_both:
            for found in calls.values():
                found["forward+backward"]()
        modes = [
            mode
            for mode, report in (("forward", compiled_forward), ("forward+backward", compiled_both))
            if not report.sites or any(site.status == "fused" for site in report.sites)  # none: compiled before
        ]
        with alone(self.lock):
            return self.timed(calls, modes, about, rate)

    def timed(self, calls: dict[str, dict[str, timing.Call]], modes: list[str], about: Row, rate: float) -> list[Row]:
        """A row for each of ``modes`` and provider."""
        times = {mode: self.times(calls, mode) for mode in modes}
        inductor = [times[mode].get("inductor", 0.0) for mode in modes]
        if len(modes) == 2 and inductor[0] > 0.8 * inductor[1]:  # something came between
            times["forward"] = self.times(calls, "forward")
        rows = []
        for mode, provider in itertools.product(modes, self.providers):
            call, ms = calls[provider][mode], times[mode][provider]
            rows.append({
                **about, "keeps": self.keeps[mode], "mode": mode, "provider": provider, "ms": round(ms, 5),
                "share": round(self.bytes[mode] / rate / ms * 1e3, 3), "host_us": round(timing.host_us(call), 1),
                "peak_mib": round(timing.peak_mib(call), 1),
            })  # fmt: skip
        return rows

    def times(self, calls: dict[str, dict[str, timing.Call]], mode: str) -> dict[str, float]:
        """Milliseconds by provider. Eager launches from Python, and not every op of it can be captured; compiled functions
        are replayed."""
        of_mode = {provider: found[mode] for provider, found in calls.items()}
        replayed = [p for p in of_mode if p not in LAUNCHED]
        launched = {p: timing.call_ms(call) for p, call in of_mode.items() if p in LAUNCHED}
        return launched | dict(zip(replayed, timing.in_turns([of_mode[p] for p in replayed]), strict=True))


def _as_tuple(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def work(
    names: Sequence[str],
    *,
    case: str = "",
    grid: bool = False,
    dtypes: Sequence[str] = ("bfloat16",),
    modules: Sequence[str] = (),
) -> list[tuple[Fusion, Case, torch.dtype]]:
    """Every cell that is asked for, of built-in fusions, of plug-ins and of several fusions together; without names, of all.

    Args:
        case: only cases with this in their names.
        modules: plug-ins that are not installed; every ``Fusion`` in one of these is registered.
    """
    for module in map(importlib.import_module, modules):
        for found in vars(module).values():
            if isinstance(found, Fusion):
                fx_fusion.register(found)
    known = [*all_fusions(), *(composite for composite, _ in COMPOSITES)]
    fusions = [f for f in known if not names or f.name in names]
    return [(f, c, getattr(torch, d)) for f in fusions for c in cases_of(f, full=grid) if case in c.name for d in dtypes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fusion", nargs="*", help="only these")
    parser.add_argument("--import", nargs="*", dest="modules", metavar="MODULE", help="plug-ins that are not installed")
    parser.add_argument("--case", default="", help="only cases with this in their names")
    parser.add_argument("--grid", action="store_true", help="the whole grid, not only the declared cases")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--providers", default="eager,inductor,fx_fusion,liger")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th cell from the I-th on, for several processes")
    parser.add_argument("--lock", metavar="FILE", help="time while no other process has it: several can share a GPU")
    parser.add_argument("--out", default="bench/results/ops.jsonl")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.run times kernels on a GPU: there is no CUDA device here.")
    torch.backends.cudnn.allow_tf32 = False  # some convolutions would round their inputs, and others not
    dtypes = given.dtypes.split(",")
    cells = work(given.fusion or (), case=given.case, grid=given.grid, dtypes=dtypes, modules=given.modules or ())
    part, parts = map(int, given.part.split("/"))
    cells = cells[part::parts]
    with alone(given.lock):
        rate = 0.0 if given.compile_only else timing.copy_rate()
    rows: list[Row] = []
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    stamp = environment()
    with Progress() as progress, open(given.out, "a") as file:
        for fusion, case, dtype in progress.track(cells, description="compiling" if given.compile_only else "measuring"):
            try:
                bench = Bench(fusion, case, dtype, given.providers.split(","), given.lock)
                if given.compile_only:
                    bench.compile()
                    continue
                made = bench.measure(rate)
            except Exception as error:  # one cell must not cost the others; the row says what happened
                made = [{"fusion": fusion.name, "case": case.name, "dtype": str(dtype)[6:], "error": _first_line(error)}]
            torch.cuda.empty_cache()
            rows += made
            for row in made:
                file.write(json.dumps({**row, "copy_gb_s": round(rate / 1e9), "environment": stamp}) + "\n")
            file.flush()
    if rows:
        print(f"copy rate {rate / 1e9:.0f} GB/s")
        print(tabulate(table(rows), headers=HEADERS))
        print(worst(rows))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


HEADERS = (
    "fusion", "case", "dtype", "mode", "eager", "inductor", "fx_fusion", "liger", "x Inductor", "share", "host us",
    "peak MiB",
)  # fmt: skip


def table(rows: list[Row]) -> list[tuple[Any, ...]]:
    """One line a cell and mode, milliseconds by provider."""
    lines: list[tuple[Any, ...]] = []
    for key in dict.fromkeys((r["fusion"], r["case"], r["dtype"], r.get("mode")) for r in rows):
        found = {
            r.get("provider"): r for r in rows if (r["fusion"], r["case"], r["dtype"], r.get("mode")) == key
        }  # fmt: skip
        if "fx_fusion" not in found or "inductor" not in found:
            lines.append((*key[:3], "", next(iter(found.values())).get("error", "not measured")))
            continue
        ours, base = found["fx_fusion"], found["inductor"]
        ms = [found[p]["ms"] if p in found else "" for p in ("eager", "inductor", "fx_fusion", "liger")]
        lines.append((
            *key, *ms, f"{base['ms'] / ours['ms']:.2f}", ours["share"], f"{base['host_us']:.0f} -> {ours['host_us']:.0f}",
            f"{base['peak_mib']:.0f} -> {ours['peak_mib']:.0f}",
        ))  # fmt: skip
    return lines


def worst(rows: list[Row]) -> str:
    """Return where ``select="auto"`` is furthest behind Inductor; a cell that it keeps is Inductor's own."""
    by_key = {(r["fusion"], r["case"], r["dtype"], r.get("mode"), r.get("provider")): r for r in rows}
    ratios: list[tuple[float, str]] = []
    for (*cell, provider), ours in by_key.items():
        base = by_key.get((*cell, "inductor"))
        if provider == "fx_fusion" and base is not None:
            ratios.append((1.0 if ours["keeps"] else base["ms"] / ours["ms"], " ".join(map(str, cell))))
    if not ratios:
        return "no cell was measured"
    ratio, cell = min(ratios)
    return f'{len(ratios)} cells; the worst under select="auto": {ratio:.3f} of Inductor\'s speed, {cell}'


if __name__ == "__main__":
    main()
