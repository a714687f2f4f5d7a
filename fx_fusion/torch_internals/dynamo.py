"""Dynamo: its control flow, the compilation that is running, why a graph ends."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import fx

from fx_fusion.torch_internals import inductor

_Function = TypeVar("_Function", bound=Any)

try:
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    CONTROL_FLOW: tuple[type[BaseException], ...] = (RestartAnalysis, SkipFrame)
except ImportError:  # a restart is then taken for a failure: the graph is compiled without rewrites
    CONTROL_FLOW = ()

try:
    from torch._dynamo.exc import TorchDynamoException

    NOT_COMPILED: tuple[type[BaseException], ...] = (TorchDynamoException,)
except ImportError:  # what a version of a graph fails with while it is compiled ends the program then
    NOT_COMPILED = ()


def as_it_is(error: Exception, frame: FrameType | None) -> Exception:
    """An error of the class of ``error``, with its message, that Dynamo hands to the user without the frames of its own that
    called ``frame``. Gone: the error itself, which Dynamo puts into a BackendCompilerFailed."""
    passes: Any = getattr(getattr(torch._dynamo, "exc", None), "ShortenTraceback", None)
    if passes is None:
        return error
    kind = type(type(error).__name__, (passes, type(error)), {"__module__": type(error).__module__})
    return kind(*error.args, first_useful_frame=frame)


def current_compile_id() -> tuple[str, int]:
    """The id of the code that is being compiled, with how often Dynamo was reset before (its ids begin anew then), and its
    attempt at it. Gone: ``("", 0)``, and the report keeps graphs of attempts that were given up."""
    context: Any = getattr(getattr(torch, "_guards", None), "CompileContext", None)
    trace = context.current_trace_id() if hasattr(context, "current_trace_id") else None
    if trace is None:
        return "", 0
    return f"{trace.compile_id}{f' after reset {_resets}' if _resets else ''}", trace.attempt


_BETWEEN_COMPILATIONS = ("enable_compiler_collectives", "caching_precompile")


def compiling_alone() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo compile inside for this process alone: it does not talk to other ranks, which need not compile, and keeps
    nothing for another process, which would have to know the graph around. Gone: nothing."""
    config = torch._dynamo.config
    on = {name: False for name in _BETWEEN_COMPILATIONS if getattr(config, name, False)}
    return config.patch(**on) if on else contextlib.nullcontext()


_resets = 0


def when_dynamo_is_reset() -> None:
    """Do what ``torch._dynamo.reset()`` asks of a backend: Inductor's part of it, and the ids of code begin anew. Gone, or
    not called: a report that is recorded over a reset may lose graphs."""
    global _resets
    _resets += 1
    inductor.reset()


def is_compiling() -> bool:
    """Return True if Dynamo or a backend is at work in this thread. Gone: only where Dynamo is."""
    if torch.compiler.is_dynamo_compiling():
        return True
    context = getattr(getattr(torch, "_guards", None), "CompileContext", None)
    return context is not None and context.current_compile_id() is not None


def sets_hooks_behind() -> bool:
    """Return True if the function that is being captured sets hooks on tensors, which Dynamo does behind the call of its
    graph. Gone: False, and hooks on deferred logits that a compiled loss sets itself are not called."""
    translator: Any = getattr(getattr(torch._dynamo, "symbolic_convert", None), "InstructionTranslator", None)
    try:
        return bool(translator.current_tx().output.side_effects.tensor_hooks)
    except AttributeError:
        return False


def is_asking() -> bool:
    """Return True if Dynamo or its guards called the function that calls this one, not AOTAutograd.
    Gone: False, and a graph that deferred logits go into is not captured: PyTorch raises."""
    caller = str(sys._getframe(2).f_globals.get("__name__", ""))
    return caller.startswith(("torch._dynamo.", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.meta_utils"))


def never_captured(function: _Function) -> _Function:
    """The function, which Dynamo may inline where it traces a call of it, and else leaves alone, with all that it calls. (In
    a frame that Dynamo captures, ``is_compiling`` is taken for true.) Gone: the function as it is."""
    try:
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
        from torch._dynamo.types import FrameAction, FrameExecStrategy
    except ImportError:
        return function
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function


_breaks_before: ContextVar[Counter[str]] = ContextVar("graph breaks before", default=Counter())  # noqa: B039  never written to


def why_it_ends(gm: fx.GraphModule) -> str:
    """One line on the graph break behind a captured graph: Dynamo's reason, where, and its first hint. Empty where the graph
    ends because the function returns. Gone: empty."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    now = _graph_breaks()
    before = _breaks_before.get()
    # Dynamo counts breaks by their text; a reset of the counters starts anew.
    new = now - before if all(now[text] >= count for text, count in before.items()) else now
    _breaks_before.set(now)
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    text = next(iter(new), "") or str(getattr(reason, "reason", ""))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    hint = next((line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")), "")
    if (logs := re.search(r"method: <Logger .*?>\.(\w+)", text)) is not None:
        hint = f"Its message aside, torch._dynamo.config.ignore_logging_functions.add(logging.Logger.{logs[1]}) mends it."
    stack = getattr(reason, "user_stack", None)
    at = f" at {stack[-1].filename.rsplit('/', 1)[-1]}:{stack[-1].lineno}" if stack else ""
    return f"graph break{at}: {lines[0] if lines else 'no reason given'}.{' ' + hint if hint else ''}"


def _graph_breaks() -> Counter[str]:
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return Counter()
    return Counter(counters["graph_break"])


def parameter_path(node: fx.Node) -> str:
    """The path of the parameter or buffer that an input of a captured graph is, as ``layers.0.norm.weight``; empty for any
    other node. Gone: empty, and the report's graphs name inputs as Dynamo does."""
    parts: list[str] = []
    source = getattr(node, "_dynamo_source", None)
    while source is not None:
        base = getattr(source, "base", None)
        if getattr(base, "member", "") in ("_modules", "_parameters", "_buffers"):
            parts.append(str(getattr(source, "index", "")))
        elif not parts:
            return ""
        source = base
    return ".".join(reversed(parts))


def take_sources(gm: fx.GraphModule, source: fx.GraphModule) -> None:
    """Note on a copy of a captured graph what Dynamo noted on ``source``: where its inputs come from, which of them keep
    their address (CUDA graphs copy all others), and why it ends. Gone: a copy is a graph that nobody captured."""
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(source, name):
            setattr(gm, name, getattr(source, name))
    both = zip(*(module.graph.find_nodes(op="placeholder") for module in (gm, source)), strict=True)
    for node, original in both:
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source


def publish_artifact(name: str, payload: Any) -> None:
    """Add an artifact to the structured trace (``TORCH_TRACE``, read by tlparse); ``payload`` returns its text.
    Gone: nothing is added."""
    try:
        from torch._logging import trace_structured
    except ImportError:
        return
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload)


def capturing_items() -> contextlib.AbstractContextManager[Any]:
    """Let what is compiled inside keep ``tensor.item()`` in its graph. Gone: the graph breaks there, and is right."""
    patch = getattr(torch._dynamo.config, "patch", None)
    return contextlib.nullcontext() if patch is None else patch(capture_scalar_outputs=True)
