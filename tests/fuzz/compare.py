"""Define what two runs of a program have in common: values by the 2x rule against float64, everything else exactly."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fx_fusion.accuracy import same_kinds
from fx_fusion.errors import StaleTensorError
from tests.fuzz.program import Program


@dataclass
class Call:
    """What one call gave: numbers and facts by name, or the error it raised."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


@dataclass
class Verdict:
    """``failure`` is empty where everything agrees. ``judged``: how many calls there was something to compare of."""

    failure: str = ""
    judged: int = 0
    blind: int = 0  # numbers that float64 says nothing about: compared with eager by a tolerance
    fused: Counter[str] = field(default_factory=Counter)
    report: Any = None
    graphs: int = 0


def parted(name: str, found: Tensor, usual: Tensor, exact: Tensor | None, dtype: torch.dtype) -> tuple[float, bool]:
    """Return how much of what is allowed the difference uses (more than 1 is a failure), and whether float64 said
    nothing."""
    if not usual.is_floating_point():
        return (0.0 if torch.equal(found, usual) else float("inf")), False
    found, usual = found.double(), usual.double()
    if found.shape != usual.shape:
        return float("inf"), False
    if not usual.numel():
        return 0.0, False
    eps = torch.finfo(dtype).eps
    if not same_kinds(found, usual):
        if exact is None or exact.shape != usual.shape or not same_kinds(found, exact):
            return float("inf"), False
        usual, exact = exact.double(), None  # eager overflows where float64 and fx_fusion do not
    known = exact is not None and exact.shape == usual.shape and torch.equal(exact.isfinite(), usual.isfinite())
    if known:
        exact = exact.double()
        unit = max(largest(exact), 1.0 if name.startswith("d") else 0.0) or 1.0
        error = largest(usual - exact) / unit
        if error < 8 * eps**0.5:
            return largest(found - exact) / unit / (2 * error + 2 * eps), False
    unit = max(largest(usual), 1.0 if name.startswith("d") else 0.0) or 1.0
    return largest(found - usual) / unit / (8 * eps**0.5), True


def largest(t: Tensor) -> float:
    return t.nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def compare(
    program: Program, found: list[Call], usual: list[Call], exact: list[Call], verdict: Verdict, allowed: float = 1.0
) -> None:
    """Write into ``verdict`` what parts first. A call that raises in eager, and those behind it, judge nothing."""
    dtype = program.coarsest()
    for n, (a, b) in enumerate(zip(found, usual, strict=False)):
        if b.error is not None:
            return
        if a.error is not None:
            if _by_design(a.error, program):
                return
            verdict.failure = f"call {n} raises {_said(a.error)}"
            return
        verdict.judged += 1
        for name, fact in b.facts.items():
            if a.facts.get(name) != fact:
                verdict.failure = f"call {n}, {name}: {a.facts.get(name)} for {fact}"
                return
        truth = exact[n].numbers if n < len(exact) and exact[n].error is None else {}
        for name, value in b.numbers.items():
            used, blind = parted(name, a.numbers[name], value, truth.get(name), dtype)
            verdict.blind += blind
            if used > allowed:
                verdict.failure = (
                    f"call {n}, {name}: {used:.3g} times the allowed error{' (against eager)' if blind else ''}"
                )
                return


def _by_design(error: Exception, program: Program) -> bool:
    """A deferred output is refused if its sources were changed in place. And as with any compiler, what is saved for the
    backward may be another tensor than in eager (an argument, not a copy of it), which a caller must not change."""
    if isinstance(error, StaleTensorError):
        return program.writes()
    source = program.source()
    between = bool(program.after) or any(text in source for text in ("graph_break", "disable"))
    told = ("modified by an inplace operation", "another view of its base has been modified inplace")
    return any(words in str(error) for words in told) and program.writes() and between


def _said(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fx_fusion/" in f.filename]
    where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error).strip()[:400]}{where}"
