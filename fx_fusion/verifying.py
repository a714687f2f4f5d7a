"""``fx_fusion.verify(model, *args)``: one training step under fx_fusion beside eager's, both measured against float64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fx_fusion.accuracy import Compared, Double, alike, compare, doubled
from fx_fusion.backend import compile_graph
from fx_fusion.errors import VerificationError
from fx_fusion.options import Options, parse
from fx_fusion.report.recording import recording
from fx_fusion.report.report import Report
from fx_fusion.report.site import Site
from fx_fusion.report.verdict import counted
from fx_fusion.torch_internals.containers import tree_map_only
from fx_fusion.torch_internals.dynamo_caches import APART, leaving_no_trace

_Values = dict[str, Tensor]
_GRADIENT = "gradient of "


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        rows: everything that was compared, the worst first.
        report: what was fused.
        blame: the replacement without which all is well, where something is not.
    """

    rows: tuple[Compared, ...]
    report: Report
    blame: Site | None = None

    @property
    def ok(self) -> bool:
        """Return True if every output and every gradient is as accurate as the rule asks."""
        return all(row.ok for row in self.rows)

    @property
    def nothing_replaced(self) -> str:
        """A sentence where no site was replaced, so that Inductor alone was compared; else empty."""
        if any(site.status == "fused" for site in self.report.sites):
            return ""
        kept = sum(site.status == "kept" for site in self.report.sites)
        if kept and any(graph.options["select"] != "always" for graph in self.report.graphs):
            return (f"nothing was replaced: {counted(kept, 'site')} kept with Inductor; "
                    'options={"select": "always"} (--select always) replaces and compares them')  # fmt: skip
        return "nothing was replaced, not even by options={\"select\": \"always\"}: print(found.report) says why"

    def __str__(self) -> str:
        fused = sum(site.status == "fused" for site in self.report.sites)
        wrong = sum(not row.ok for row in self.rows)
        verdict = f"{wrong} WRONG" if wrong else "all right"
        gradients = any(row.name.startswith(_GRADIENT) for row in self.rows)
        compared = f"{len(self.rows)} outputs and gradients" if gradients else counted(len(self.rows), "output")
        shown = [(row.name, f"{row.error:.2e}", f"{row.usual:.2e}", f"{row.allowed:.2e}", "" if row.ok else "wrong")
                 for row in self.rows[:8]]  # fmt: skip
        lines = [
            f"{compared}, {counted(fused, 'site')} fused: {verdict}",
            tabulate(shown, headers=("the worst", "error", "eager's", "allowed", ""), disable_numparse=True),
        ]
        if self.blame is not None:
            module = self.blame.module or "the model itself"
            place = f"{self.blame.fusion} in {module} ({self.blame.location})"
            lines.append(f'right without {place}: options={{"fusions": ["-{self.blame.fusion}"]}}')
        elif not self.ok:
            lines.append('wrong without any replacement too: compare torch.compile(model, backend="aot_eager")')
        if self.nothing_replaced:
            lines.append(self.nothing_replaced)
        return "\n".join(lines)


def verify(model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Verification:
    """Run ``model(*args, **kwargs)`` and its backward three times, in eager, under fx_fusion with Inductor, and in float64,
    and compare every output and every gradient. Where one is wrong, find out by bisection which replacement makes it so.

    The rule: the error of fx_fusion against float64 is at most twice eager's, and two roundings of the dtype. The backward
    is that of ``loss`` if the output has one, else of a random weighing of all outputs. Parameters, their gradients,
    buffers, random state and Dynamo's caches are as before. Takes the memory of a copy of the model in float64.

    Args:
        model: in training or evaluation mode. Dropout must be off: its random numbers have no float64 twin.
        options: as for ``torch.compile(model, backend="fx_fusion", options=...)``.

    Raises:
        TypeError: ``model`` is no module.
        VerificationError: the model is random, has no float64 twin, or no floating-point output.
        OptionError: an option that nobody knows.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"verify() takes a module (torch.nn.Module), and what it is called with; got {model!r}. "
                        "What a function does: as the forward of a module")  # fmt: skip
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    parsed = replace(parse(None, options), fuel=None)
    exact_model = _in_double(model)
    with _as_before(model):
        usual = _step(model, model, args, kwargs)
        if not alike(usual, _step(model, model, args, kwargs, seed=1)):
            raise VerificationError("the model draws random numbers: call model.eval(), or set its dropout to 0")
        with Double():
            exact = _step(exact_model, exact_model, *tree_map_only(Tensor, doubled, (args, kwargs)))
        del exact_model
        ours, report = _under(parsed, model, args, kwargs)
        rows = compare(ours, usual, exact)
        blame = None
        if not all(row.ok for row in rows):
            blame = _blame(parsed, report, lambda o: _under(o, model, args, kwargs), usual, exact)
    return Verification(tuple(rows), report, blame)


# -- steps --------------------------------------------------------------------------------------------------------------
def _step(model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, *, seed: int = 0) -> _Values:
    """The outputs of a call, and the gradients of its parameters, by name. Buffers are as before afterwards."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    buffers = [(b, b.clone()) for b in model.buffers()]
    outputs = dict(_tensors("output", call(*args, **kwargs)))
    if not outputs:
        raise VerificationError("the model has no floating-point output: nothing can be compared")
    values = {name: output.detach().clone() for name, output in outputs.items()}
    lossy = {n: o for n, o in outputs.items() if o.requires_grad}
    if "loss" in lossy:
        lossy["loss"].backward()
    elif lossy:
        weighed = (o.double() * _weights(o) for o in lossy.values())
        torch.stack([w.sum() for w in weighed]).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values[f"{_GRADIENT}{name.replace('_orig_mod.', '')}"] = parameter.grad.detach().clone()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return values


def _weights(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output.device).double()


def _tensors(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _tensors(str(key) if name == "output" else f"{name}.{key}", value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(field.name if name == "output" else f"{name}.{field.name}", getattr(output, field.name))
    elif isinstance(output, (tuple, list)):
        for i, value in enumerate(output):
            yield from _tensors(f"{name}.{i}", value)


def _under(options: Options, model: nn.Module, args: Any, kwargs: Any) -> tuple[_Values, Report]:
    backend = functools.partial(compile_graph, options=options)
    with leaving_no_trace(), recording() as report:
        compiled = torch.compile(model, backend=backend, **APART)
        return _step(model, compiled, args, kwargs), report


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Afterwards gradients and random numbers are what they were."""
    gradients = [(p, p.grad) for p in model.parameters()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


# -- float64 ------------------------------------------------------------------------------------------------------------
def _in_double(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model).double()
    except Exception as error:
        raise VerificationError(f"the model can't be copied to float64: {type(error).__name__}: {error}") from error


# -- blaming ------------------------------------------------------------------------------------------------------------
def _blame(
    options: Options, report: Report, under: Callable[[Options], tuple[_Values, Report]], usual: _Values, exact: _Values
) -> Site | None:
    """The first replacement with which something is wrong, by bisection; None if it is wrong without any."""
    right, wrong = -1, sum(site.status == "fused" for site in report.sites)
    sites = {wrong: report.sites}
    while wrong - right > 1:
        middle = (right + wrong) // 2
        values, found = under(replace(options, fuel=middle))
        sites[middle] = found.sites
        if all(row.ok for row in compare(values, usual, exact)):
            right = middle
        else:
            wrong = middle
    if right < 0:
        return None
    before = {(s.fusion, s.nodes) for s in sites[right] if s.status == "fused"}
    return next((s for s in sites[wrong] if s.status == "fused" and (s.fusion, s.nodes) not in before), None)
