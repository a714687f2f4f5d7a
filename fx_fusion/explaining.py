"""``fx_fusion.explain(model, *args)``: what the backend would do, without training a step; and ``fx_fusion.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fx_fusion.backend import compile_graph
from fx_fusion.errors import OptionError
from fx_fusion.graph.devices import planned_gpu
from fx_fusion.graph.snapshot import snapshot
from fx_fusion.options import NAMES, Options, parse
from fx_fusion.report.recording import recording
from fx_fusion.report.report import Report
from fx_fusion.torch_internals.dynamo_caches import APART, leaving_no_trace

_TORCHS_OWN = ("guard_filter_fn", "use_aoti")  # options that torch.compile takes out before a backend sees them


def compile(
    model: Callable[..., Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Any:  # fmt: skip
    """``torch.compile(model, backend="fx_fusion", **kwargs)`` with a mode and options together, which are checked now.

    torch.compile itself asks a backend at the first call, and takes a mode or options: ``options={"mode": ...}`` has both.

    Raises:
        TypeError: ``model`` can't be called, or an option is given as an argument.
        OptionError: an option or mode that nobody knows, or a value of the wrong type.
    """
    if not callable(model):
        raise TypeError(f"compile() takes a module or a function; got {model!r}")
    if "backend" in kwargs:
        raise TypeError('compile() is torch.compile with backend="fx_fusion": leave backend= out')
    if misplaced := sorted(kwargs.keys() & NAMES):
        given = ", ".join(f'"{name}": {kwargs[name]!r}' for name in misplaced)
        raise TypeError(f"{misplaced[0]} is an option: compile(model, options={{{given}}})")
    known = options if not isinstance(options, Mapping) else {n: v for n, v in options.items() if n not in _TORCHS_OWN}
    parse(mode, known)
    both = {**(options or {}), **({} if mode is None else {"mode": mode})}
    return torch.compile(model, backend="fx_fusion", **({"options": both} if both else {}), **kwargs)


def explain(model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Capture ``model(*args, **kwargs)``, rewrite its graphs, run them eagerly once, and return the report.

    Nothing is compiled by Inductor and nothing is kept: the parameters, compiled versions and Dynamo's caches stay as they
    are, however often this is called. The model runs once, with what that does to its buffers (BatchNorm in training), to
    random numbers and to arguments that it writes to. Gradients are not computed. Not for several threads at once.

    Args:
        model: a module or function.
        options: as for ``torch.compile(model, backend="fx_fusion", options=...)``.

    Raises:
        TypeError: ``model`` can't be called.
        OptionError: an option that nobody knows.
    """
    if not callable(model):
        raise TypeError(f"explain() takes a module or a function, and what it is called with; got {model!r}. "
                        "A type of model by its name: python -m fx_fusion explain NAME")  # fmt: skip
    parsed = parse(None, options)
    if planned_gpu() and parsed.select == "measure":
        raise OptionError(f"options['select'] = 'measure' times this machine, not the {planned_gpu()} that is planned for.")

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        untouched = snapshot(gm)
        compiled = compile_graph(gm, example_inputs, parsed, _as_it_is)
        return untouched.forward if planned_gpu() else compiled  # what is planned for another device may not run on this one

    with leaving_no_trace(), recording() as report:
        torch.compile(getattr(model, "_orig_mod", model), backend=backend, **APART)(*args, **kwargs)
    if not report.graphs:
        warnings.warn("fx_fusion.explain: Dynamo captured no graph of this call; see TORCH_LOGS=graph_breaks.", stacklevel=2)
    return report


def _as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    return gm.forward
