"""Runs a program in eager, in float64 and through the rewriter, and says where they part.

Compared are outputs, their types, gradients, the arguments after the call, and which outputs share memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.backend import compile_graph, inductor
from fx_fusion.kernels.logits import logit_chunks
from fx_fusion.memory import candidates
from fx_fusion.options import parse
from fx_fusion.patterns import linear_rows
from fx_fusion.rewrite import returned_logits, rows_apart
from fx_fusion.testing import eager_rest
from tests.fuzz.compare import Call, Verdict, compare, largest
from tests.fuzz.oracle import in_double
from tests.fuzz.program import CALLS, Program, functions
from tests.fuzz.programs_loss import V
from tests.partitioned import Partitioned, partitioning
from tests.structured_masks import structures_on_cpu

RESTS: dict[str, Callable[..., Any]] = {
    "eager": eager_rest,
    "aot_eager": lambda gm, inputs, options: aot_eager(gm, list(inputs)),
    "partitioned": partitioning(Partitioned()),  # with everything computed again that is cheap
    "inductor": inductor,
}
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def ours(rest: str) -> Callable[..., Any]:
    """A backend that rewrites wherever it is legal; without ``strict`` an error of ours would be hidden."""
    options = {"select": "always", "strict": True, "memory": "min" if rest == "partitioned" else "auto"}
    return functools.partial(compile_graph, options=parse(None, options), rest=RESTS[rest])


def plain(rest: str) -> Callable[..., Any]:
    """The same without the rewrite."""
    options = parse(None, {"memory": "speed"})
    return lambda gm, inputs: RESTS[rest](gm, inputs, options)


def execute(program: Program, compiled: Compile, double: bool = False, nudge: int = 0) -> list[Call]:
    """Every call of a program, up to the first that raises."""
    made = functions(program.source(), double)
    function, second = compiled(made["program"]), compiled(made["second"])
    calls: list[Call] = []
    for n in range(CALLS):
        call = Call()
        calls.append(call)
        try:
            given, leaves = _arguments(program, n, double, nudge)
            with in_double(getattr(torch, program.dtype)) if double else contextlib.nullcontext():
                results = _results(program, function, given, made["after"], second, double)
                _record(call, results, given, leaves)
        except Exception as error:
            call.error = error
            break
    return calls


def _arguments(program: Program, call: int, double: bool, nudge: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments, and the leaves whose gradients count."""
    given, leaves = program.made(call), {}
    for name, value in given.items():
        if isinstance(value, torch.nn.Module):
            given[name] = value.double() if double else value
            leaves.update({f"{name}.{n}": p for n, p in value.named_parameters()})
        elif isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            if nudge and value.is_floating_point():
                noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(nudge)) - 0.5
                value = (value.double() * (1 + torch.finfo(value.dtype).eps * noise)).to(value.dtype)
            if double:  # keeps strides, zero ones too
                wider = torch.complex128 if value.is_complex() else torch.float64
                value = _as_strided_like(value, wider)
            kind = program.inputs[name].grad
            if kind:
                leaves[name] = value = value.detach().requires_grad_()
            given[name] = value * 1 if kind == "made" else value
    return given, leaves


