"""Why a captured graph ends where it does: Dynamo's reason, where, and its first hint."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx
from torch._dynamo.utils import counters

_seen: Counter[str] = Counter()


def why_it_ends(gm: fx.GraphModule) -> str:
    """One line on the graph break behind this graph; empty where the graph ends because the function returns."""
    global _seen
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    now: Counter[str] = Counter(counters["graph_break"])
    new, _seen = now - _seen, now
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    said = next(iter(new), "") or str(getattr(reason, "reason", ""))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    hint = next((line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")), "")
    stack = getattr(reason, "user_stack", None)
    at = f" at {stack[-1].filename.rsplit('/', 1)[-1]}:{stack[-1].lineno}" if stack else ""
    return f"graph break{at}: {lines[0] if lines else 'no reason given'}.{' ' + hint if hint else ''}"
