"""The function that a fusion stands for, and its line where a near miss stopped."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from torch import fx

from fx_fusion.fusion.declaration import Fusion
from fx_fusion.fusion.pattern import Pattern, patterns_of
from fx_fusion.fusion.tracing import trace
from fx_fusion.report.site import Site


class Reference(NamedTuple):
    """A function's source. ``line``: of it, from 1; 0 where no line is meant."""

    source: str
    line: int = 0


def reference(fusion: Fusion, site: Site) -> Reference:
    """Return what stands beside a site: the fusion's pattern; for a near miss the spelling that came near, and the line of
    the op that the graph has not. It is read off the sentence of the matcher, so another sentence has no line."""
    matched, total = site.matched
    said = re.search(r"expected ([^\s,]+), found", site.reason) or re.search(r": (\w+) is over ", site.reason)
    hinted = (op for (op, _), hint in fusion.hints.items() if hint in site.reason)
    expected = said[1] if said else next(hinted, None)
    if fusion.find is None and total and expected:
        for pattern in patterns_of(fusion):
            if len(pattern.terms) == total and (found := _at(pattern, expected, matched)):
                return found
    return Reference(source_of(fusion.pattern))


def instead_of(fusion: Fusion, site: Site) -> str:
    """Return what to write for a near miss. Empty where a hint of the fusion says that the site computes something else."""
    is_hinted = any(hint in site.reason for hint in fusion.hints.values())
    return fusion.instead if site.status == "near" and (not is_hinted or "write " in site.reason) else ""


@functools.cache
def source_of(function: Callable[..., Any] | CodeType) -> str:
    """A function's lines; empty where there is no file (a notebook that is gone, a frozen application)."""
    try:
        return inspect.getsource(function)
    except OSError:
        return ""


@functools.cache
def _at(pattern: Pattern, expected: str, matched: int) -> Reference | None:
    """The pattern's line with an op or number ``expected``, of several the one that the matcher comes to after ``matched``
    others."""
    walked = list(_walk(pattern, pattern.root, set()))
    fitting = [i for i, node in enumerate(walked) if pattern.terms[node].op == expected]
    fitting = fitting or [i for i, node in enumerate(walked) if expected in map(str, pattern.terms[node].operands)]
    if not fitting:
        return None
    node = walked[min(fitting, key=lambda i: abs(i - matched))]
    own = source_of(pattern.function)
    code, line = _lines(pattern).get(node.name, (pattern.function.__code__, 0))
    if code is pattern.function.__code__:
        return Reference(own, line)
    helper = source_of(code)
    return Reference(f"{own}\n{helper}", line + own.count("\n") + 1) if helper else Reference(own)


def _walk(pattern: Pattern, node: Any, seen: set[fx.Node]) -> Iterator[fx.Node]:
    """The pattern's terms in the matcher's order: each before its operands."""
    if node in pattern.terms and node not in seen:
        seen.add(node)
        yield node
        for operand in pattern.terms[node].operands:
            yield from _walk(pattern, pattern.view.folded(pattern.view.edge(operand).base), seen)


def _lines(pattern: Pattern) -> dict[str, tuple[CodeType, int]]:
    """Return for each node, by name, the function that makes it (the pattern's, or a helper of it), and its line there, from
    1."""
    lines: dict[str, tuple[CodeType, int]] = {}

    class Recording(fx.proxy.GraphAppendingTracer):
        def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
            node = super().create_node(*args, **kwargs)
            frame = inspect.currentframe()
            frame = None if frame is None else frame.f_back
            while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "torch":
                frame = frame.f_back
            if frame is not None:
                lines[node.name] = frame.f_code, frame.f_lineno - frame.f_code.co_firstlineno + 1
            return node

    trace(pattern.function, pattern.parameters, pattern.statics, Recording)
    return lines