def _as_strided_like(value: Tensor, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return whole.to(dtype).as_strided(value.shape, value.stride(), value.storage_offset())


def _results(program: Program, function: Any, given: dict[str, Any], after: Any, second: Any, double: bool) -> list[Any]:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with contextlib.ExitStack() as stack:
        if program.mode in modes:
            stack.enter_context(modes[program.mode]())
        if program.outer == "autocast" and not double:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        if program.outer == "checkpoint":
            results = checkpoint(
                lambda *args: function(**dict(zip(given, args, strict=True))), *given.values(), use_reentrant=False
            )
        else:
            results = function(**given)
        return _without_groups(after(list(results), second))


def _without_groups(results: list[Any]) -> list[Any]:
    """Results with the tensors of a tuple (``split``) one by one."""
    groups = [list(item) if isinstance(item, (tuple, list)) and any(map(torch.is_tensor, item)) else [item] for item in results]
    return [item for group in groups for item in group]


def _record(call: Call, results: list[Any], given: dict[str, Any], leaves: dict[str, Tensor]) -> None:
    """Values first, then gradients, then who sees a write to whom."""
    tensors = {f"out{i}": t for i, t in enumerate(results) if isinstance(t, Tensor)}
    for name, item in ((f"out{i}", item) for i, item in enumerate(results) if not isinstance(item, Tensor)):
        if isinstance(item, (list, float)):  # of .tolist(), .item(): numbers like any others
            call.numbers[name] = torch.tensor(item, dtype=torch.float64)
            call.facts[f"type of {name}"] = tuple(call.numbers[name].shape)
        else:
            call.facts[name] = item
    for name, t in tensors.items():
        strides = tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()
        call.facts[f"type of {name}"] = (tuple(t.shape), strides, str(t.dtype), t.requires_grad)
        call.numbers[name] = t.detach().clone()
    pairs = [(t, _direction(t)) for t in tensors.values() if t.requires_grad and t.is_floating_point()]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [dy for _, dy in pairs])
    for name, leaf in leaves.items():
        call.numbers[f"d{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach().clone()
    arguments = {f"argument {n}": v for n, v in given.items() if isinstance(v, Tensor)}
    call.numbers.update({n: t.detach().clone() for n, t in arguments.items()})
    everything = {**tensors, **arguments}
    for name, t in tensors.items():
        if t.is_floating_point() and t.numel():
            call.facts[f"who sees a write to {name}"] = _seen_by(t, everything)


def _direction(t: Tensor) -> Tensor:
    """Return what an output is differentiated by; made of integers, which are the same in float64."""
    return (torch.randint(-128, 129, t.shape, generator=torch.Generator().manual_seed(7)).double() / 64).to(t.dtype)


def _seen_by(written: Tensor, everything: dict[str, Tensor]) -> Any:
    def values() -> dict[str, Tensor]:
        return {n: t.detach().clone().nan_to_num(9.0) for n, t in everything.items()}

    before = values()
    try:
        with torch.inference_mode(written.is_inference()), torch.no_grad():
            written.copy_((written != 1).to(written.dtype))  # every value is another then; 3648 + 8 is 3648 in bfloat16
    except RuntimeError:  # several elements are one, or a view that autograd forbids to write to
        return "refused"
    after = values()
    return tuple(n for n in everything if not torch.equal(before[n], after[n]))


def judge(program: Program, rest: str = "eager", count_graphs: bool = False) -> Verdict:
    """The verdict on a program; with ``count_graphs``, more graphs than Dynamo makes without the rewrite fail too."""
    verdict = Verdict()
    with quiet():
        usual = execute(program, lambda f: f)
        if usual[0].error is not None:
            return verdict
        exact = execute(program, lambda f: f, double=True)
        found, verdict.report = _through(program, ours(rest))
        verdict.graphs = len(verdict.report.graphs)
        verdict.fused.update(s.fusion for s in verdict.report.sites if s.status == "fused")
        compare(program, found, usual, exact, verdict)
        if "allowed error" in verdict.failure:
            verdict = _once_more(program, found, usual, exact, verdict)
        if verdict.failure or count_graphs:
            _without_the_rewrite(program, rest, usual, exact, verdict)
    return verdict


def _once_more(program: Program, found: list[Call], usual: list[Call], exact: list[Call], verdict: Verdict) -> Verdict:
    """Eager where it is furthest from the truth, at inputs next to these: its own error there may have been luck. And
    half as strictly: the rule is about one fusion, a program may have several, behind each other."""
    for nudge in range(1, 9):
        for here, there, truth in zip(usual, execute(program, lambda f: f, nudge=nudge), exact, strict=False):
            for name, value in there.numbers.items():
                mine = here.numbers.get(name)
                if mine is None or not value.is_floating_point() or name not in truth.numbers:
                    continue
                right = truth.numbers[name].double()
                if (
                    right.shape == value.shape == mine.shape
                    and value.numel()
                    and largest(value.double() - right) > largest(mine.double() - right)
                ):
                    here.numbers[name] = value
    again = Verdict(fused=verdict.fused, report=verdict.report, graphs=verdict.graphs)
    compare(program, found, usual, exact, again, allowed=2.0)
    return again


def _without_the_rewrite(program: Program, rest: str, usual: list[Call], exact: list[Call], verdict: Verdict) -> None:
    """Return what fails without the rewrite too is not ours: then nothing was judged."""
    graphs: list[int] = []
    backend = plain(rest)

    def counting(gm: Any, inputs: Any) -> Any:
        graphs.append(1)
        return backend(gm, inputs)

    without = Verdict()
    found, _ = _through(program, counting)
    compare(program, found, usual, exact, without)
    if without.failure:
        verdict.failure, verdict.judged = "", 0
    elif not verdict.failure and verdict.graphs > len(graphs) and not any(g.assumes or g.unassumed for g in verdict.report.graphs):
        verdict.failure = f"{verdict.graphs} graphs for {len(graphs)}"


def _through(program: Program, backend: Callable[..., Any]) -> tuple[list[Call], Any]:
    torch._dynamo.reset()
    with fx_fusion.recording() as report, structures_on_cpu(), _small(program):
        found = execute(program, lambda f: torch.compile(f, backend=backend, dynamic=program.dynamic))
    torch._dynamo.reset()
    return found, report


@contextlib.contextmanager
def _small(program: Program) -> Iterator[None]:
    """Few elements are many; of losses of rows few classes too, and chunks have few rows."""
    changes: list[Any] = [mock.patch.object(candidates, "_SMALLEST", 1)]
    if program.family.startswith("rows_"):
        changes += [mock.patch.object(module, "_FEWEST_CLASSES", 1) for module in (linear_rows, rows_apart, returned_logits)]
        changes.append(mock.patch.object(returned_logits, "_FEWEST_LOGITS", {"cpu": 1}))
        changes.append(mock.patch.object(logit_chunks, "_CHUNK_BYTES", {"cpu": (4 * V * 4,) * 2}))
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Symbolic ints for ``.item()``, and no logs about graph breaks."""
    level = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch").setLevel(level)
